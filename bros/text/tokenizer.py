"""Chat templates, tokenizer and incremental detokenizer of a model.

They use the `tokenizers` library and Jinja only: AutoTokenizer would import torch, which would cost
the server process seconds at start and hundreds of megabytes.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import jinja2
import regex
import tokenizers
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bros.core.clock import Clock, SystemClock
from bros.core.errors import InvalidRequestError, ModelError, PromptTooLongError
from bros.core.files import read_model_json_object, read_special_tokens, read_templates
from bros.text.json_text import write_json

T = TypeVar("T")

# ---- Chat templates, in the Jinja dialect of Hugging Face.


_NO_TEMPLATE = (
    "This model has no chat template, so it cannot take messages; use completions with a prompt."
)


class ChatTemplates:
    """The chat templates of one model: `default`, and `tool_use` for conversations with tools.

    Several threads may render.

    source: Jinja text of the one for tools; empty if there is none.
    knows_tools: whether it uses the variable `tools`.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], clock: Clock):
        """sources: name -> Jinja text. variables: bos_token, eos_token, ...

        Raises ModelError for a template that is not valid Jinja.
        """
        environment = _environment(clock)
        self.source = sources.get("tool_use", sources.get("default", ""))
        self.knows_tools = False
        self._variables = dict(variables)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ModelError(f"The chat template {name!r} is not valid: {error}") from error
        if sources:
            tree = environment.parse(self.source)
            self.knows_tools = "tools" in meta.find_undeclared_variables(tree)

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text, up to where the assistant's answer begins.

        Raises InvalidRequestError if there is no template or it does not accept these messages.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequestError(_NO_TEMPLATE, param="messages")
        values = {**_UNSET, **self._variables, **variables}
        try:
            return template.render(messages=[dict(message) for message in messages], **values)
        except Exception as error:
            # A template computes with user input, so it can raise any exception.
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"The model's chat template does not accept these messages: {reason}",
                param="messages",
            ) from error


