"""Checking an input file: all mistakes with their lines, or all rows."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.batch.objects import MAX_ERRORS, MAX_LINE_BYTES, MAX_ROWS, LineError, RowRef
from bros.batch.rows import (
    CheckedInput,
    Checking,
    RowFacts,
    RowReply,
    check_input,
    parse_row,
    prompt_path,
    run_order,
)
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.request import Slo

ENDPOINT = "/v1/completions"


class Handler:
    """Knows the model of a row and its prompt; refuses what it is told to refuse."""

    def check(self, tenant: str, endpoint: str, body: dict[str, Any]) -> RowFacts:
        assert (tenant, endpoint) == ("ann", ENDPOINT)
        if "refuse" in body:
            kind, *arguments = body["refuse"]
            raise {"invalid": InvalidRequestError, "unknown": NotFoundError}[kind](*arguments)
        return RowFacts(body.get("model", "m"), body.get("prompt", ""))

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, slo: Slo
    ) -> RowReply:
        raise AssertionError("no row is run to check a file")


CHECK = functools.partial(Handler().check, "ann")


def line(custom_id: str = "row", **body: object) -> bytes:
    """With its line break."""
    row = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(row).encode() + b"\n"


def result_of(checking: Checking) -> CheckedInput:
    """The result of a validation, all in one turn."""
    while True:
        try:
            next(checking)
        except StopIteration as end:
            checked: CheckedInput = end.value
            return checked


class Folder:
    """Where tests put input files."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "input"

    def check(self, content: bytes, **options: Any) -> CheckedInput:
        self.file.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        return result_of(check_input(self.file, digest, ENDPOINT, CHECK, **options))

    def mistakes(self, content: bytes) -> list[tuple[str, str | None, int | None]]:
        """(code, param, line) of all errors of a file that is not valid."""
        checked = self.check(content)
        assert checked == CheckedInput(checked.errors)  # nothing else came of it
        return [(error.code, error.param, error.line) for error in checked.errors]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_rows_are_found_where_they_are(folder: Folder) -> None:
    first, second, third = line("a"), line("b", prompt="x" * 10), line("ü").rstrip()
    content = b"\xef\xbb\xbf" + first + b"\n" + second[:-1] + b"\r\n" + b"  \t\r\n" + third
    checked = folder.check(content)
    assert checked.errors == ()
    assert [(row.line, row.custom_id) for row in checked.rows] == [(1, "a"), (3, "b"), (5, "ü")]
    for row in checked.rows:
        piece = content[row.offset : row.offset + row.length]
        assert parse_row(piece, ENDPOINT).custom_id == row.custom_id


def test_the_model_and_roughly_the_tokens_are_told(folder: Folder) -> None:
    content = line("a", model="big", prompt="x" * 401) + line("b", model="big", prompt="y" * 402)
    checked = folder.check(content)
    assert (checked.model, checked.tokens) == ("big", 200)
    assert folder.check(line("a", model=None)).model is None


def test_rows_that_begin_alike_are_ranked_next_to_each_other(folder: Folder) -> None:
    prompts = [letter * 200 for letter in "abaabb"]
    content = b"".join(line(str(i), prompt=prompt) for i, prompt in enumerate(prompts))
    assert [row.rank for row in folder.check(content).rows] == [0, 3, 1, 2, 4, 5]
    assert [row.rank for row in folder.check(content, group=False).rows] == list(range(6))


