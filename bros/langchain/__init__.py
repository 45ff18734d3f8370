"""LangChain integration: a chat model that can join a session, and prompts sent unrendered.

Requires `pip install bros[langchain]`. LangChain renders each prompt and sends it as plain text,
one request at a time. `SemanticPrompt` sends the template and its variables instead, so the server
knows the whole chain before it starts (Parrot, section 6).
"""

from __future__ import annotations

from bros.langchain.chat_model import BrosChat
from bros.langchain.prompts import SemanticPrompt, Value

__all__ = ["BrosChat", "SemanticPrompt", "Value"]