# What templates find if nothing is given, as in transformers: many ask `is not none`.
_UNSET = {"tools": None, "documents": None, "add_generation_prompt": True}


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; bros only renders its body."""

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
    # Jinja's own filter escapes < and >, which models were not trained on.
    return write_json(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# ---- From token ids to text, as they arrive.


CONTROL = "\ufdd1"
"""Comes before the text of a control token that a detokenizer shows. A code point that is no
character; texts of clients that have it get U+FFFD instead (`Tokenizer.escape`)."""


class TokenTable:
    """Maps token ids to bytes; shared by all detokenizers of one tokenizer.

    Text is the concatenation of these bytes decoded as UTF-8, with one U+FFFD for every ill-formed
    sequence. For byte-level BPE this equals the output of the `tokenizers` library. For
    SentencePiece byte fallback the two differ on ill-formed bytes only: the library then turns a
    whole run of byte tokens into U+FFFD, valid characters included, so a detokenizer could show no
    character of the run before its end.

    Raises ModelError for a decoder that does not work token by token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, controls: Collection[int] = ()) -> None:
        """controls: tokens that are shown as CONTROL and their text, special or not."""
        self._tokenizer = tokenizer
        self._controls = frozenset(controls)
        self._special = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token_id not in self._controls
        )
        self._alphabet: dict[str, int] | None = None
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._metaspace: str | None = None
        self._separator = b""
        self._continuation: str | None = None
        self.strip_char, self.strip_count = "", 0
        self._read_decoder(tokenizer)
        # A cache without a lock: racing threads compute the same values.
        self._bytes: dict[int, bytes] = {}
        self.text_of = functools.cache(self._text_of)
        """(token id) -> the text of a token inside a text, "" for a special token; None if the
        token begins or ends within a character, so that its text depends on its neighbors."""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def first_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token at the start of a text, where some decoders drop a leading space.

        None for an id outside the vocabulary: the next token is then still the first one.
        """
        piece = self._piece(token_id)
        if piece is None:
            return None
        if token_id in self._controls:
            return (CONTROL + piece).encode()
        if self._metaspace is not None:
            return self._encode(piece.replace(self._metaspace, ""))
        return self._encode(piece)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token inside a text. Ids outside the vocabulary are empty."""
        found = self._bytes.get(token_id)
        if found is None:
            piece, mark = self._piece(token_id), self._continuation
            if token_id in self._controls:
                found = (CONTROL + (piece or "")).encode()
            elif piece is None:
                found = b""
            elif mark is not None and piece.startswith(mark):
                found = self._encode(piece[len(mark) :])
            else:
                found = self._separator + self._encode(piece)
            self._bytes[token_id] = found
        return found

    def _piece(self, token_id: int) -> str | None:
        """None for an id outside the vocabulary, where a Tokenizer has added _BREAK."""
        piece: str | None = self._tokenizer.id_to_token(token_id)
        return None if piece == _BREAK else piece

    def _text_of(self, token_id: int) -> str | None:
        try:
            return "" if token_id in self._special else self.bytes_of(token_id).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def _encode(self, piece: str) -> bytes:
        if self._alphabet is not None:
            values = [self._alphabet.get(char, -1) for char in piece]
            return piece.encode() if -1 in values else bytes(values)
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        if self._byte_fallback and len(piece) == 6 and piece[:3] == "<0x" and piece[5] == ">":
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                return piece.encode()
        return piece.encode()

    def _read_decoder(self, tokenizer: tokenizers.Tokenizer) -> None:
        if tokenizer.decoder is None:
            self._separator = b" "
            return
        state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        fused = False
        for step in steps:
            if not self._read_step(step, fused):
                raise ModelError(
                    f"The tokenizer's decoder has a {step['type']} step that bros cannot "
                    f"apply token by token: {json.dumps(step, ensure_ascii=False)}"
                )
            fused = fused or step["type"] in ("Fuse", "ByteLevel")

    def _read_step(self, step: dict[str, Any], fused: bool) -> bool:
        """Read one step of the decoder; False if it cannot be applied token by token."""
        match step:
            case {"type": "Fuse"}:
                return True
            case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0}:
                self.strip_char, self.strip_count = char, count
                return fused
            case {"type": "WordPiece", "prefix": str(prefix)}:
                # Its cleanup, which drops spaces before punctuation, would change earlier text.
                self._continuation, self._separator = prefix, b" "
                return not fused
            case {"type": "ByteLevel"}:
                self._alphabet = _byte_alphabet()
                return not (fused or self._replacements or self._byte_fallback)
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
                return not fused
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
                return not fused and not self._byte_fallback
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._replacements.append((mark, " "))
                if step.get("prepend_scheme") != "never":
                    self._metaspace = mark
                return not fused
        return False


class IncrementalDetokenizer:
    """Turns token ids into text as they arrive. Text that it has returned never changes.

    The concatenated results of `push` and `finish` are the text of all ids. The cost of a token
    does not depend on the number of tokens before it.
    """

    __slots__ = ("_first", "_mid_text", "_skip_special", "_strip", "_table", "_utf8")

    def __init__(
        self, table: TokenTable, *, skip_special_tokens: bool = True, continued: bool = False
    ) -> None:
        """continued: other text comes before the first token, so no leading space is dropped."""
        self._table = table
        self._skip_special = skip_special_tokens
        self._mid_text = False
        """The text has begun and no incomplete character is held: text_of(id) is a token's text."""
        self._first = not continued
        self._strip = 0 if continued else table.strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push_token(self, token_id: int) -> str:
        """`push` of one token."""
        text = self._table.text_of(token_id) if self._mid_text else None
        return self.push((token_id,)) if text is None else text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete. The bytes of an incomplete character are held."""
        table = self._table
        pieces: list[bytes] = []
        for token_id in token_ids:
            if self._skip_special and table.is_special(token_id):
                continue
            if self._first:
                opening = table.first_bytes(token_id)
                pieces.append(opening or b"")
                self._first = opening is None
            else:
                pieces.append(table.bytes_of(token_id))
        text = self._stripped(self._utf8.decode(b"".join(pieces))) if pieces else ""
        held = self._utf8.getstate()[0]
        self._mid_text = not (held or self._first or self._strip) and self._skip_special
        return text

    def finish(self) -> str:
        """U+FFFD for an incomplete character at the end, else "". Call it once."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._table.strip_char):
                self._strip = 0
                break
            text = text[len(self._table.strip_char) :]
            self._strip -= 1
        return text


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: a printable Latin-1 byte is written as itself, any other
    byte as the next unused character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


