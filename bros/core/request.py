"""Requests to the engine and their outputs."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import random
import string
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from bros.core.errors import InvalidRequestError

MAX_OBJECTIVE_MS = 1e12
MIN_OBJECTIVE_MS = 0.001
"""Shortest objective that a client can set. Shorter ones would be 0 where they are shown."""

MAX_GRAMMAR_BYTES = 2**18
"""Longest text of a grammar in UTF-8."""

TOO_LONG = "string_above_max_length"
"""Code of the error of a text that is too long."""

MAX_AFTER_CHARS = 256
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1


class ServiceClass(enum.StrEnum):
    """Real-time (a user waits for it) or best-effort (runs in the time that is left)."""

    RT = "rt"
    BE = "be"

    __hash__ = str.__hash__  # Enum's own is slow, a Python function; classes are keys of hot dicts


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are the ones OpenAI clients know, plus abort and error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @property
    def complete(self) -> bool:
        """Whether the output is complete."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class Pooling(enum.StrEnum):
    """Which hidden states of a text are read, and as what.

    LAST, MEAN, FIRST: as its embedding: of the last token, the mean of all, of the first token.
    SCORE: as the one number of a model's score head.
    """

    LAST = "last"
    MEAN = "mean"
    FIRST = "first"
    SCORE = "score"


GAP_IN_INTERVALS = 1.5
"""The longest time between two tokens, in TPOT objectives, where none is asked for. Ablation:
tight, p99 gap +68 % without a bound; slow machine, attainment -5 points without a lead."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of one request in seconds; None takes the server's default.

    ttft_s: from arrival to the first token.
    tpot_s: mean time per token after the first one.
    deadline_s: from arrival to the last token.
    gap_s: longest time between two tokens.
    rt_slowdown: of a best-effort request: beside it, real-time streams may take this many times as
        long per token as alone while it is in no hurry.
    schedule_s: of a best-effort request: from arrival; it is in a hurry if it would end later.
        None: `deadline_s`.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    gap_s: float | None = None
    rt_slowdown: float | None = None
    schedule_s: float | None = None

    @property
    def longest_gap_s(self) -> float | None:
        """`gap_s`, or without it GAP_IN_INTERVALS times the pace."""
        if self.gap_s is not None or self.tpot_s is None:
            return self.gap_s
        return GAP_IN_INTERVALS * self.tpot_s


def grammar_too_large(param: str) -> InvalidRequestError:
    """The error of a text with more than MAX_GRAMMAR_BYTES. param: the field that it comes from."""
    message = f"The grammar has more than {MAX_GRAMMAR_BYTES} bytes."
    return InvalidRequestError(message, param=param, code=TOO_LONG)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match. Raises InvalidRequestError naming `param`.

        output    [ free text ....... `after` ][ matches `text` ][ end of sequence ]

    The constructors for JSON schemas, regular expressions, ... are in core/grammars.py.

    text: a grammar in llguidance's dialect of Lark; `start` is its first rule. Requests with equal
        texts share one compiled grammar.
    after: the grammar applies once this has been generated, e.g. "</think>"; until then the output
        is free, except that it cannot end. Empty: it applies from the beginning.
    param: the field of the request that it comes from, for errors.
    """

    text: str
    after: str = ""
    param: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        try:
            size = len(f"{self.text[: MAX_GRAMMAR_BYTES + 1]}{self.after}".encode())
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "The grammar has half of a surrogate pair, which is no character.",
                param=self.param,
                code="invalid_value",
            ) from None
        if size > MAX_GRAMMAR_BYTES:
            raise grammar_too_large(self.param)
        if len(self.after) > MAX_AFTER_CHARS:
            raise InvalidRequestError(
                f"The text before a grammar must have at most {MAX_AFTER_CHARS} characters.",
                param=self.param,
                code=TOO_LONG,
            )


_BIAS_BYTES, _ITEM_BYTES = 100, 50
"""Memory of an entry of a map of numbers, and of a number or short text in a list."""


