"""Checks an input file as a whole, line by line, in constant memory per row.

All or nothing: a file with a mistake is not run at all, and the mistakes are listed with their
lines. What depends on the engine, such as a prompt that is too long, is a matter of the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from bros.batch.objects import MAX_ERRORS, MAX_LINE_BYTES, MAX_ROWS, LineError, RowRef
from bros.batch.order import Path as PromptPath
from bros.batch.order import prompt_path, run_order
from bros.batch.rows import BadRowError, RowHandler, parse_row
from bros.core.errors import InvalidRequestError, NotFoundError

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

    tokens: roughly, of all prompts. model: the one that all rows name.
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
