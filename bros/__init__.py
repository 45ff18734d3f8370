"""bros: an LLM inference engine that serves real-time and best-effort requests together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bros.core.request import SamplingParams

if TYPE_CHECKING:
    from bros.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # late, because it imports torch, which takes seconds
        from bros.llm import LLM

        return LLM
    raise AttributeError(f"module 'bros' has no attribute {name!r}")