def check_token_ids(param: str, ids: Collection[int], size: int) -> None:
    """Raises InvalidRequestError naming `param` for an id outside a vocabulary of this size.

    ids: at least one.
    """
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < size:
            raise InvalidRequestError(
                f"'{param}' has token id {token_id}, which is outside the vocabulary [0, {size}).",
                param=param,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample tokens and when to stop. Raises InvalidRequestError naming the wrong field.

    Numbers of other libraries, such as numpy, become those of Python. None for `stop`,
    `stop_token_ids` and `logit_bias` means none of them, as in other APIs.

    temperature: in [0, 100]; 0 is greedy.
    top_p: in (0, 1].
    top_k: 0 is off.
    min_p: in [0, 1].
    seed: the same seed gives the same text, whatever else is in the batch; None: a random seed.
    n: number of choices, each an engine request of its own.
    logprobs: None is off; k >= 0 returns the sampled token's log-probability and the k best.
    prompt_logprobs: the same for the tokens of the prompt, from the second one on.
    logit_bias: token id -> bias added to its logit, in [-100, 100].
    presence_penalty: in [-2, 2], over output tokens.
    frequency_penalty: in [-2, 2], over output tokens.
    repetition_penalty: in [0.01, 100] (1 is off), over prompt and output tokens.
    stop: strings that end the output and are not part of it.
    stop_token_ids: tokens that end the output and are not shown as text.
    min_tokens: the output does not stop before this many tokens.
    max_tokens: None: up to the model's context length; 0: the prompt is computed and no token is
        sampled.
    ignore_eos: the model's end-of-sequence tokens do not end the output.
    grammar: what the output must match. It may end, by a stop token, only where it is complete;
        where nothing can follow it ends in any case, whatever min_tokens and ignore_eos say. Stop
        strings end it anywhere. None: it is free.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logit_bias"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, {} if name == "logit_bias" else ())
        self._check_types()
        object.__setattr__(self, "stop", tuple(self.stop))
        self._convert_numbers()
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_whole("n", self.n, 1, 128)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _check_whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens ({self.min_tokens}) must not exceed max_tokens "
                    f"({self.max_tokens}).",
                    param="min_tokens",
                )
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_stops_and_bias()

    def _convert_numbers(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                object.__setattr__(self, name, _plain(value))
        object.__setattr__(self, "stop_token_ids", tuple(map(_plain, self.stop_token_ids)))
        entries = self.logit_bias.items()
        if any(type(each) not in _PLAIN for entry in entries for each in entry):
            bias = {_plain(token_id): _plain(value) for token_id, value in entries}
            object.__setattr__(self, "logit_bias", bias)

    def _check_types(self) -> None:
        """Types of the fields that are no numbers: Python checks none of them."""
        for name, value, what in (
            ("stop", self.stop, "a text or a list of texts"),
            ("stop_token_ids", self.stop_token_ids, "a list of token ids"),
        ):
            if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
                raise InvalidRequestError(f"{name} must be {what}, got {value!r}.", param=name)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.", "logit_bias"
            )
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidRequestError(
                "grammar must be a Grammar, as from bros.core.grammars.json_schema, got "
                f"{self.grammar!r}.",
                param="grammar",
            )

    def _check_stops_and_bias(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}.", "stop"
            )
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidRequestError(f"stop strings must be texts, got {text!r}.", "stop")
        if any(len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequestError(
                f"stop strings must have at most {MAX_STOP_CHARS} characters.", param="stop"
            )
        if any(not s for s in self.stop):
            raise InvalidRequestError("stop strings must not be empty.", param="stop")
        for name, limit in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIAS)):
            if len(getattr(self, name)) > limit:
                raise InvalidRequestError(
                    f"{name} takes at most {limit} tokens, got {len(getattr(self, name))}.", name
                )
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id, 0, 2**31 - 1)
        for token_id, bias in self.logit_bias.items():
            _check_whole("logit_bias", token_id, 0, 2**31 - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, size: int) -> None:
        """Raises InvalidRequestError for a token id that a model with a vocabulary of this size
        does not have."""
        for name in ("stop_token_ids", "logit_bias"):
            if ids := getattr(self, name):
                check_token_ids(name, ids, size)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_bytes(self) -> int:
        """About the memory of its texts and lists."""
        entries = _BIAS_BYTES * len(self.logit_bias) + _ITEM_BYTES * len(self.stop_token_ids)
        texts = sum(_ITEM_BYTES + len(text) for text in self.stop)
        return entries + texts + (0 if self.grammar is None else len(self.grammar.text))

    @property
    def needs_history(self) -> bool:
        """True if sampling depends on the request's earlier tokens."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def with_changes(self, **changes: object) -> SamplingParams:
        """A copy with some fields replaced, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "prompt_logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "max_tokens",
)  # fmt: skip
_PLAIN = frozenset({int, float, bool, str, type(None)})


