"""Every message survives the encoding between server and engine process."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.errors import (
    BrosError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
)
from bros.core.interfaces import (
    Buckets,
    ClassStats,
    EngineInfo,
    EngineReport,
    EngineStats,
    Prices,
    RequestTrace,
)
from bros.core.request import (
    EngineRequest,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    TokenLogprobs,
    expanded,
    shortened,
)
from bros.engine.messages import (
    COMMANDS,
    REPLIES,
    Abort,
    Accepted,
    Command,
    Failed,
    GetStats,
    GetTrace,
    Heartbeat,
    Outputs,
    Promote,
    Ready,
    Refused,
    Release,
    Reply,
    Reported,
    Shutdown,
    StatsReply,
    Submit,
    Subscribe,
    TraceReply,
)
from bros.transport.ipc import command_codec, reply_codec

number = st.floats(allow_nan=False)
count = st.integers(0, 2**53)
text = st.text(max_size=20)
slo = st.builds(Slo, *[st.none() | number] * 4)


def of(kind: type, **special: st.SearchStrategy[typing.Any]) -> st.SearchStrategy[typing.Any]:
    """Instances of a dataclass with every field given, by its type unless it is `special`."""
    hints = typing.get_type_hints(kind)
    return st.builds(
        kind,
        **{name: special[name] if name in special else _of(hints[name]) for name in hints},
    )


def _of(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of a type; numbers are as large as those of the engine may be."""
    simple: dict[typing.Any, st.SearchStrategy[typing.Any]] = {
        int: count, float: number, str: text, Slo: slo, Buckets: buckets,
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    if isinstance(hint, types.UnionType):
        return st.one_of([_of(part) for part in typing.get_args(hint)])
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments[1:] == (...,):
        return st.lists(_of(arguments[0]), max_size=2).map(tuple)
    if typing.get_origin(hint) is collections.abc.Mapping:  # messages have no other ones
        return st.dictionaries(*map(_of, arguments), max_size=2)
    return of(hint) if dataclasses.is_dataclass(hint) else st.from_type(hint)


buckets = st.builds(
    Buckets,
    bounds=st.lists(number).map(tuple),
    counts=st.lists(count).map(tuple),
    total=number,
)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 999), max_size=3).map(tuple),
    max_tokens=st.none() | st.integers(1, 99),
)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
request = of(EngineRequest, prompt_token_ids=token_ids, sampling=sampling)
trace = of(
    RequestTrace,
    events=st.lists(st.tuples(number, text), max_size=3).map(tuple),
    waits=st.dictionaries(st.sampled_from(["time", "rows", "memory"]), number),
    ttft_s=st.none() | number,
    tpot_s=st.none() | number,
)
stats = of(
    EngineStats,
    traces=st.dictionaries(text, count),
    by_class=st.dictionaries(st.sampled_from(ServiceClass), of(ClassStats)),
)
logprobs = of(
    TokenLogprobs, top=st.lists(st.tuples(st.integers(0, 99), number), max_size=2).map(tuple)
)
output = of(
    RequestOutput,
    token_ids=token_ids.map(tuple),
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    error=st.none() | text,
    retry_after_s=st.none() | number,
)
token_output = st.tuples(text, st.integers(0, 2**31 - 1))
hinges = st.lists(st.tuples(count, number), max_size=2).map(tuple)
prices = st.none() | of(Prices, hinges=hinges)
info = of(EngineInfo, eos_token_ids=token_ids.map(tuple), prices=prices)
report = of(EngineReport, cached_prefixes=st.lists(st.tuples(text, count), max_size=3).map(tuple))

COMMAND_VALUES = {
    Submit: st.builds(Submit, request),
    Abort: st.builds(Abort, text),
    GetStats: st.builds(GetStats, count),
    GetTrace: st.builds(GetTrace, count, text),
    Shutdown: st.just(Shutdown()),
    Promote: st.builds(Promote, text, slo, st.booleans()),
    Release: st.builds(Release, text),
    Subscribe: st.just(Subscribe()),
}
REPLY_VALUES = {
    Ready: st.builds(Ready, info),
    Accepted: st.builds(Accepted, text, st.sampled_from(ServiceClass)),
    Refused: st.builds(Refused, text, text, text, st.none() | text, st.none() | text),
    Outputs: st.builds(Outputs, st.lists(output | token_output, max_size=3).map(tuple)),
    StatsReply: st.builds(StatsReply, count, stats),
    TraceReply: st.builds(TraceReply, count, st.none() | trace),
    Failed: st.builds(Failed, text),
    Heartbeat: st.just(Heartbeat()),
    Reported: st.builds(Reported, report),
}


def test_no_message_is_forgotten_here() -> None:
    assert set(COMMAND_VALUES) == set(COMMANDS)
    assert set(REPLY_VALUES) == set(REPLIES)


@given(st.one_of(COMMAND_VALUES.values()))
def test_commands_arrive_as_they_were_sent(command: Command) -> None:
    codec = command_codec()
    assert codec.decode(codec.encode(command)) == command


@given(st.one_of(REPLY_VALUES.values()))
def test_replies_arrive_as_they_were_sent(reply: Reply) -> None:
    codec = reply_codec()
    assert codec.decode(codec.encode(reply)) == reply


@given(output | token_output.map(expanded))
def test_the_short_form_of_an_output_says_the_same(full: RequestOutput) -> None:
    if full.finish_reason is None:
        full = dataclasses.replace(full, error=None, retry_after_s=None)
    short = shortened(full)
    assert expanded(short) == full
    only_token = RequestOutput(request_id=full.request_id, token_ids=full.token_ids[:1])
    assert isinstance(short, tuple) == (len(full.token_ids) == 1 and full == only_token)


def test_classes_are_classes_again_after_the_journey() -> None:
    codec = reply_codec()
    sent = StatsReply(3, EngineStats(by_class={ServiceClass.BE: ClassStats(relegated=3)}))
    received = codec.decode(codec.encode(sent))
    assert isinstance(received, StatsReply)
    [(service_class, counts)] = received.stats.by_class.items()
    assert service_class is ServiceClass.BE and counts.relegated == 3


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("No.", "stop", "bad"),
        PromptTooLongError(700, 500, "prompt"),
        QueueFullError(8, 3.5),
        OverloadedError("The first token would take 2.0 s.", 4.5),
        BrosError("Something else."),
    ],
)
def test_refusals_are_raised_as_they_were(error: BrosError) -> None:
    codec = reply_codec()
    received = codec.decode(codec.encode(Refused.from_error("r", error)))
    assert isinstance(received, Refused) and received.request_id == "r"
    raised = received.to_error()
    assert type(raised) is type(error)
    assert (str(raised), vars(raised)) == (str(error), vars(error))
