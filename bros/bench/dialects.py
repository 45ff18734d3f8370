"""How requests are put into words for each kind of server.

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
    """Which of OpenAI's interfaces is used: text that is continued, or a chat."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one kind of server understands beyond OpenAI's own fields.

    terms: says the class and the objectives of a request.
    force: asks for exactly so many tokens; None if the server has no means to.
    token_ids: whether completions take prompts as token ids.
    """

    name: str
    terms: Callable[[Planned], Fields]
    force: Callable[[Planned], Fields] | None
    token_ids: bool

    @property
    def has_classes(self) -> bool:
        """Whether it can be told what is best-effort."""
        return self.terms is not _no_terms


def _no_terms(planned: Planned) -> Fields:
    return {}


def _bros_terms(planned: Planned) -> Fields:
    tier = "flex" if planned.service_class is ServiceClass.BE else "default"
    slo = planned.slo
    named = {"ttft_ms": slo.ttft_s, "tpot_ms": slo.tpot_s, "deadline_ms": slo.deadline_s}
    asked = {name: value * 1e3 for name, value in named.items() if value is not None}
    return {"service_tier": tier, "slo": asked} if asked else {"service_tier": tier}


def _vllm_terms(planned: Planned) -> Fields:
    """Lower goes first; 0, the default, is left out as servers without the policy refuse others."""
    return {"priority": 10} if planned.service_class is ServiceClass.BE else {}


def _sglang_terms(planned: Planned) -> Fields:
    """Higher goes first, and displaces what runs only if it is more than 10 higher (defaults)."""
    return {"priority": 0 if planned.service_class is ServiceClass.BE else 100}


def _force(planned: Planned) -> Fields:
    return {"ignore_eos": True, "min_tokens": planned.output_tokens}


def _force_transformers(planned: Planned) -> Fields:
    settings = {"do_sample": False, "min_new_tokens": planned.output_tokens}
    return {"generation_config": _to_json(settings)}


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            Dialect("bros", _bros_terms, _force, token_ids=True),
            Dialect("vllm", _vllm_terms, _force, token_ids=True),
            Dialect("sglang", _sglang_terms, _force, token_ids=True),
            Dialect("transformers", _no_terms, _force_transformers, token_ids=False),
            Dialect("plain", _no_terms, None, token_ids=False),
        )
    }
)


def dialect_of(name: str) -> Dialect:
    """Raises ConfigError, which lists the names, for one that is not known."""
    if name not in DIALECTS:
        raise ConfigError(f"no dialect is called {name!r}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """All that shapes a request's body besides the request.

    classes: False hides from the server what is real-time and what is best-effort, and the
        objectives with it.
    ignore_eos: sends `ignore_eos` to a server whose dialect has no exact lengths, for those that
        know the field.
    token_ids: None is what the dialect can.
    extra: further fields of the body; they win over all others.
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
        """Whether the answer must have `planned.output_tokens` tokens."""
        return planned.forced and (self.dialect.force is not None or self.ignore_eos)

    def body(self, planned: Planned, token_ids: Sequence[int], text: str) -> bytes:
        """The request as JSON; the prompt is `token_ids` or `text`, whichever is taken."""
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
            force = self.dialect.force or _force
            fields |= force(planned)
        if self.classes:
            fields |= self.dialect.terms(planned)
        return _to_json(fields | dict(self.extra)).encode("ascii")
