"""What each server is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bros.bench.dialects import DIALECTS, Endpoint, RequestFormat, dialect_of
from bros.core.errors import ConfigError
from bros.core.request import SamplingParams, ServiceClass, Slo
from support.bench_server import planned

RT, BE = ServiceClass.RT, ServiceClass.BE
COMMON = {
    "model": "m",
    "max_tokens": 3,
    "temperature": 0,
    "seed": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
EXACT = {"ignore_eos": True, "min_tokens": 3}
IDS = {"prompt": [5, 6]}
TEXT = {"prompt": "hi"}


def body(
    name: str, service_class: ServiceClass = RT, *, request_format: Any = None, **request: Any
) -> dict[str, Any]:
    words = RequestFormat(dialect=dialect_of(name), model="m", **(request_format or {}))
    said: dict[str, Any] = json.loads(
        words.body(planned("r", service_class, **request), [5, 6], "hi")
    )
    return said


@pytest.mark.parametrize(
    ("name", "service_class", "own"),
    [
        ("bros", RT, IDS | EXACT | {"service_tier": "default"}),
        ("bros", BE, IDS | EXACT | {"service_tier": "flex"}),
        ("vllm", RT, IDS | EXACT),
        ("vllm", BE, IDS | EXACT | {"priority": 10}),
        ("sglang", RT, IDS | EXACT | {"priority": 100}),
        ("sglang", BE, IDS | EXACT | {"priority": 0}),
        ("plain", RT, TEXT),
        ("plain", BE, TEXT),
    ],
)
def test_body_of_each_dialect(name: str, service_class: ServiceClass, own: dict[str, Any]) -> None:
    assert body(name, service_class) == COMMON | own


def test_transformers_gets_the_length_in_its_own_field() -> None:
    said = body("transformers")
    settings = json.loads(said.pop("generation_config"))
    assert settings == {"do_sample": False, "min_new_tokens": 3}
    assert said == COMMON | TEXT


def test_objectives_go_to_bros_in_milliseconds_and_only_those_that_are_set() -> None:
    said = body("bros", slo=Slo(ttft_s=0.4, deadline_s=60.0))
    assert said["slo"] == {"ttft_ms": 400.0, "deadline_ms": 60_000.0}
    assert "slo" not in body("bros")


@pytest.mark.parametrize("name", DIALECTS)
def test_without_classes_requests_of_both_are_alike(name: str) -> None:
    hidden = {"classes": False}
    slo = Slo(ttft_s=1.0)
    rt = body(name, RT, request_format=hidden, slo=slo)
    assert rt == body(name, BE, request_format=hidden, slo=slo)
    assert not rt.keys() & {"priority", "service_tier", "slo"}


@pytest.mark.parametrize("name", DIALECTS)
def test_natural_lengths_are_only_limited(name: str) -> None:
    said = body(name, forced=False)
    assert said["max_tokens"] == 3
    assert not said.keys() & {"ignore_eos", "min_tokens", "generation_config"}


@pytest.mark.parametrize("name", DIALECTS)
def test_chat_takes_the_text(name: str) -> None:
    said = body(name, request_format={"endpoint": Endpoint.CHAT})
    assert said["messages"] == [{"role": "user", "content": "hi"}]
    assert "prompt" not in said


def test_plain_forces_lengths_only_when_asked() -> None:
    request = planned()
    assert not RequestFormat(dialect=dialect_of("plain"), model="m").forces(request)
    request_format = RequestFormat(dialect=dialect_of("plain"), model="m", ignore_eos=True)
    assert request_format.forces(request)
    assert not request_format.forces(planned(forced=False))
    assert body("plain", request_format={"ignore_eos": True}) == COMMON | TEXT | EXACT


def test_extra_fields_win_and_the_kind_of_prompt_can_be_chosen() -> None:
    said = body("plain", request_format={"extra": {"seed": 7, "top_k": 1}, "token_ids": True})
    assert said == COMMON | IDS | {"seed": 7, "top_k": 1}
    assert body("bros", request_format={"token_ids": False})["prompt"] == "hi"


def test_own_server_takes_these_lengths() -> None:
    said = body("bros")
    SamplingParams(min_tokens=said["min_tokens"], max_tokens=said["max_tokens"])


def test_unknown_dialect_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="'tgi'.*bros, vllm, sglang, transformers, plain"):
        dialect_of("tgi")
