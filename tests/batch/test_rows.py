"""From a line to a row, and from what became of it to a line."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.batch.rows import BadRowError, Row, RowReply, error_line, parse_row, reply_line

ENDPOINT = "/v1/completions"
GOOD: dict[str, Any] = {
    "custom_id": "row-1",
    "method": "POST",
    "url": ENDPOINT,
    "body": {"model": "m", "prompt": "Hello"},
}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def refusal(content: bytes) -> tuple[str, str | None]:
    """(code, param) of what is wrong with a line."""
    with pytest.raises(BadRowError) as wrong:
        parse_row(content, ENDPOINT)
    assert wrong.value.message == str(wrong.value)
    assert wrong.value.message.endswith(".")
    return wrong.value.code, wrong.value.param


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"  \r\n"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b"\t "])
def test_a_line_of_the_right_form_is_a_row(begin: bytes, end: bytes) -> None:
    assert parse_row(begin + line() + end, ENDPOINT) == Row("row-1", GOOD["body"])


def test_a_line_has_at_most_so_many_parts() -> None:
    """Its parser holds the interpreter, each time that the row is read."""
    for more in ("[" * 60_000, "{}," * 60_000, '"a":' * 120_000, "1," * 600_000):
        assert refusal(line().replace(b'"Hello"', more.encode())) == ("invalid_value", None)
    text = "[{}:," * 200_000
    assert parse_row(line(body={"prompt": text}), ENDPOINT).body == {"prompt": text}


def test_other_fields_of_a_line_do_not_matter() -> None:
    assert parse_row(line(priority=3, metadata={}), ENDPOINT).custom_id == "row-1"


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b"{} {}",
        line().replace(b'"Hello"', b"NaN"),
        line().replace(b'"Hello"', b"Infinity"),
        line().replace(b'"Hello"', b"-Infinity"),
        line().replace(b'"Hello"', b"[" * 40_000 + b"]" * 40_000),
        line().replace(b"Hello", b"\xc3"),
        line().replace(b"Hello", b"a\x00b"),
        line().replace(b"Hello", b"\xed\xa0\x80"),
        line().decode().encode("utf-16"),
        line().decode().encode("utf-16-le"),
        line().decode().encode("utf-32"),
        b"\xef\xbb\xbf" * 2 + line(),
        b"[]",
        b'"text"',
        b"null",
        b"1",
    ],
)
def test_what_is_no_json_object_in_utf8_is_refused(content: bytes) -> None:
    assert refusal(content) == ("invalid_json_line", None)


@pytest.mark.parametrize("number", [b"1" * 41, b"1" * 5_000, b"1e400"])
def test_numbers_that_are_too_long_or_infinite_are_refused(number: bytes) -> None:
    assert refusal(line().replace(b'"Hello"', number)) == ("invalid_value", None)


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_every_field_of_the_frame_is_needed(name: str) -> None:
    without = {key: value for key, value in GOOD.items() if key != name}
    assert refusal(json.dumps(without).encode()) == ("missing_required_parameter", name)
    assert refusal(line(**{name: None})) == ("missing_required_parameter", name)


@pytest.mark.parametrize("custom_id", [1, True, "", [], "x" * 513, "a\0b", "\ud800", "x\udfff"])
def test_an_id_that_cannot_be_kept_is_refused(custom_id: object) -> None:
    assert refusal(line(custom_id=custom_id)) == ("invalid_value", "custom_id")


def test_half_characters_are_no_text_in_a_body_either() -> None:
    assert refusal(line(body={"prompt": "\ud800"})) == ("invalid_value", "body")
    assert refusal(line(body={"stop": ["a", "\udfff"]})) == ("invalid_value", "body")
    assert parse_row(line(body={"prompt": "😀"}), ENDPOINT).body == {"prompt": "😀"}


@pytest.mark.parametrize("custom_id", [" ", "x" * 512, "ünï-😀", "a\nb", "\x01", "\ufffe", "0"])
def test_any_other_text_is_an_id(custom_id: str) -> None:
    assert parse_row(line(custom_id=custom_id), ENDPOINT).custom_id == custom_id


@pytest.mark.parametrize("method", ["GET", "post", "", 1, ["POST"]])
def test_rows_are_posted(method: object) -> None:
    assert refusal(line(method=method)) == ("invalid_method", "method")


@pytest.mark.parametrize(
    "url", ["/v1/chat/completions", "/v1/completions/", "https://host/v1/completions", "", 1]
)
def test_rows_go_to_the_endpoint_of_the_batch(url: object) -> None:
    assert refusal(line(url=url)) == ("invalid_url", "url")


@pytest.mark.parametrize("body", [[], "text", 1, False])
def test_a_body_is_an_object(body: object) -> None:
    assert refusal(line(body=body)) == ("invalid_type", "body")


def test_a_stream_cannot_be_asked_for() -> None:
    assert refusal(line(body={"stream": True})) == ("unsupported_parameter", "body.stream")
    for stream in (False, None):
        assert parse_row(line(body={"stream": stream}), ENDPOINT).body == {"stream": stream}


@given(
    custom_id=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
)
def test_an_id_comes_through_as_it_was(custom_id: str) -> None:
    for text in (line(custom_id=custom_id), json.dumps({**GOOD, "custom_id": custom_id}).encode()):
        assert parse_row(text, ENDPOINT).custom_id == custom_id
    raw = json.dumps({**GOOD, "custom_id": custom_id}, ensure_ascii=False).encode()
    assert parse_row(raw, ENDPOINT).custom_id == custom_id


@given(content=st.binary(max_size=200))
def test_no_line_does_worse_than_be_refused(content: bytes) -> None:
    for text in (content, line()[:20] + content, line() + content):
        try:
            parse_row(text, ENDPOINT)
        except BadRowError as wrong:
            assert wrong.code == "invalid_json_line" or wrong.param is not None


texts = st.text(max_size=20)
bodies = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


@given(custom_id=texts, status_code=st.sampled_from([200, 400, 404, 500]), body=bodies)
def test_a_reply_is_one_line_with_all_keys_of_the_contract(
    custom_id: str, status_code: int, body: object
) -> None:
    made = reply_line("batch_req_1", custom_id, "req-1", RowReply(status_code, json.dumps(body)))
    assert len(made.splitlines()) == 1
    assert json.loads(made) == {
        "id": "batch_req_1",
        "custom_id": custom_id,
        "response": {"status_code": status_code, "request_id": "req-1", "body": body},
        "error": None,
    }


def test_line_breaks_in_a_large_reply_are_escaped_in_milliseconds() -> None:
    """One character at a time, this text took 0.6 s."""
    text = "é" * 1_000_000 + "\x85\u2028\u2029" + "é" * 1_000_000
    body = json.dumps({"text": text}, ensure_ascii=False)
    begun_s = time.thread_time()
    made = reply_line("batch_req_1", "row-1", "req-1", RowReply(200, body))
    assert time.thread_time() - begun_s < 0.1
    assert len(made.splitlines()) == 1
    assert json.loads(made)["response"]["body"] == {"text": text}


@given(custom_id=texts, code=texts, message=texts)
def test_an_error_is_one_line_with_all_keys_of_the_contract(
    custom_id: str, code: str, message: str
) -> None:
    made = error_line("batch_req_1", custom_id, code, message)
    assert len(made.splitlines()) == 1
    assert json.loads(made) == {
        "id": "batch_req_1",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
