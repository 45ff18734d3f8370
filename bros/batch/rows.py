"""From lines of an input file to rows, and from what became of a row to a line of output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""Those that rows may be sent to."""

KNOWN_ENDPOINTS = (
    *ENDPOINTS,
    "/v1/responses",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/videos",
)
"""Those that OpenAI has."""

_MAX_ID_CHARS = 512

_NO_LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""JSON need not escape these, but many readers of lines, such as OpenAI's client, break there."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a row's body says.

    prompt: what it begins with, as text; rows that begin alike are run next to each other.
    chars: length of all its prompts; None if that is all.
    """

    model: str
    prompt: str
    chars: int | None = None


@dataclass(frozen=True, slots=True)
class RowReply:
    """The answer to one row: the body is JSON, an error object from a status of 400 on."""

    status_code: int
    body: str
    usage: TokenUsage = TokenUsage()


class RowHandler(Protocol):
    """Answers rows. Implementations: the server's, and scripted ones in tests."""

    def check(self, endpoint: str, body: dict[str, Any]) -> RowFacts:
        """Raises InvalidRequestError or NotFoundError, naming the field. From any thread."""
        ...

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, due_in_s: float
    ) -> RowReply:
        """Run a row as best-effort work that should be done within `due_in_s`.

        What the client did wrong is a reply. Raises RowPostponedError or RowInterruptedError
        if it is to be tried again; cancelling the call ends the row.
        """
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the right form."""

    custom_id: str
    body: dict[str, Any]


class BadRowError(Exception):
    """A line that is no row."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def parse_row(line: bytes, endpoint: str) -> Row:
    """Check the frame of a row, not its body. Raises BadRowError."""
    try:
        # Decoded here, for json.loads would take other encodings and half characters, too.
        value = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadRowError("invalid_json_line", "This line is not valid JSON.") from None
    if not isinstance(value, dict):
        raise BadRowError("invalid_json_line", "This line is not a JSON object.")
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
        message = "'custom_id' has characters that no text has."
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
    if b"\\u" in line and not _is_text(body):
        raise BadRowError("invalid_value", "'body' has half characters, which no text has.", "body")
    return Row(custom_id, body)


def reply_line(row_id: str, custom_id: str, request_id: str, reply: RowReply) -> str:
    """A line with a response, of the output file or, from a status of 400 on, the error file."""
    head = json.dumps({"id": row_id, "custom_id": custom_id})[:-1]
    response = json.dumps({"status_code": reply.status_code, "request_id": request_id})[:-1]
    body = reply.body.translate(_NO_LINE_BREAKS)
    return f'{head}, "response": {response}, "body": {body}}}, "error": null}}'


def error_line(row_id: str, custom_id: str, code: str, message: str) -> str:
    """A line of the error file for a row that never came to a response."""
    error: Mapping[str, Any] = {"code": code, "message": message}
    line = {"id": row_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line)


