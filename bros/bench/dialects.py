"""The body of a request for each kind of server.

             class and objectives            exact lengths             prompt
bros         service_tier, slo               ignore_eos, min_tokens    token ids
vllm         priority (0 before 10)          ignore_eos, min_tokens    token ids
sglang       priority (100 before 0)         ignore_eos, min_tokens    token ids
transformers none                            generation_config         text
plain        none                            none                      text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from bros.bench.plan import Planned
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass

Fields = dict[str, object]

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Endpoint(StrEnum):
    """OpenAI's completions or chat completions."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The fields that one kind of server takes beyond OpenAI's own.

    class_fields: the fields for the service class and the objectives of a request.
    length_fields: the fields that force the exact output length; None if the server has none.
    token_ids: whether completions take prompts as token ids.
    """

    name: str
    class_fields: Callable[[Planned], Fields]
    length_fields: Callable[[Planned], Fields] | None
    token_ids: bool

    @property
    def has_classes(self) -> bool:
        """Whether a request can name its service class."""
        return self.class_fields is not _no_class_fields


def _no_class_fields(planned: Planned) -> Fields:
    return {}


def _bros_class_fields(planned: Planned) -> Fields:
    tier = "flex" if planned.service_class is ServiceClass.BE else "default"
    slo = planned.slo
    named = {
        "ttft_ms": slo.ttft_s,
        "tpot_ms": slo.tpot_s,
        "gap_ms": slo.gap_s,
        "deadline_ms": slo.deadline_s,
    }
    asked = {name: value * 1e3 for name, value in named.items() if value is not None}
    return {"service_tier": tier, "slo": asked} if asked else {"service_tier": tier}


def _vllm_class_fields(planned: Planned) -> Fields:
    """Lower runs first, 0 is the default. Without priority scheduling vLLM rejects other values."""
    return {"priority": 10} if planned.service_class is ServiceClass.BE else {}


def _sglang_class_fields(planned: Planned) -> Fields:
    """Higher runs first; by default it preempts only if it is more than 10 higher."""
    return {"priority": 0 if planned.service_class is ServiceClass.BE else 100}


def _exact_length(planned: Planned) -> Fields:
    return {"ignore_eos": True, "min_tokens": planned.output_tokens}


def _exact_length_transformers(planned: Planned) -> Fields:
    settings = {"do_sample": False, "min_new_tokens": planned.output_tokens}
    return {"generation_config": _to_json(settings)}


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            Dialect("bros", _bros_class_fields, _exact_length, token_ids=True),
            Dialect("vllm", _vllm_class_fields, _exact_length, token_ids=True),
            Dialect("sglang", _sglang_class_fields, _exact_length, token_ids=True),
            Dialect("transformers", _no_class_fields, _exact_length_transformers, token_ids=False),
            Dialect("plain", _no_class_fields, None, token_ids=False),
        )
    }
)


def dialect_of(name: str) -> Dialect:
    """Raises ConfigError, which lists the names, for an unknown name."""
    if name not in DIALECTS:
        raise ConfigError(f"no dialect is called {name!r}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFormat:
    """Everything that determines the body of a request besides the request itself.

    classes: whether the body names the service class and the objectives.
    ignore_eos: send `ignore_eos` although the dialect cannot force exact output lengths.
    token_ids: whether prompts are token ids; None: if the dialect supports them.
    extra: further fields of the body; they override all others.
    """

    dialect: Dialect
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    classes: bool = True
    ignore_eos: bool = False
    token_ids: bool | None = None
    seed: int = 0
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint is Endpoint.CHAT else "/v1/completions"

    def forces(self, planned: Planned) -> bool:
        """Whether the response must have exactly `planned.output_tokens` tokens."""
        return planned.forced and (self.dialect.length_fields is not None or self.ignore_eos)

    def body(self, planned: Planned, token_ids: Sequence[int], text: str) -> bytes:
        """The request as JSON. The prompt is either `token_ids` or `text`."""
        fields: Fields = {"model": self.model}
        if self.endpoint is Endpoint.CHAT:
            fields["messages"] = [{"role": "user", "content": text}]
        elif self.dialect.token_ids if self.token_ids is None else self.token_ids:
            fields["prompt"] = list(token_ids)
        else:
            fields["prompt"] = text
        fields |= {
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.forces(planned):
            length_fields = self.dialect.length_fields or _exact_length
            fields |= length_fields(planned)
        if self.classes:
            fields |= self.dialect.class_fields(planned)
        return _to_json(fields | dict(self.extra)).encode("ascii")