def _plain(value: Any) -> Any:
    """A number of another library as one of Python; anything else as it is."""
    if type(value) in _PLAIN or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _check_whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be a whole number, got {value!r}.", param=name)
    if not low <= value <= high:
        message = f"{name} must be in [{low}, {high}], got {value!r}."
        raise InvalidRequestError(message, param=name)


def _check_range(
    name: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}.", param=name)
    in_range = (low < value if low_open else low <= value) and value <= high
    if not in_range or not math.isfinite(value):
        bracket = "(" if low_open else "["
        raise InvalidRequestError(
            f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}.", param=name
        )


CHAT_SAMPLING = SamplingParams(temperature=0.2, top_p=0.9)
"""Of `bros chat`. Small models ramble at higher temperatures."""


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """A task group: requests of a program whose results one later call needs together.

    id: the same for all members, and for no other requests.
    precedes: whether its best-effort requests go before others, because a client waits for what
        follows; False before values that are requested for throughput.
    awaited: whether something waits for this member itself as well, as a client that reads its
        output; else only the end of the last member counts.
    """

    id: str
    precedes: bool = True
    awaited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the scheduler knows about a request from the program that it is part of.

    program: id of the program, empty if there is none. Among best-effort requests those of the
        program that began first go first, deeper ones before others.
    depth: number of calls before it in the program.
    group: the task group that it is a member of, or a prefill ahead of a member. A router places
        the members as one.
    expected_tokens: expected number of output tokens; None: as many as usual.
    private_from: position of the first token whose KV only requests with the same private_salt
        share; the KV before it is shared by kv_salt alone. None: there is no such token.
    private_salt: see private_from.
    keep_s: seconds after its end, unless it is aborted, for which the cached KV of prompt and
        output stays pinned: it is evicted after all other idle blocks, but before any running
        request is preempted. At most half of the cache is pinned; a new pin replaces the oldest.
    early: it is an early prefill: a prefill-only best-effort request for a prefix of a prompt whose
        rest is not known yet. It comes last, and best-effort work is owed no time for it.
    """

    program: str = ""
    depth: int = 0
    group: RequestGroup | None = None
    expected_tokens: int | None = None
    private_from: int | None = None
    private_salt: str = ""
    keep_s: float = 0.0
    early: bool = False


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate.

    sampling: the engine ignores `n` and `stop`: text/generation.py submits n requests and matches
        stop strings on text.
    arrival_s: Clock.now() of the process that accepted it.
    tenant: name of the API key that sent it, empty without keys. It is a border: tenants share no
        cached KV but that of public tokens, and see only their own traces.
    public_tokens: number of first tokens of prompt and output that are public: all tenants share
        their KV.
    user: whom it is for, as the client says. It is no border.
    max_traces: most traces of ended requests of its tenant that the engine keeps when this one has
        ended; None: as many as there is room for.
    cache_salt: requests of a tenant with different salts do not share cached KV.
    prefill_only: the engine computes and caches the prompt's full blocks and samples no token; the
        only output has finish_reason LENGTH. Without a prefix cache it computes nothing.
    hints: see Hints.
    resumed: number of tokens at the end of the prompt that are the beginning of the output: another
        engine generated them before it died. They count as output everywhere (max_tokens,
        penalties, seeds). The deadline and the order of requests still count from `arrival_s`; the
        next token's deadline counts from the submission to this engine.
    num_read: number of positions at the start of the prompt whose readouts (see plan.Readout)
        another engine has delivered.
    pooling: it is for an embedding or a score of its prompt, and generates no token.
    second_from: with `pooling`, where the second of two texts begins; None if there is only one.
    checked_s: for how long it has waited for the check of its grammar, before it was submitted.
    gathered: its output is not streamed: tokens after the first may be sent many at once, half a
        second and a step later (engine/outbox.py).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    service_class: ServiceClass = ServiceClass.RT
    slo: Slo = Slo()
    arrival_s: float = 0.0
    tenant: str = ""
    user: str = ""
    max_traces: int | None = None
    public_tokens: int = 0
    cache_salt: str = ""
    prefill_only: bool = False
    hints: Hints = NO_HINTS
    resumed: int = 0
    num_read: int = 0
    pooling: Pooling | None = None
    second_from: int | None = None
    checked_s: float = 0.0
    gathered: bool = False

    @property
    def samples(self) -> bool:
        """Whether it generates tokens."""
        has_none = self.prefill_only or self.pooling is not None
        return not has_none and self.sampling.max_tokens != 0

    @property
    def patient(self) -> bool:
        """Whether its first token is not waited for, see RequestGroup."""
        group = self.hints.group
        return group is not None and not group.awaited

    @property
    def reads_prompt(self) -> bool:
        """Whether results need hidden states of positions before the last."""
        if self.pooling is None:
            return self.sampling.prompt_logprobs is not None
        return self.pooling is not Pooling.LAST

    @property
    def kv_salt(self) -> str:
        """Salt of the request's KV: only requests with the same one share any of it, except that of
        public tokens.

        It is derived here alone, for all kinds of requests, so that none can be submitted that
        reads another tenant's cache. No two pairs of tenant and cache_salt have the same one: the
        length says where the tenant ends.
        """
        return f"{len(self.tenant)}:{self.tenant}{self.cache_salt}"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position; `top` is sorted, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log-probabilities at successive output positions, in a tenth of the memory of objects: 256
    bytes for a token with 20 alternatives. They are made again when they are read."""

    __slots__ = ("_ends", "_ids", "_values")

    def __init__(self, entries: Iterable[TokenLogprobs] = ()) -> None:
        self._ids, self._values = array("i"), array("d")  # of a token and of its alternatives
        self._ends = array("I")  # where in these each position ends
        self.extend(entries)

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        """Add the next positions."""
        ids, values = self._ids, self._values
        for entry in entries:
            ids.append(entry.token_id)
            values.append(entry.logprob)
            for token_id, logprob in entry.top:
                ids.append(token_id)
                values.append(logprob)
            self._ends.append(len(ids))

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        arrays = self._ids, self._values, self._ends
        return sum(len(each) * each.itemsize for each in arrays)

    @property
    def num_numbers(self) -> int:
        """How many log-probabilities there are."""
        return len(self._values)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        begin = 0
        for end in self._ends:
            yield self._entry(begin, end)
            begin = end

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> PackedLogprobs: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | PackedLogprobs:
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._at(positions)
        return PackedLogprobs(map(self._at, positions))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _at(self, position: int) -> TokenLogprobs:
        return self._entry(self._ends[position - 1] if position else 0, self._ends[position])

    def _entry(self, begin: int, end: int) -> TokenLogprobs:
        ids, values = self._ids[begin:end], self._values[begin:end]
        return TokenLogprobs(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class PromptTokenLogprobs(TokenLogprobs):
    """Log-probabilities at one prompt position.

    rank: 1 for the most likely token.
    """

    rank: int = 1


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of n successive prompt tokens, each given all tokens before it.

        tokens     [ prompt token | most likely | second | ... k-th ]  int32, n times
        logprobs   the same                                            fp32, n times
        ranks      rank of the prompt token among all tokens           int32, n

    Numbers are packed as bytes in the order of this machine: a step may have thousands of them.

    first: position of the first of these tokens in the prompt, at least 1.
    top: k.
    """

    first: int
    top: int
    tokens: bytes
    logprobs: bytes
    ranks: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __iter__(self) -> Iterator[PromptTokenLogprobs]:
        width = self.top + 1
        tokens, logprobs = array("i", self.tokens), array("f", self.logprobs)
        for row, rank in enumerate(array("i", self.ranks)):
            ids = tokens[row * width : (row + 1) * width]
            values = logprobs[row * width : (row + 1) * width]
            best = tuple(zip(ids[1:], values[1:], strict=True))
            yield PromptTokenLogprobs(ids[0], values[0], best, rank)


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """The sum of the hidden states of `count` positions up to `end`, or a score (Pooling.SCORE).

    values: fp32, packed in the order of this machine.
    """

    end: int
    count: int
    values: bytes


@dataclass(slots=True)  # not frozen, for speed: see plan.py
class RequestOutput:
    """One request's output of one step. The last output has a finish_reason.

    token_ids: new tokens; with finish_reason STOP the last one is the stop token (EOS or one of
        stop_token_ids), which is not shown as text.
    logprobs: one per token, if requested.
    cached_tokens: in the first output that has tokens or is the last: prompt tokens that were in
        the prefix cache.
    prompt_logprobs: of the next prompt tokens, if requested; those of one step in one piece.
    pooled: of the next positions, for EngineRequest.pooling.
    error: with finish_reason ERROR: why the request failed.
    retry_after_s: with finish_reason ERROR: the request was dropped for lack of capacity; the
        client may retry after this many seconds.
    param: with finish_reason ERROR: the field of the request with the grammar, which cannot go on.
        The request would most likely fail again.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledTokens, ...] = ()
    error: str | None = None
    retry_after_s: float | None = None
    param: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it is the first output after the prompt, or a later one."""
        return bool(self.token_ids) or self.finish_reason is not None

    @property
    def num_read(self) -> int:
        """One more than the last position of its readouts; 0 without readouts."""
        if self.pooled:
            return self.pooled[-1].end
        last = self.prompt_logprobs[-1] if self.prompt_logprobs else None
        return 0 if last is None else last.first - 1 + len(last)


TokenOutput = tuple[str, int]
"""(request id, token id): an output that has one token and nothing else, as nearly all have. It is
sent and handled for every token of every stream, where the fields of RequestOutput cost too much.
"""

Output = RequestOutput | TokenOutput


def shortened(output: RequestOutput) -> Output:
    """The output as a TokenOutput, if that says the same."""
    token_ids = output.token_ids
    if len(token_ids) != 1 or output.finish_reason or output.logprobs or output.cached_tokens:
        return output
    if output.prompt_logprobs:
        return output
    return output.request_id, token_ids[0]


def expanded(output: Output) -> RequestOutput:
    """The same output with all fields."""
    if isinstance(output, RequestOutput):
        return output
    return RequestOutput(request_id=output[0], token_ids=(output[1],))


def merged(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two successive outputs of a request as one."""
    return RequestOutput(
        request_id=then.request_id,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        finish_reason=then.finish_reason,
        cached_tokens=max(first.cached_tokens, then.cached_tokens),
        prompt_logprobs=first.prompt_logprobs + then.prompt_logprobs,
        pooled=first.pooled + then.pooled,
        error=then.error,
        retry_after_s=then.retry_after_s,
        param=then.param,
    )


# ---- Request ids, from a generator that is passed in so that runs can be repeated.


_ALPHABET = string.ascii_letters + string.digits


class IdGenerator:
    """Makes ids such as `chatcmpl-4fT9...`: 24 characters, 142 bits, so they do not collide."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def new(self, prefix: str, separator: str = "-") -> str:
        number = self._rng.getrandbits(142)  # at once: the server's generator asks the kernel
        name = ""
        for _ in range(24):
            number, digit = divmod(number, len(_ALPHABET))
            name += _ALPHABET[digit]
        return f"{prefix}{separator}{name}"
