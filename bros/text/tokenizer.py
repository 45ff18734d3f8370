"""Text to token ids and back, and chat messages to a prompt.

Built on the `tokenizers` library and Jinja alone: AutoTokenizer would import torch, which costs
the server process seconds at start and hundreds of megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bros.core.clock import Clock, SystemClock
from bros.core.errors import InvalidRequestError, ModelError, PromptTooLongError
from bros.text.detokenizer import IncrementalDetokenizer, TokenTable

# ---- Chat templates: the Jinja dialect in which model folders say how a conversation is written.


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


_PIECE_CHARS = 50_000
_CUT_TOKENS = 16
"""How many tokens more a text may have for being cut in two; one or two, as a rule."""

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The tokenizer of one model folder. All methods may be called from several threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special: Mapping[str, str],
        templates: ChatTemplates,
    ) -> None:
        """special: bos_token, eos_token, ... -> the token as written. `load` is the usual way."""
        self._tokenizer = tokenizer
        self._templates = templates
        self._special_tokens = dict(special)
        self._table = TokenTable(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @classmethod
    def load(cls, folder: Path, clock: Clock | None = None) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat templates of a model folder.

        A folder in an older format (vocab.json and merges.txt, or tokenizer.model) is converted
        by transformers, which takes seconds. `clock` is for templates that write today's date.
        Raises ModelError if there is no tokenizer or it is of a kind that is not supported.
        """
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(folder, config)
        try:
            tokenizer = _load_backend(folder)
        except ModelError:
            raise
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ModelError(f"The tokenizer in {folder} cannot be read: {error}") from error
        _prepare(tokenizer, special)
        sources = read_templates(folder, config)
        return cls(tokenizer, special, ChatTemplates(sources, special, clock or SystemClock()))

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """Token ids of a text; add_special_tokens puts BOS or EOS where the model wants them.

        Long texts are best encoded on a worker thread. Raises PromptTooLongError (param "prompt")
        early if a long text certainly has more than `limit` tokens.
        """
        if limit is not None:
            self._refuse_if_longer(text, limit)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _refuse_if_longer(self, text: str, limit: int) -> None:
        # Piece by piece, because one call holds the interpreter lock for half a second per MB.
        if len(text) <= _PIECE_CHARS:
            return
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            ids = self._tokenizer.encode(piece, add_special_tokens=False).ids
            count += max(len(ids) - _CUT_TOKENS, 0)
            if count > limit:
                raise PromptTooLongError(count, limit, "prompt", exact=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD (see TokenTable)."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh detokenizer for one sequence of output tokens."""
        return IncrementalDetokenizer(self._table, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer begins.

        template_kwargs are variables of the template such as `tools`; add_generation_prompt is
        True unless given. Raises InvalidRequestError (param "messages") if the model has no
        template or the template does not take these messages.
        """
        text = self.render_chat(messages, **template_kwargs)
        return self.encode(text, add_special_tokens=False)  # templates write them themselves

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """The text that `apply_chat_template` encodes."""
        return self._templates.render(messages, **template_kwargs)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds inside a text, possibly half a character.

        Special tokens give their name, ids outside the vocabulary nothing.
        """
        return self._table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, U+FFFD where the bytes are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object, not {type(content).__name__}.")
    return content


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> token; both files write a token as a string or as an object with `content`."""
    entries = {**_read_json(folder / "special_tokens_map.json"), **config}
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        token = entries.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        return tokenizers.Tokenizer.from_file(str(path))
    if not any((folder / name).is_file() for name in ("vocab.json", "tokenizer.model")):
        raise ModelError(f"The folder {folder} has no tokenizer.json.")
    # Imported late: transformers brings torch along, and only old model folders need it.
    from transformers import AutoTokenizer

    converted: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return converted


def _prepare(tokenizer: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
    """Settings that tokenizer.json may have wrong. What stands around a prompt is right there, so
    add_bos_token and add_eos_token of the configuration are left aside, as in transformers."""
    # Settings left over from training would cut or fill up prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in special.values() if token not in known]
    tokenizer.add_special_tokens(
        [token for token in missing if tokenizer.token_to_id(token) is not None]
    )
