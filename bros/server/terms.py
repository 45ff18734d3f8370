"""From what a client sent to the engine's terms: sampling, service class, objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from starlette.datastructures import Headers

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams, ServiceClass, Slo
from bros.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    SloFields,
)

_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat has none."""

_MAX_SLO_MS = 1e12

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Tier:
    """What a `service_tier` means here.

    name: what the response calls it. slo_scale: times the server's objectives gives those of
    the tier; None leaves them to the engine.
    """

    service_class: ServiceClass
    name: str
    slo_scale: float | None = None


_DEFAULT = Tier(ServiceClass.RT, "default")
_PRIORITY = Tier(ServiceClass.RT, "priority", slo_scale=0.5)
BEST_EFFORT = Tier(ServiceClass.BE, "flex")
_TIERS: Mapping[str | None, Tier] = MappingProxyType(
    {"priority": _PRIORITY, "fast": _PRIORITY, "flex": BEST_EFFORT}
)


def tier_of(request: GenerationRequest) -> Tier:
    """flex is best-effort; everything else, and nothing, is real-time."""
    return _TIERS.get(request.service_tier, _DEFAULT)


def tier_used(asked: Tier, *, best_effort: bool) -> str:
    """What the response says. best_effort: what the engine serves any part of the request as."""
    return BEST_EFFORT.name if best_effort else asked.name


def chat_sampling(request: ChatCompletionRequest) -> SamplingParams:
    """Raises InvalidRequestError naming the field as the client calls it."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(
            "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs"
        )
    max_tokens = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _sampling(request, max_tokens, logprobs)


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    """Raises InvalidRequestError naming the field as the client calls it."""
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError(
            "'echo' together with 'logprobs' is not supported.",
            param="echo",
            code="unsupported_parameter",
        )
    return _sampling(request, request.max_tokens or _COMPLETION_MAX_TOKENS, request.logprobs)


def slo_of(
    request: GenerationRequest, headers: Headers, default: Slo, deadline_ms: float | None = None
) -> Slo:
    """Field by field: the body's `slo`, else the header, else its llm-d alias, else the tier's.

    default: the server's objectives, of which a tier may take a fraction. deadline_ms: if neither
    the body nor a header has one. None where nothing
    was asked: then they are the engine's to apply. Raises InvalidRequestError naming a header
    that is not a positive number.
    """
    body = request.slo or SloFields()
    scale = tier_of(request).slo_scale
    asked = Slo(
        _seconds(body.ttft_ms or _header_ms(headers, "ttft")),
        _seconds(body.tpot_ms or _header_ms(headers, "tpot")),
        _seconds(body.deadline_ms or _header_ms(headers, "deadline") or deadline_ms),
    )
    return Slo(
        _first(asked.ttft_s, _scaled(default.ttft_s, scale)),
        _first(asked.tpot_s, _scaled(default.tpot_s, scale)),
        _first(asked.deadline_s, _scaled(default.deadline_s, scale)),
    )


def _sampling(
    request: GenerationRequest, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "'stream_options' needs 'stream' to be true.", param="stream_options"
        )
    given = {name: getattr(request, name) for name in _SAME_NAME}
    if request.top_k is not None:
        given["top_k"] = 0 if request.top_k == -1 else request.top_k
    if request.logit_bias:
        given["logit_bias"] = _token_keys(request.logit_bias)
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)


def _token_keys(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(
                f"'logit_bias' maps token ids to numbers; {key[:50]!r} is no token id.",
                param="logit_bias",
            )
    return {int(key): bias for key, bias in biases.items()}


def _header_ms(headers: Headers, objective: str) -> float | None:
    for name in (f"x-slo-{objective}-ms", f"x-llm-d-slo-{objective}-ms"):
        text = headers.get(name)
        if text is None:
            continue
        return to_milliseconds(text, f"The header {name}", name)
    return None


def to_milliseconds(text: str, title: str, param: str) -> float:
    """Raises InvalidRequestError, with the title, for what is no positive number."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _MAX_SLO_MS:
        raise InvalidRequestError(
            f"{title} must be a positive number of milliseconds.", param=param
        )
    return value


def _first(asked: float | None, otherwise: float | None) -> float | None:
    return otherwise if asked is None else asked


def _scaled(objective_s: float | None, scale: float | None) -> float | None:
    return None if objective_s is None or scale is None else objective_s * scale


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