# ---- From text to token ids.


_PIECE_CHARS = 50_000
"""Texts longer than this are encoded in pieces to check their length."""

_FREE_CHARS = 2_000
"""Texts longer than this are encoded without the interpreter lock: the library releases it only in
its methods for batches, whose hand-over to another thread costs more than a short text."""

_CUT_TOKENS = 16
"""Bound on the additional tokens per cut of a text; usually one or two."""

_BREAK = "\ufdd0"
"""Marks text that must not become a special token: `<BREAK|im_start|>`. A code point that is no
character, so texts have no use for it; in one that has it, it becomes U+FFFD."""


class Tokenizer:
    """The tokenizer of one model folder. All methods may be called from several threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special: Mapping[str, str],
        templates: ChatTemplates,
    ) -> None:
        """special: bos_token, eos_token, ... -> the token's text. Usually called by `load`."""
        self._tokenizer = tokenizer
        self._templates = templates
        self._special_tokens = dict(special)
        self._table = TokenTable(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special = [token.content for token in added.values() if token.special]
        self._special_texts = _any_of(self._special)
        # The library splits a text at a token like this, and `encode` drops it.
        tokenizer.add_tokens([tokenizers.AddedToken(_BREAK, special=False, normalized=False)])
        self._break_id = tokenizer.token_to_id(_BREAK)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @classmethod
    def load(cls, folder: Path, clock: Clock | None = None) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat templates of a model folder.

        transformers converts a folder in an older format (vocab.json and merges.txt, or
        tokenizer.model), which takes seconds. clock: for templates that write today's date.
        Raises ModelError if there is no tokenizer or its kind is not supported.
        """
        config = read_model_json_object(folder / "tokenizer_config.json")
        special = read_special_tokens(folder, config)
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

    @property
    def template_source(self) -> str:
        """Jinja text of the chat template for conversations with tools; empty without one."""
        return self._templates.source

    @property
    def template_knows_tools(self) -> bool:
        """Whether it writes tool definitions into prompts."""
        return self._templates.knows_tools

    def added_token(self, text: str) -> int | None:
        """The token that a text always becomes, special or not; None if there is none."""
        return self._added.get(text)

    def table_with(self, controls: Collection[str]) -> TokenTable:
        """A table for detokenizers that show these tokens, marked as control tokens."""
        return TokenTable(self._tokenizer, [self._added[text] for text in controls])

    def escaper(self, texts: Collection[str]) -> regex.Pattern[str] | None:
        """For `escape`: makes it escape these texts, too."""
        return _any_of([*self._special, *texts])

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        limit: int | None = None,
        escaped: bool = False,
    ) -> list[int]:
        """Token ids of a text; add_special_tokens adds BOS or EOS where the model expects them.

        The text of a special token becomes this token, except where `escape` has marked it.
        escaped: whether parts of the text come from `escape`.

        Encode long texts on a worker thread; other threads run meanwhile, except for some 20 ns per
        token at the end. Raises PromptTooLongError (param "prompt") early if a long text certainly
        has more than `limit` tokens.
        """
        has_break = _BREAK in text
        if has_break and not escaped:
            text = text.replace(_BREAK, "\ufffd")
        if limit is not None:
            self._check_length(text, limit)
        ids = self._ids(text, add_special_tokens)
        return [token for token in ids if token != self._break_id] if has_break else ids

    def encode_texts(
        self,
        text: str,
        second: str | None = None,
        *,
        cut: int | None = None,
        limit: int | None = None,
        escaped: bool = False,
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of a pair of texts, with the model's special tokens; and the
        position at which the second text begins.

        cut: most tokens, special ones included: longer texts are cut, of a pair the longer one.
        limit, escaped: as for `encode`; there is no limit for what is cut.
        """
        if second is None and cut is None:
            return self.encode(text, limit=limit, escaped=escaped), None
        backend, parts = self._tokenizer, []
        for part in (text,) if second is None else (text, second):
            if _BREAK in part and not escaped:
                part = part.replace(_BREAK, "\ufffd")
            if limit is not None and cut is None:
                self._check_length(part, limit)
            parts.append(backend.encode(part, add_special_tokens=False))
        if cut is not None:
            room = max(cut - backend.num_special_tokens_to_add(second is not None), 0)
            lengths = _cut_lengths([len(encoded) for encoded in parts], room)
            for encoded, length in zip(parts, lengths, strict=True):
                encoded.truncate(length)
        whole = backend.post_process(parts[0], parts[1] if second is not None else None)
        kept = [
            (token, kind)
            for token, kind in zip(whole.ids, whole.type_ids, strict=True)
            if token != self._break_id
        ]
        second_from = next((i for i, (_, kind) in enumerate(kept) if kind == 1), None)
        return [token for token, _ in kept], second_from

    def escape(self, value: T, pattern: regex.Pattern[str] | None = None) -> T:
        """A text that has the tokens of ordinary text throughout, also where it reads like a
        special token; or a JSON value with all its strings replaced by such texts. For
        `render_chat` and for `encode` with `escaped`. Other texts are returned as they are.

        pattern: of `escaper`; None: special tokens are escaped.
        """
        return cast(T, self._escape(value, pattern or self._special_texts))

    def _escape(self, value: object, pattern: regex.Pattern[str] | None) -> object:
        if isinstance(value, str):
            return self._escape_text(value, pattern)
        if isinstance(value, Mapping):
            return {
                self._escape(key, pattern): self._escape(inner, pattern)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._escape(inner, pattern) for inner in value]
        return value

    def _escape_text(self, text: str, pattern: regex.Pattern[str] | None) -> str:
        for mark in (_BREAK, CONTROL):
            if mark in text:
                text = text.replace(mark, "\ufffd")
        if pattern is None:
            return text
        # Again, because a break can lay bare another token: with <s> and s>< in <s><.
        # With `concurrent` other threads run meanwhile: 4 MB of beginnings of tokens take 0.1 s.
        concurrent = len(text) > _PIECE_CHARS
        while pattern.search(text, concurrent=concurrent):
            text = pattern.sub(_broken, text, concurrent=concurrent)
        return text

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        backend = self._tokenizer
        if len(text) <= _FREE_CHARS:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _check_length(self, text: str, limit: int) -> None:
        # In pieces, because the memory of a call is some 200 bytes per character.
        if len(text) <= _PIECE_CHARS:
            return
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            ids = self._ids(piece, add_special_tokens=False)
            count += max(len(ids) - _CUT_TOKENS, 0)
            if count > limit:
                raise PromptTooLongError(count, limit, "prompt", exact=False)

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        continued: bool = False,
    ) -> str:
        """The text of `token_ids`; ill-formed UTF-8 becomes U+FFFD (see TokenTable).

        continued: see IncrementalDetokenizer.
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens, continued=continued)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(
        self, *, skip_special_tokens: bool = True, continued: bool = False
    ) -> IncrementalDetokenizer:
        """A new detokenizer for one sequence of output tokens, see IncrementalDetokenizer."""
        return IncrementalDetokenizer(
            self._table, skip_special_tokens=skip_special_tokens, continued=continued
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer begins. Texts in it that
        read like special tokens stay text: only the template writes special tokens.

        template_kwargs: variables of the template such as `tools`; add_generation_prompt is True by
            default.
        Raises InvalidRequestError (param "messages") if the model has no template or the template
        does not accept these messages.
        """
        text = self.render_chat(self.escape(messages), **self.escape(template_kwargs))
        # The template has written the special tokens.
        return self.encode(text, add_special_tokens=False, escaped=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """The text of a conversation, ending where the assistant's answer begins; raises what
        `apply_chat_template` raises."""
        return self._templates.render(messages, **template_kwargs)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token inside a text, possibly part of a character.

        For a special token its name, for an id outside the vocabulary nothing.
        """
        return self._table.bytes_of(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token, which texts do not show."""
        return self._table.is_special(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


_ANCHOR = "\n"


class InnerTexts:
    """Encodes texts inside a prompt. Some tokenizers write a space before any text, which is there
    only at the beginning. Several threads may encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
        alone = tokenizer.encode("x", add_special_tokens=False)
        self._adds_space = self._after_anchor("x") != alone

    def encode(self, text: str, *, limit: int | None = None, escaped: bool = False) -> list[int]:
        """limit, escaped: as for Tokenizer.encode, and it raises what that raises."""
        found = self._after_anchor(text, limit, escaped=escaped) if self._adds_space else None
        if found is not None:
            return found
        return self._tokenizer.encode(text, add_special_tokens=False, limit=limit, escaped=escaped)

    def _after_anchor(
        self, text: str, limit: int | None = None, *, escaped: bool = False
    ) -> list[int] | None:
        """The tokens of `text` after the anchor; None if the anchor merges with it."""
        both = self._tokenizer.encode(
            _ANCHOR + text, add_special_tokens=False, limit=limit, escaped=escaped
        )
        size = len(self._anchor)
        return both[size:] if both[:size] == self._anchor else None


def _cut_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """The lengths of one or two texts after tokens of the longer one were dropped until they fit
    into `room`."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    shorter = min(first, second, room // 2)
    return [shorter, room - shorter] if first <= second else [room - shorter, shorter]


def _broken(found: regex.Match[str]) -> str:
    token: str = found[0]
    return token[0] + _BREAK + token[1:]


def _any_of(texts: Iterable[str]) -> regex.Pattern[str] | None:
    """A pattern of the longest of `texts` at a place, None if there are none. It is a tree: a list
    of 256 tokens that begin alike would be tried one by one at each place. Texts of one character
    are left out, as they cannot be broken."""
    tree: dict[str, Any] = {}
    for text in texts:
        if len(text) > 1:
            node = tree
            for char in text:
                node = node.setdefault(char, {})
            node[""] = {}
    return regex.compile(_tree_pattern(tree)) if tree else None


def _tree_pattern(tree: Mapping[str, Any]) -> str:
    branches = [regex.escape(char) + _tree_pattern(below) for char, below in tree.items() if char]
    if not branches:
        return ""
    either = branches[0] if len(branches) == 1 and "" not in tree else f"(?:{'|'.join(branches)})"
    return either + "?" if "" in tree else either


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        return tokenizers.Tokenizer.from_file(str(path))
    if not any(
        (folder / name).is_file() for name in ("vocab.json", "vocab.txt", "tokenizer.model")
    ):
        raise ModelError(f"The folder {folder} has no tokenizer.json.")
    # Late: transformers imports torch, and only old model folders need it.
    from transformers import AutoTokenizer

    converted: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return converted


def _prepare(tokenizer: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
    """Correct settings that tokenizer.json may have wrong. Its post-processor adds BOS and EOS
    correctly, so bros ignores add_bos_token and add_eos_token, as transformers does."""
    # Settings left over from training would truncate or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in special.values() if token not in known]
    tokenizer.add_special_tokens(
        [token for token in missing if tokenizer.token_to_id(token) is not None]
    )
