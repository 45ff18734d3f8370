"""LangChain and bros: chat models that join a session, and prompts that are sent unrendered.

Needs `pip install bros[langchain]`. What LangChain renders arrives as plain text, one request at a
time; `SemanticPrompt` hands over the template and its variables instead, so the server sees the
whole chain before it begins (section 6 of the Parrot paper).
"""

from __future__ import annotations

from bros.langchain.chat_model import BrosChat
from bros.langchain.prompts import SemanticPrompt, Value

__all__ = ["BrosChat", "SemanticPrompt", "Value"]