def _is_text(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# ---- In which order the rows of a job run: those that begin alike next to each other.
#
# A prompt is cut into pieces, short ones first, and each becomes a hash of itself and of all before
# it, so that a prompt of any length is a path of a few numbers. All paths together are a trie:
#
# ```
#  rows 0, 2, 5: "You are a lawyer. ... "   ┌─ a1 ─ c4 ─ row 0
#  rows 1, 3, 4: "Translate ... "           │    └─ c9 ─ rows 2, 5
#                                   root ───┴─ b7 ─ rows 1, 3, 4
# ```
#
# The rows run in the order of a walk through it, where branches are taken by their first row, so
# without common prefixes the order of the file is kept. The age term: when a row has been
# overtaken by more than `max_overtaken` others, the walk goes on from there.


PromptPath = tuple[int, ...]

MAX_OVERTAKEN = 2_000
_FIRST_PIECE = 128
_GROWTH = 1.5
_MAX_PIECES = 24  # of 4 million characters


def prompt_path(prompt: str) -> PromptPath:
    """A hash for each piece of a prompt. Where two paths have the same hash, the prompts are the
    same up to there. What follows the last full piece does not count."""
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
    """Depth first, branches and rows in the order of their first row.

    Sorting by paths would give the same, in one piece of work that holds up all other threads.
    """
    return list(_visit(paths, range(len(paths)), 0))


def _visit(paths: Sequence[PromptPath], rows: Iterable[int], depth: int) -> Iterator[int]:
    """`rows`, in the order of the file, that have the first `depth` nodes in common."""
    branches: dict[int, list[int]] = {}
    for row in rows:
        path = paths[row]
        node = path[depth] if depth < len(path) else -1 - row  # where it ends: a leaf of its own
        branches.setdefault(node, []).append(row)
    for members in branches.values():
        if len(members) == 1:
            yield members[0]
        else:
            yield from _visit(paths, members, depth + 1)


def _bounded(walk: Sequence[int], max_overtaken: int) -> list[int]:
    """The same walk, but no row runs after more than `max_overtaken` younger ones.

    A cursor goes along the walk. Before a row runs, the oldest one that is left is looked at:
    each younger row that has run since overtook it. Is it overdue, the cursor jumps there.
    """
    place = {row: i for i, row in enumerate(walk)}
    done = [False] * len(walk)
    order: list[int] = []
    oldest, cursor = 0, 0
    while len(order) < len(walk):
        while done[oldest]:
            oldest += 1
        # All rows before the oldest one have run, so all others that have are younger.
        if len(order) - oldest >= max_overtaken:
            cursor = place[oldest]
        while done[walk[cursor]]:
            cursor = (cursor + 1) % len(walk)
        done[walk[cursor]] = True
        order.append(walk[cursor])
    return order


# ---- Checks an input file as a whole, line by line, in constant memory per row.
#
# All or nothing: a file with a mistake is not run at all, and the mistakes are listed with their
# lines. What depends on the engine, such as a prompt that is too long, is a matter of the row.


_CHARS_PER_TOKEN = 4
"""For quotas, where counting tokens would take longer than all the rest."""

_ASK_EVERY = 64

_READ_AT_ONCE = 2**20
"""Each read lets go of the interpreter's lock for a moment. That is too short for a thread that
waits for it, which begins to wait anew: with a read every few lines an event loop would stand for a
second."""


@dataclass(frozen=True, slots=True)
class Checked:
    """An input file that was read to its end. rows in the order of the file, with their ranks.

    tokens: roughly, of all prompts.
    model: the one that all rows name.
    """

    errors: tuple[LineError, ...]
    rows: tuple[RowRef, ...] = ()
    model: str | None = None
    tokens: int = 0


@dataclass(slots=True)
class _Found:
    errors: list[LineError] = field(default_factory=list)
    custom_ids: set[str] = field(default_factory=set)
    places: list[tuple[int, str, int, int]] = field(default_factory=list)
    paths: list[PromptPath] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    chars: int = 0


def check_input(
    path: Path,
    digest: str,
    endpoint: str,
    handler: RowHandler,
    *,
    group: bool = True,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Checked:
    """Read a file of rows. Blocking; for a worker thread.

    digest: what its content must have. group: put rows that begin alike next to each other.
    is_wanted: asked now and then; once it says no, an empty result is returned.
    """
    found = _Found()
    try:
        if _digest(path) != digest:
            message = "The content of the input file is damaged; upload it again."
            return Checked((LineError("damaged_file", message),))
        with path.open("rb", buffering=_READ_AT_ONCE) as file:
            for number, offset, line in _lines(file):
                if number % _ASK_EVERY == 0 and not is_wanted():
                    return Checked(())
                if not _take(found, number, offset, line, endpoint, handler):
                    break
    except FileNotFoundError:
        return Checked((LineError("missing_file", "The content of the input file is gone."),))
    if not found.places and not found.errors:
        found.errors.append(LineError("empty_file", "The input file has no requests."))
    if found.errors:
        return Checked(tuple(found.errors))
    return _checked(found, group)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, line with its line break); an endless line comes in pieces."""
    number, offset = 1, 0
    while line := file.readline(MAX_LINE_BYTES + len(b"\r\n")):
        yield number, offset, line
        number, offset = number + 1, offset + len(line)


def _take(
    found: _Found, number: int, offset: int, line: bytes, endpoint: str, handler: RowHandler
) -> bool:
    """Note a line; returns whether it makes sense to go on."""
    goes_on = False
    if len(line.removesuffix(b"\n").removesuffix(b"\r")) > MAX_LINE_BYTES:
        # What follows is not a line.
        error = BadRowError("line_too_long", f"This line has more than {MAX_LINE_BYTES} bytes.")
    elif not line.strip():
        return True
    elif len(found.places) == MAX_ROWS:
        error = BadRowError("too_many_requests", f"A batch has at most {MAX_ROWS} requests.")
    else:
        try:
            _add(found, number, offset, line, endpoint, handler)
            return True
        except BadRowError as wrong:
            error, goes_on = wrong, len(found.errors) + 1 < MAX_ERRORS
    found.errors.append(LineError(error.code, error.message, error.param, number))
    return goes_on


def _add(
    found: _Found, number: int, offset: int, line: bytes, endpoint: str, handler: RowHandler
) -> None:
    """Add a row. Raises BadRowError."""
    row = parse_row(line, endpoint)
    try:
        facts = handler.check(endpoint, row.body)
    except InvalidRequestError as error:
        code = error.code or "invalid_value"
        raise BadRowError(code, error.message, _in_body(error.param)) from None
    except NotFoundError as error:
        code = error.code or "not_found"
        raise BadRowError(code, str(error), _in_body(error.param)) from None
    if row.custom_id in found.custom_ids:
        message = "Another line has the same 'custom_id'."
        raise BadRowError("duplicate_custom_id", message, "custom_id")
    if found.models and facts.model not in found.models:
        message = "All requests of a batch must name the same model."
        raise BadRowError("mismatched_model", message, "body.model")
    found.models.add(facts.model)
    found.custom_ids.add(row.custom_id)
    found.places.append((number, row.custom_id, offset, len(line)))
    found.paths.append(prompt_path(facts.prompt))
    found.chars += len(facts.prompt) if facts.chars is None else facts.chars


def _in_body(param: str | None) -> str:
    return f"body.{param}" if param else "body"


def _checked(found: _Found, group: bool) -> Checked:
    order = run_order(found.paths) if group else range(len(found.paths))
    ranks = [0] * len(found.paths)
    for rank, row in enumerate(order):
        ranks[row] = rank
    rows = tuple(RowRef(*place, rank) for place, rank in zip(found.places, ranks, strict=True))
    (model,) = found.models
    return Checked((), rows, model, found.chars // _CHARS_PER_TOKEN)