@given(picks=st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_ranks_are_places_in_the_order_of_execution(
    tmp_path_factory: pytest.TempPathFactory, picks: list[int]
) -> None:
    prompts = [str(pick) * 200 for pick in picks]
    content = b"".join(line(str(i), prompt=prompt) for i, prompt in enumerate(prompts))
    rows = Folder(tmp_path_factory.mktemp("ranks")).check(content).rows
    by_rank = sorted(rows, key=lambda row: row.rank)
    assert [row.rank for row in by_rank] == list(range(len(picks)))
    order = run_order([prompt_path(prompt) for prompt in prompts])
    assert [int(row.custom_id) for row in by_rank] == order


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ("empty_file", None, None)),
        (b"\n \r\n\t\n", ("empty_file", None, None)),
        (b"\n\n{\n", ("invalid_json_line", None, 3)),
        (b"\n[]", ("invalid_json_line", None, 2)),
        (line().replace(b'"POST"', b"null"), ("missing_required_parameter", "method", 1)),
        (line().replace(b"POST", b"GET"), ("invalid_method", "method", 1)),
        (line().replace(b"/v1/completions", b"/"), ("invalid_url", "url", 1)),
        (line("x" * 513), ("invalid_value", "custom_id", 1)),
        (line(stream=True), ("unsupported_parameter", "body.stream", 1)),
        (line("a") + b"\n" + line("a"), ("duplicate_custom_id", "custom_id", 3)),
        (line("a") + line("b", model="n"), ("mismatched_model", "body.model", 2)),
        (line("a") + line("b", model=None), ("mismatched_model", "body.model", 2)),
        (line(refuse=["invalid", "No.", "top_p", "bad"]), ("bad", "body.top_p", 1)),
        (line(refuse=["invalid", "No."]), ("invalid_value", "body", 1)),
        (line(refuse=["unknown", "No.", "model", "gone"]), ("gone", "body.model", 1)),
        (line(refuse=["unknown", "No."]), ("not_found", "body", 1)),
        (b"x" * (MAX_LINE_BYTES + 1), ("line_too_long", None, 1)),
        (b" " * (MAX_LINE_BYTES + 1) + line(), ("line_too_long", None, 1)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_named_with_its_line(
    folder: Folder, content: bytes, expected: tuple[str, str | None, int | None]
) -> None:
    assert folder.mistakes(content) == [expected]
    if expected[0] not in ("empty_file", "line_too_long"):
        assert folder.mistakes(content.rstrip(b"\n") + b"\n\n" + line("good"))[0] == expected


def test_the_message_is_the_handlers(folder: Folder) -> None:
    content = line(refuse=["invalid", "At most 1.", "top_p", "bad"])
    (error,) = folder.check(content).errors
    assert error == LineError("bad", "At most 1.", "body.top_p", 1)


def test_every_mistake_is_listed_and_a_bad_row_takes_no_id(folder: Folder) -> None:
    content = line("a") + b"{\n\n" + line("b", refuse=["invalid", "No."]) + line("b") + line("a")
    assert folder.mistakes(content) == [
        ("invalid_json_line", None, 2),
        ("invalid_value", "body", 4),
        ("duplicate_custom_id", "custom_id", 6),
    ]


def test_no_more_than_a_hundred_mistakes_are_listed(folder: Folder) -> None:
    content = b"".join(b"{\n" + line(str(i)) for i in range(MAX_ERRORS + 20))
    errors = folder.mistakes(content)
    assert len(errors) == MAX_ERRORS
    assert errors[-1] == ("invalid_json_line", None, 2 * MAX_ERRORS - 1)


def test_a_line_may_be_as_long_as_allowed_and_nothing_follows_one_that_is_longer(
    folder: Folder,
) -> None:
    longest = line("a", prompt="").rstrip()
    longest = longest.replace(b'""', b'"' + b"x" * (MAX_LINE_BYTES - len(longest)) + b'"')
    assert len(longest) == MAX_LINE_BYTES
    for end in (b"", b"\n", b"\r\n"):
        assert len(folder.check(longest + end).rows) == 1
    too_long = longest.replace(b"xx", b"xxx", 1)
    for end in (b"", b"\n", b"\n{"):
        assert folder.mistakes(line("z") + too_long + end) == [("line_too_long", None, 2)]


def test_a_batch_has_at_most_fifty_thousand_requests(folder: Folder) -> None:
    head, tail = line("ID").split(b"ID")
    content = b"\n".join(b"%b%d%b" % (head, i, tail) for i in range(MAX_ROWS))
    assert len(folder.check(content).rows) == MAX_ROWS
    errors = folder.mistakes(content + line("one more") + line("two more"))
    assert errors == [("too_many_requests", None, 2 * MAX_ROWS)]


def test_a_damaged_file_is_not_run(folder: Folder) -> None:
    content = line("a") + line("b")
    folder.file.write_bytes(content.replace(b'"a"', b'"c"'))
    for good in (content, content + line("c"), b""):
        digest = hashlib.sha256(good).hexdigest()
        checked = result_of(check_input(folder.file, digest, ENDPOINT, CHECK))
        assert [(error.code, error.line) for error in checked.errors] == [("damaged_file", None)]
        assert checked.rows == ()


def test_a_file_that_is_gone_is_not_run(folder: Folder) -> None:
    checked = result_of(check_input(folder.file, hashlib.sha256().hexdigest(), ENDPOINT, CHECK))
    assert [(error.code, error.line) for error in checked.errors] == [("missing_file", None)]
    assert checked.rows == ()


def test_it_pauses_before_each_line(folder: Folder) -> None:
    content = line("a") + b"\n" + line("b")
    folder.file.write_bytes(content)
    checking = check_input(folder.file, hashlib.sha256(content).hexdigest(), ENDPOINT, CHECK)
    assert len(list(checking)) == 3


def lines_of(num_rows: int, prompt_chars: int) -> Iterable[bytes]:
    rng = random.Random(1)
    for row in range(num_rows):
        yield line(f"row-{row}", prompt=f"{rng.random():.17f}" * (prompt_chars // 19))


def test_a_big_file_is_not_held_in_memory(folder: Folder) -> None:
    digest, size = hashlib.sha256(), 0
    with folder.file.open("wb") as file:
        for content in lines_of(10_000, 6_000):
            digest.update(content)
            size += file.write(content)
    assert size > 60_000_000
    tracemalloc.start()
    try:
        checked = result_of(check_input(folder.file, digest.hexdigest(), ENDPOINT, CHECK))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(checked.rows) == 10_000
    assert isinstance(checked.rows[0], RowRef)
    assert peak_bytes < size / 4
