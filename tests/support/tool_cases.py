"""Tools, calls of them as models write them, and the templates of such models."""

from __future__ import annotations

from support import chat_templates
from support.scripted_server import CHATML

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
HERMES_TOKENS = {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False}

CALLS_BY_FORMAT = {
    "hermes": (chat_templates.HERMES, HERMES_TOKENS, PARIS),
    "hermes, no tokens": (chat_templates.HERMES, {}, PARIS),
    "hermes, special": (chat_templates.HERMES, dict.fromkeys(HERMES_TOKENS, True), PARIS),
    "described": (CHATML, {}, PARIS),
    "llama3": (
        chat_templates.LLAMA3,
        {"<|python_tag|>": True},
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
    ),
    "mistral": (
        chat_templates.MISTRAL,
        {"[TOOL_CALLS]": True},
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    ),
    "mistral, newer": (
        chat_templates.MISTRAL,
        {"[TOOL_CALLS]": True, "[ARGS]": True, "[CALL_ID]": True},
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}',
    ),
    "pythonic": (chat_templates.PYTHONIC, {}, "[get_weather(city='Paris')]"),
}
"""Name -> (template, tokens, a call of get_weather)."""
