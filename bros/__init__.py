"""bros: an LLM inference engine that serves real-time and best-effort requests together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bros.core import grammars
from bros.core.errors import (
    BrosError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelError,
    OverloadedError,
    PromptTooLongError,
)
from bros.core.request import SamplingParams, ServiceClass

if TYPE_CHECKING:
    from bros.llm import LLM, Context, RankedDocument
    from bros.text.generation import ChoiceResult

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BrosError",
    "ChoiceResult",
    "ConfigError",
    "Context",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelError",
    "OverloadedError",
    "PromptTooLongError",
    "RankedDocument",
    "SamplingParams",
    "ServiceClass",
    "grammars",
]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "ChoiceResult", "Context", "RankedDocument"):
        import bros.llm as llm  # late, because it imports torch, which takes seconds

        return getattr(llm, name)
    raise AttributeError(f"module 'bros' has no attribute {name!r}")
