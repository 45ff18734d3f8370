"""Rows: parsed from an input file, put in order, and written to result files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from bros.batch.objects import (
    MAX_ERRORS,
    MAX_LINE_BYTES,
    MAX_ROWS,
    LineError,
    RowRef,
    TokenUsage,
    is_storable,
)
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.request import Slo
from bros.text.json_numbers import wrong_number
from bros.text.json_text import JsonParts, excess_of, is_text

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
"""Endpoints that rows can use."""

KNOWN_ENDPOINTS = (
    *ENDPOINTS,
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/videos",
)
"""Endpoints of OpenAI's batch API."""


def check_endpoint(endpoint: str) -> None:
    """Raises InvalidRequestError unless rows can use it."""
    if endpoint in ENDPOINTS:
        return
    served = " and ".join(ENDPOINTS)
    known = endpoint in KNOWN_ENDPOINTS
    reason = "is not served here" if known else "does not exist"
    raise InvalidRequestError(
        f"The endpoint {endpoint[:100]!r} {reason}; batches can use {served}.",
        param="endpoint",
        code="unsupported_endpoint" if known else "invalid_value",
    )


_MAX_ID_CHARS = 512

_LINE_BREAKS = {char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""JSON allows these unescaped, but many line readers, OpenAI's client for one, split there."""


MAX_ROW_PARTS = JsonParts(containers=50_000, keys=100_000, values=300_000)
"""Parts of a line. The parser holds the interpreter for 0.01 to 0.03 s then, each time that the row
is read."""

_SMALL_LINE = 50_000


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What the runner needs to know of a row's body.

    prompt: the text of its first prompt; rows with a common prefix run next to each other.
    chars: length of all its prompts; None if `prompt` is the only one.
    """

    model: str
    prompt: str
    chars: int | None = None


@dataclass(frozen=True, slots=True)
class RowReply:
    """The response to one row.

    body: JSON; an error object if the status is 400 or above.
    """

    status_code: int
    body: str
    usage: TokenUsage = TokenUsage()


class RowHandler(Protocol):
    """Runs rows on the engine. Implemented by server/batches/rows.py, and by tests."""

    def check(self, tenant: str, endpoint: str, body: dict[str, Any]) -> RowFacts:
        """Validate a body of a tenant; called on any thread.

        Raises InvalidRequestError or NotFoundError naming the field.
        """
        ...

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, slo: Slo
    ) -> RowReply:
        """Run a row as a best-effort request with these objectives from now on.

        A client error is returned as a reply. Raises RowPostponedError or RowInterruptedError if
        the row must be tried again. Cancelling the call aborts the row.
        """
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """A parsed line; its body is not validated."""

    custom_id: str
    body: dict[str, Any]


class BadRowError(Exception):
    """A line is not a valid row."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def parse_row(line: bytes, endpoint: str) -> Row:
    """Parse a line and check everything but its body. Raises BadRowError."""
    value = _parse_line(line)
    for name in ("custom_id", "method", "url", "body"):
        if value.get(name) is None:
            raise BadRowError(
                "missing_required_parameter", f"Missing required parameter: '{name}'.", name
            )
    custom_id, method, url, body = (value[name] for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        message = f"'custom_id' must be a string of 1 to {_MAX_ID_CHARS} characters."
        raise BadRowError("invalid_value", message, "custom_id")
    if not is_storable(custom_id):
        message = "'custom_id' must not contain NUL or lone surrogates."
        raise BadRowError("invalid_value", message, "custom_id")
    if method != "POST":
        raise BadRowError("invalid_method", "'method' must be POST.", "method")
    if url != endpoint:
        raise BadRowError("invalid_url", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    if not isinstance(body, dict):
        raise BadRowError("invalid_type", "'body' must be an object.", "body")
    if body.get("stream"):
        raise BadRowError(
            "unsupported_parameter", "'stream' cannot be used in a batch.", "body.stream"
        )
    if b"\\u" in line and not is_text(body):
        raise BadRowError("invalid_value", "'body' must not contain lone surrogates.", "body")
    return Row(custom_id, body)


def _parse_line(line: bytes) -> dict[str, Any]:
    found = excess_of(line, MAX_ROW_PARTS) if len(line) > _SMALL_LINE else None
    if found is not None:
        message = f"This line has {found}; at most {MAX_ROW_PARTS.limits} are allowed."
        raise BadRowError("invalid_value", message)
    wrong = wrong_number(line)
    if wrong is not None:
        raise BadRowError("invalid_value", f"This line has {wrong}.")
    try:
        # Decoded here, because json.loads also accepts other encodings and lone surrogates.
        value = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadRowError("invalid_json_line", "This line is not valid JSON.") from None
    if not isinstance(value, dict):
        raise BadRowError("invalid_json_line", "This line is not a JSON object.")
    return value


def reply_line(row_id: str, custom_id: str, request_id: str, reply: RowReply) -> str:
    """The line of a row with a response, for the output file, or the error file from status 400.

    Of a body of megabytes it takes milliseconds.
    """
    head = json.dumps({"id": row_id, "custom_id": custom_id})[:-1]
    response = json.dumps({"status_code": reply.status_code, "request_id": request_id})[:-1]
    body = reply.body
    for char, escape in _LINE_BREAKS.items():  # `translate` takes 0.3 s per million characters
        body = body.replace(char, escape)
    return f'{head}, "response": {response}, "body": {body}}}, "error": null}}'


def error_line(row_id: str, custom_id: str, code: str, message: str) -> str:
    """The line of the error file for a row without a response."""
    error: Mapping[str, Any] = {"code": code, "message": message}
    line = {"id": row_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# ---- The order of rows: those with a common prefix next to each other, for the prefix cache.
#
# A prompt is cut into pieces of growing length. Each piece becomes a hash of itself and of all
# pieces before it, so a prompt of any length is a path of a few numbers. The paths form a trie:
#
# ```
#  rows 0, 2, 5: "You are a lawyer. ... "   ┌─ a1 ─ c4 ─ row 0
#  rows 1, 3, 4: "Translate ... "           │    └─ c9 ─ rows 2, 5
#                                   root ───┴─ b7 ─ rows 1, 3, 4
# ```
#
# Rows run in depth-first order of the trie. Branches are ordered by their first row, so without
# common prefixes rows keep the order of the file. To bound waiting, a row that more than
# `max_overtaken` later rows have overtaken runs next, and the walk continues from there.


PromptPath = tuple[int, ...]
"""The nodes of a prompt in the trie, from the root."""

MAX_OVERTAKEN = 2_000
_FIRST_PIECE = 128
_GROWTH = 1.5
_MAX_PIECES = 24  # of 4 million characters


def prompt_path(prompt: str) -> PromptPath:
    """One hash per full piece of a prompt. Two prompts with the same hash at a position are equal
    up to the end of that piece. The rest after the last full piece does not count."""
    path, begin, size = [], 0, float(_FIRST_PIECE)
    digest = b""
    for _ in range(_MAX_PIECES):
        end = begin + int(size)
        if end > len(prompt):
            break
        piece = prompt[begin:end].encode("utf-8", "surrogatepass")
        digest = blake2b(piece, digest_size=8, key=digest).digest()
        path.append(int.from_bytes(digest, "little"))
        begin, size = end, size * _GROWTH
    return tuple(path)


def run_order(paths: Sequence[PromptPath], max_overtaken: int = MAX_OVERTAKEN) -> list[int]:
    """Indexes of the rows, in the order in which they should run."""
    walk = _walk(paths)
    if max_overtaken >= len(paths):
        return walk
    return _bounded(walk, max_overtaken)


def _walk(paths: Sequence[PromptPath]) -> list[int]:
    """Depth-first order of the trie, branches ordered by their first row.

    Sorting by paths gives the same order, but one long sort keeps the GIL from all other threads.
    """
    return list(_visit(paths, range(len(paths)), 0))


def _visit(paths: Sequence[PromptPath], rows: Iterable[int], depth: int) -> Iterator[int]:
    """Yield `rows` depth first. They have the first `depth` nodes in common and are given in the
    order of the file."""
    branches: dict[int, list[int]] = {}
    for row in rows:
        path = paths[row]
        node = path[depth] if depth < len(path) else -1 - row  # the path has ended: a leaf
        branches.setdefault(node, []).append(row)
    for members in branches.values():
        if len(members) == 1:
            yield members[0]
        else:
            yield from _visit(paths, members, depth + 1)


def _bounded(walk: Sequence[int], max_overtaken: int) -> list[int]:
    """The walk, changed so that no row is overtaken by more than `max_overtaken` later rows.

    A cursor goes along the walk. Before each step, if the first remaining row of the file has been
    overtaken too often, the cursor jumps to it.
    """
    position = {row: i for i, row in enumerate(walk)}
    done = [False] * len(walk)
    order: list[int] = []
    oldest, cursor = 0, 0
    while len(order) < len(walk):
        while done[oldest]:
            oldest += 1
        # All rows before the oldest have run, so len(order) - oldest later rows have overtaken it.
        if len(order) - oldest >= max_overtaken:
            cursor = position[oldest]
        while done[walk[cursor]]:
            cursor = (cursor + 1) % len(walk)
        done[walk[cursor]] = True
        order.append(walk[cursor])
    return order


# ---- Validation of an input file, line by line, in constant memory per row.
#
# A file with an error is not run at all; its errors are reported with their lines. Errors that
# depend on the engine, such as a prompt that is too long, are reported when the row runs.


_CHARS_PER_TOKEN = 4
"""Estimate for quotas; tokenizing would take longer than all other checks."""

_READ_AT_ONCE = 2**20
"""A large buffer, because each read releases the GIL so briefly that a waiting thread misses it and
waits a full switch interval again: with a read every few lines an event loop stalls for a second.
"""


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """The result of validating an input file. Without rows, validation failed.

    errors: at most MAX_ERRORS.
    rows: in the order of the file, with their ranks.
    model: the model that all rows name.
    tokens: estimate for all prompts.
    """

    errors: tuple[LineError, ...]
    rows: tuple[RowRef, ...] = ()
    model: str | None = None
    tokens: int = 0


_Check = Callable[[str, dict[str, Any]], RowFacts]


@dataclass(slots=True)
class _Scan:
    """What was found up to a line.

    places: (line, custom_id, offset, length) of each row.
    """

    errors: list[LineError] = field(default_factory=list)
    custom_ids: set[str] = field(default_factory=set)
    places: list[tuple[int, str, int, int]] = field(default_factory=list)
    paths: list[PromptPath] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    chars: int = 0


Checking = Generator[None, None, CheckedInput]
"""The validation of an input file, which pauses before each line."""


def check_input(
    path: Path, digest: str, endpoint: str, check: _Check, *, group: bool = True
) -> Checking:
    """Validate an input file. Blocking; for worker threads.

    It pauses so that files of several tenants can be validated in turns.

    digest: the expected SHA-256 of the content.
    check: RowHandler.check for the tenant, given the endpoint and a body.
    group: order rows with a common prefix next to each other.
    """
    scan = _Scan()
    try:
        if _digest(path) != digest:
            message = "The content of the input file is damaged; upload it again."
            return CheckedInput((LineError("damaged_file", message),))
        with path.open("rb", buffering=_READ_AT_ONCE) as file:
            for number, offset, line in _lines(file):
                yield
                if not _check_line(scan, number, offset, line, endpoint, check):
                    break
    except FileNotFoundError:
        message = "The content of the input file has been deleted."
        return CheckedInput((LineError("missing_file", message),))
    if not scan.places and not scan.errors:
        scan.errors.append(LineError("empty_file", "The input file has no requests."))
    if scan.errors:
        return CheckedInput(tuple(scan.errors))
    return _with_ranks(scan, group)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, line with its line break). A line that is too long is cut."""
    number, offset = 1, 0
    while line := file.readline(MAX_LINE_BYTES + len(b"\r\n")):
        yield number, offset, line
        number, offset = number + 1, offset + len(line)


def _check_line(
    scan: _Scan, number: int, offset: int, line: bytes, endpoint: str, check: _Check
) -> bool:
    """Add a line's row or error to the scan; returns whether to read the next line."""
    continues = False
    if len(line.removesuffix(b"\n").removesuffix(b"\r")) > MAX_LINE_BYTES:
        # The next "line" would be the rest of this one.
        error = BadRowError("line_too_long", f"This line has more than {MAX_LINE_BYTES} bytes.")
    elif not line.strip():
        return True
    elif len(scan.places) == MAX_ROWS:
        error = BadRowError("too_many_requests", f"A batch has at most {MAX_ROWS} requests.")
    else:
        try:
            _add_row(scan, number, offset, line, endpoint, check)
            return True
        except BadRowError as bad_row:
            error, continues = bad_row, len(scan.errors) + 1 < MAX_ERRORS
    scan.errors.append(LineError(error.code, error.message, error.param, number))
    return continues


def _add_row(
    scan: _Scan, number: int, offset: int, line: bytes, endpoint: str, check: _Check
) -> None:
    """Raises BadRowError."""
    row = parse_row(line, endpoint)
    try:
        facts = check(endpoint, row.body)
    except InvalidRequestError as error:
        code = error.code or "invalid_value"
        raise BadRowError(code, error.message, _in_body(error.param)) from None
    except NotFoundError as error:
        code = error.code or "not_found"
        raise BadRowError(code, str(error), _in_body(error.param)) from None
    if row.custom_id in scan.custom_ids:
        message = "Another line has the same 'custom_id'."
        raise BadRowError("duplicate_custom_id", message, "custom_id")
    if scan.models and facts.model not in scan.models:
        message = "All requests of a batch must name the same model."
        raise BadRowError("mismatched_model", message, "body.model")
    scan.models.add(facts.model)
    scan.custom_ids.add(row.custom_id)
    scan.places.append((number, row.custom_id, offset, len(line)))
    scan.paths.append(prompt_path(facts.prompt))
    scan.chars += len(facts.prompt) if facts.chars is None else facts.chars


def _in_body(param: str | None) -> str:
    return f"body.{param}" if param else "body"


def _with_ranks(scan: _Scan, group: bool) -> CheckedInput:
    order = run_order(scan.paths) if group else range(len(scan.paths))
    ranks = [0] * len(scan.paths)
    for rank, row in enumerate(order):
        ranks[row] = rank
    rows = tuple(RowRef(*place, rank) for place, rank in zip(scan.places, ranks, strict=True))
    (model,) = scan.models
    return CheckedInput((), rows, model, scan.chars // _CHARS_PER_TOKEN)
