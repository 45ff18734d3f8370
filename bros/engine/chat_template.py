"""Chat templates: the Jinja dialect in which model folders say how a conversation is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bros.core.clock import Clock
from bros.core.errors import InvalidRequestError, ModelError

_NO_TEMPLATE = (
    "This model has no chat template, so it cannot take messages; use completions with a prompt."
)


class ChatTemplates:
    """The chat templates of one model. Rendering is safe from several threads.

    A model may have a template of its own for conversations with tools (`tool_use`).
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], clock: Clock):
        """sources: name -> Jinja text. variables: bos_token, eos_token, ...

        Raises ModelError for a template that is not valid Jinja.
        """
        environment = _environment(clock)
        self._variables = dict(variables)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ModelError(f"The chat template {name!r} is not valid: {error}") from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text, up to where the assistant's answer begins.

        Raises InvalidRequestError if there is no template or it does not take these messages.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequestError(_NO_TEMPLATE, param="messages")
        values = {"add_generation_prompt": True, **self._variables, **variables}
        try:
            return template.render(messages=[dict(message) for message in messages], **values)
        except Exception as error:
            # A template computes with what the user sent, so it can fail in any way that
            # Python can, and each of them means that it does not take these messages.
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"The model's chat template does not take these messages: {reason}",
                param="messages",
            ) from error


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model folder by name; `config` is its tokenizer_config.json.

    Template files win over the ones in the configuration.
    """
    sources: dict[str, str] = {}
    inline = config.get("chat_template")
    legacy = folder / "chat_template.json"
    if inline is None and legacy.is_file():
        inline = json.loads(legacy.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(inline, str):
        sources["default"] = inline
    elif inline is not None:
        sources.update({entry["name"]: entry["template"] for entry in inline})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    main = folder / "chat_template.jinja"
    if main.is_file():
        sources["default"] = main.read_text(encoding="utf-8")
    return sources


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )

    def strftime_now(form: str) -> str:
        return datetime.fromtimestamp(clock.unix_time()).strftime(form)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter writes < and > as escapes, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
