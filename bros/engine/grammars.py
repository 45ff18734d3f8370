"""Grammars of outputs, by llguidance: compiled on a thread, once per tenant and text; one matcher
per request.

    text ──▶ compiled (a thread, cached) ──▶ a copy per request: GrammarState
                                                 │ advance: what a token allows next, forced tokens
                                                 └ constraint: allows(token), mask()

A sampled token is only checked, which takes microseconds. A mask of the vocabulary is needed only
when a token was refused. It is computed when it is asked for, in 20 to 100 microseconds; or ahead
of time on a thread while the model runs, where that is on another device, or where masks of an
output take long. (On a CPU the thread takes a core from the model.)

The text of a grammar comes from a client. Its size is bounded by core/request.py and the time that
it takes by text/grammar_check.py, before it gets here; the limits of the parser bound each step.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bros.core.clock import Clock, thread_cpu_s
from bros.core.errors import InvalidRequestError, OverloadedError
from bros.core.fair import FairMemory
from bros.core.grammars import is_gbnf
from bros.core.interfaces import EngineInfo, GrammarState, StopRule
from bros.core.plan import TokenConstraint
from bros.core.request import Grammar

if TYPE_CHECKING:  # optional: an engine without it serves requests without grammars
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_COMPILED = 256
_MAX_COMPILED_BYTES = 2**24
"""Bounds on the compiled grammars that are kept: their number, and the bytes of their texts. When
there are more, the tenant with the most loses its oldest."""

_MAX_COMPILING = 512
"""Most different grammars that wait to be compiled."""

_STACK_BYTES = 2**26
"""Stack of the threads that compile: the parser recurses with the depth of a grammar."""

_SLOW_S = 0.002
"""From an output's first mask that takes longer on, its masks are computed ahead."""

_MAX_POSITION_S = 0.02
_MAX_SLOW = 3
"""CPU time of one position of an output, for which the steps of all others wait, and positions that
may take longer; then the output ends. Usual grammars take less than 1 ms. The limits of the parser
bound the memory of a position and not its time: `e: e e | /[a-z]/ | e "," e` takes longer with each
token, 42 ms after 300."""


def parser_limits() -> LLParserLimits:
    """Bounds of one matcher: of its memory, some 50 bytes per state of the lexer (a string of
    bounded length takes 3 states per character), and of the items of one position, which take about
    2 us each on a Zen 3. 450 optional fields or 200 alternatives keep to half of these; with 20,000
    an endless schema took 50 ms to find out that it is one."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=250_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        verbose_errors=False,
    )


def load_tokenizer(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer of a model folder, for llguidance. It takes some tenths of a second.

    Raises ImportError without llguidance, and ValueError if it does not support the tokenizer.
    """
    from llguidance import LLTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError("the model folder has no tokenizer.json")
    if not eos_token_ids:
        raise ValueError("the model has no end-of-sequence token")
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    added = content.get("added_tokens", ())
    known = [each for each in added if each["id"] < vocab_size]
    if len(known) < len(added):
        # The model cannot write them, and LLTokenizer refuses them: a padding token, mostly.
        text = json.dumps({**content, "added_tokens": known})
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))


@dataclass(slots=True)
class GrammarCounters:
    """See EngineStats. Written by one thread each."""

    forced_tokens: int = 0
    compiled: int = 0
    compile_s: float = 0.0
    mask_wait_s: float = 0.0


_Key = tuple[str, str, str]
"""Tenant, text and what comes before it: how long a grammar takes says nothing about others."""


@dataclass(slots=True)
class _Compiled:
    """A grammar that is or was compiled.

    matcher: where an output begins; each output has a copy. None if it cannot be used.
    free_text: what may come before the grammar; None: nothing.
    error: why it cannot be used.
    ready: set once `matcher` or `error` is known.
    waiting: called then, on the compiler's thread.
    """

    grammar: Grammar
    matcher: LLMatcher | None = None
    free_text: _FreeText | None = None
    error: str | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Grammars:
    """The grammars of one engine. Its thread calls all methods.

    folder: of the model; None: no grammar can be used.
    ahead: whether masks are always computed ahead of time: not where the model runs on the CPU.
    """

    def __init__(
        self, folder: Path | None, info: EngineInfo, clock: Clock, *, ahead: bool | None = None
    ) -> None:
        self._folder = folder
        self._info = info
        self._clock = clock
        self._ahead = info.device != "cpu" if ahead is None else ahead
        self._compiling: dict[_Key, _Compiled] = {}
        self._compiled: FairMemory[_Key, _Compiled] = FairMemory(_MAX_COMPILED, _MAX_COMPILED_BYTES)
        self._lock = threading.Lock()  # of both, and of `waiting` of each
        self._vocabulary: _Vocabulary | str | None = None  # str: why there is none
        self._compiler = _Worker("grammars", _STACK_BYTES)
        self._masks = _Worker("token-masks")
        self.counters = GrammarCounters()

    def close(self) -> None:
        """End the threads. Call it when no request is left."""
        self._compiler.close()
        self._masks.close()

    def load_ahead(self) -> None:
        """Load what all grammars need of the tokenizer, on this thread. Else the first one does,
        and holds the interpreter: no step would run for 0.3 s with 49,000 tokens."""
        self._load_vocabulary()

    def prepare(self, grammar: Grammar, done: Callable[[], None], tenant: str = "") -> bool:
        """Compile a grammar of a tenant unless it is compiled; whether `state` would not wait for
        it. If it would, `done` is called on another thread as soon as it does not.

        Raises OverloadedError if too many others are being compiled.
        """
        with self._lock:
            found = self._find(grammar, tenant)
            if found.ready.is_set():
                return True
            found.waiting.append(done)
            return False

    def state(self, grammar: Grammar, stops: StopRule, tenant: str = "") -> GrammarState:
        """The state of a new output of a tenant; waits until the grammar is compiled.

        Raises InvalidRequestError if this engine cannot use it, OverloadedError if too many others
        are being compiled.
        """
        with self._lock:
            found = self._find(grammar, tenant)
        found.ready.wait()
        if found.matcher is None:
            raise InvalidRequestError(
                f"The grammar cannot be used: {found.error}.", grammar.param, "invalid_grammar"
            )
        assert isinstance(self._vocabulary, _Vocabulary)
        return _OutputState(
            found.matcher.deep_copy(),
            self._vocabulary,
            found.free_text,
            stops,
            self._masks,
            self._ahead,
            self._clock,
            self.counters,
        )

    def _find(self, grammar: Grammar, tenant: str) -> _Compiled:
        """The grammar, which is compiled from now on if it was not known. With the lock held."""
        key = tenant, grammar.text, grammar.after
        found = self._compiled.use(key) or self._compiling.get(key)
        if found is not None:
            return found
        found = _Compiled(grammar)
        if len(self._compiling) >= _MAX_COMPILING:
            raise OverloadedError("Too many grammars are being compiled; try again later.", 1.0)
        self._compiling[key] = found
        self._compiler.put(lambda: self._compile(key, found))
        return found

    def _compile(self, key: _Key, compiled: _Compiled) -> None:
        """On the compiler's thread."""
        began_s = self._clock.now()
        try:
            vocabulary = self._load_vocabulary()
            if isinstance(vocabulary, str):
                compiled.error = vocabulary
            else:
                self._compile_with(vocabulary, compiled)
        except Exception as error:  # ValueError, or any from llguidance
            compiled.error = str(error)
        self.counters.compiled += 1
        self.counters.compile_s += self._clock.now() - began_s
        with self._lock:
            del self._compiling[key]
            self._compiled.put(key[0], key, compiled, size=len(compiled.grammar.text))
            compiled.ready.set()
            waiting, compiled.waiting = compiled.waiting, []
        for done in waiting:
            done()

    def _compile_with(self, vocabulary: _Vocabulary, compiled: _Compiled) -> None:
        grammar = compiled.grammar
        matcher = compile_grammar(vocabulary.tokenizer, grammar.text)
        # Here and not in a step: the first mask of an object of 4,000 fields takes 0.1 s, and that
        # of a copy made after it 0.1 ms.
        matcher.compute_bitmask()
        if grammar.after:
            compiled.free_text = _FreeText(grammar.after.encode(), vocabulary)
        compiled.matcher = matcher

    def _load_vocabulary(self) -> _Vocabulary | str:
        if self._vocabulary is None:
            try:
                if self._folder is None:
                    raise ValueError("this engine has no tokenizer")
                eos = self._info.eos_token_ids
                tokenizer = load_tokenizer(self._folder, self._info.vocab_size, eos)
                self._vocabulary = _Vocabulary(tokenizer, self._info.vocab_size, frozenset(eos))
            except ImportError:
                self._vocabulary = "the package llguidance is not installed where the model runs"
            except Exception as error:  # llguidance raises various ones
                self._vocabulary = f"the model's tokenizer is not supported: {error}"
        return self._vocabulary


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher for a grammar in Lark or GBNF. Raises ValueError that says what is wrong with it.
    A hostile text takes minutes, or ends the process."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if is_gbnf(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # of its own class, or any from its parser
            raise ValueError(first_line(str(error))) from error
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))
    return matcher


def first_line(message: str) -> str:
    """What an error message of llguidance says, without the text around the place, but with a
    regular expression that is wrong: a request may have many."""
    lines = message.strip().split("\n")
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")][:1]
    first = re.sub(r"^at \d+\(\d+\): ", "", lines[0])
    if first.endswith("regex parse error:") and len(lines) > 1:
        reasons.append(f"in '{lines[1].strip()[:_MAX_REGEX_CHARS]}'")
    return " ".join([first, *reasons]).rstrip(".:")[:500]


_MAX_REGEX_CHARS = 100


class _Worker:
    """A thread that does one job after another; it starts with the first one.

    Its priority is that of others: while it holds the interpreter, the model waits for it. With a
    lower one, beside four busy processes, 12 schemas took 15.4 s instead of 1.6 and the interpreter
    was held for 122 ms instead of 13.
    """

    def __init__(self, name: str, stack_bytes: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = name
        self._stack_bytes = stack_bytes
        self._started = False

    def put(self, job: Callable[[], None]) -> None:
        """The job must not raise."""
        self._jobs.put(job)
        if not self._started:
            self._started = True
            before = threading.stack_size(self._stack_bytes)
            # A daemon, so that a program can end while it works.
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            threading.stack_size(before)

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class _Vocabulary:
    """The tokens of a model.

    size: of the model's logits; larger than the tokenizer's vocabulary in some models.
    """

    def __init__(self, tokenizer: LLTokenizer, size: int, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.eos_token_ids = eos_token_ids
        self.mask_bytes = -(-tokenizer.vocab_size // 32) * 4

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; of a special token its name."""
        return self.tokenizer.decode_bytes([token_id])


class _FreeText:
    """The free text before a grammar, which ends with `after`.

    A token must not extend past it, because the matcher takes whole tokens only. So where `after`
    is complete but for its last bytes, the tokens that would complete it and extend past it are
    refused.
    """

    def __init__(self, after: bytes, vocabulary: _Vocabulary) -> None:
        self._after = after
        self._vocabulary = vocabulary
        last = after[-1:]
        tokens = range(vocabulary.tokenizer.vocab_size)
        texts = [(token_id, vocabulary.bytes_of(token_id)) for token_id in tokens]
        closing = [(token_id, text) for token_id, text in texts if last in text]
        self._overrun = [
            frozenset(token_id for token_id, text in closing if self._overruns(known, text))
            for known in range(len(after))
        ]

    def refused(self, known: int) -> frozenset[int]:
        """Tokens that extend past `after`, where its first `known` bytes are there."""
        return self._overrun[known]

    def follow(self, known: int, token_id: int) -> int | None:
        """How many of its first bytes are there after one more token; None: all of them."""
        after = self._after
        text = after[:known] + self._vocabulary.bytes_of(token_id)
        if text.endswith(after):
            return None
        sizes = range(min(len(after) - 1, len(text)), 0, -1)
        return next((size for size in sizes if text.endswith(after[:size])), 0)

    def _overruns(self, known: int, text: bytes) -> bool:
        text = self._after[:known] + text
        at = text.find(self._after)
        return 0 <= at < len(text) - len(self._after)


class _OutputState:
    """Implements GrammarState.

    _count: tokens that it has advanced over; the constraint speaks for the token after these.
    _cpu_s: CPU time of this position so far; of several tokens at once their mean.
    _num_slow: positions before it that took longer than _MAX_POSITION_S.
    _known: bytes of the end of the free text that are there; None: the grammar applies.
    _mask: computed mask; holds if _has_mask.
    _computing: set when the mask is computed that a thread computes ahead of time; until then no
        other thread may use the matcher. None: no thread computes one.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: _Vocabulary,
        free_text: _FreeText | None,
        stops: StopRule,
        worker: _Worker,
        ahead: bool,
        clock: Clock,
        counters: GrammarCounters,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._free_text = free_text
        self._known: int | None = None if free_text is None else 0
        self._stops = stops
        self._never = vocabulary.eos_token_ids - stops.token_ids  # unless nothing else can follow
        self._worker = worker
        self._ahead = ahead
        self._clock = clock
        self._counters = counters
        self._count = 0
        self._cpu_s = 0.0
        self._num_slow = 0
        self._mask: NDArray[np.uint8] | None = None
        self._has_mask = False
        self._computing: threading.Event | None = None

    # ---- GrammarState.

    def advance(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """See GrammarState."""
        self._join()
        self._check_pace()
        self._has_mask = False
        began_s = thread_cpu_s()
        for token_id in token_ids:
            self._accept(token_id)
        forced = self._forced(most) if self._known is None and most > 0 else []
        self._cpu_s = (thread_cpu_s() - began_s) / max(1, len(token_ids) + len(forced))
        if self._ahead and not self._ends(forced):
            self._compute_ahead()
        return forced

    def constraint(self, ahead: int = 0) -> TokenConstraint:
        """See GrammarState."""
        return _Constraint(self, self._count + ahead)

    def _check_pace(self) -> None:
        """Raises ValueError if others have waited too often for this output."""
        self._num_slow += self._cpu_s > _MAX_POSITION_S
        if self._num_slow > _MAX_SLOW:
            raise ValueError(
                f"the grammar has become too ambiguous: {self._num_slow} tokens have taken longer "
                f"than {1000 * _MAX_POSITION_S:.0f} ms each"
            )

    def _accept(self, token_id: int) -> None:
        self._count += 1
        if self._known is not None:
            assert self._free_text is not None
            self._known = self._free_text.follow(self._known, token_id)
        elif not self._matcher.consume_token(token_id):
            raise ValueError(f"the grammar does not allow token {token_id}: {self._error()}")

    def _forced(self, most: int) -> list[int]:
        matcher = self._matcher
        forced = matcher.compute_ff_tokens()[:most]
        if forced:
            # A text that reads like a special token is not that token, as the tokenizer thinks.
            forced = forced[: matcher.validate_tokens(forced)]
            if not matcher.consume_tokens(forced):
                raise ValueError(f"the grammar does not allow its own tokens: {self._error()}")
        self._count += len(forced)
        self._counters.forced_tokens += len(forced)
        if len(forced) < most and matcher.is_stopped():
            if matcher.is_error():
                raise ValueError(self._error())
            forced.append(self._stops.end)
        return forced

    def _ends(self, forced: Sequence[int]) -> bool:
        return bool(forced) and forced[-1] == self._stops.end

    def _error(self) -> str:
        return first_line(self._matcher.get_error()) or "it ends here"

    # ---- Constraints, which the sampler asks.

    def allows(self, index: int, token_id: int) -> bool:
        """Whether the token may be the output's token number `index`."""
        if index != self._count:
            # The sample will be ignored: the token is forced and has been given already, or the
            # output has ended with the token before it.
            return True
        if self._known is not None:
            return token_id not in self._refused()
        if self._has_mask or self._computing is not None:
            mask = self._wait_for_mask()
            byte = token_id >> 3
            return byte < len(mask) and bool(mask[byte] >> (token_id & 7) & 1)
        if token_id in self._stops.token_ids:
            return self._count >= self._stops.min_tokens and self._matcher.is_accepting()
        if token_id in self._never or token_id >= self._vocabulary.tokenizer.vocab_size:
            return False
        began_s = thread_cpu_s()
        allowed = self._matcher.validate_tokens([token_id]) == 1
        self._cpu_s += thread_cpu_s() - began_s
        return allowed

    def mask(self, index: int) -> memoryview:
        """See TokenConstraint."""
        if index != self._count:
            return self._filled(0xFF).data
        if self._known is not None:
            mask = self._filled(0xFF)
            for token_id in self._refused():
                mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
            return mask.data
        return self._wait_for_mask().data

    def _filled(self, byte: int) -> NDArray[np.uint8]:
        return np.full(-(-self._vocabulary.size // 8), byte, np.uint8)

    def _refused(self) -> frozenset[int]:
        assert self._free_text is not None and self._known is not None
        stops = self._stops.token_ids | self._vocabulary.eos_token_ids
        return stops | self._free_text.refused(self._known)

    # ---- Masks.

    def _compute_ahead(self) -> None:
        if self._known is not None or self._matcher.is_stopped():
            return
        self._computing = computed = threading.Event()

        def compute() -> None:
            try:
                with contextlib.suppress(ValueError):  # raised again where the mask is needed
                    self._compute_mask()
            finally:
                computed.set()

        self._worker.put(compute)

    def _join(self) -> None:
        """Wait until no other thread uses the matcher."""
        if self._computing is not None:
            self._computing.wait()
            self._computing = None

    def _wait_for_mask(self) -> NDArray[np.uint8]:
        began_s = self._clock.now()
        self._join()
        if not self._has_mask:
            self._compute_mask()
        self._counters.mask_wait_s += self._clock.now() - began_s
        assert self._mask is not None
        return self._mask

    def _compute_mask(self) -> None:
        """Set the mask. Raises ValueError if the grammar has become too complex."""
        if self._mask is None:
            self._mask = np.zeros(self._vocabulary.mask_bytes, np.uint8)
        mask, matcher, stops = self._mask, self._matcher, self._stops
        began_s, cpu_s = self._clock.now(), thread_cpu_s()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._cpu_s += thread_cpu_s() - cpu_s
        self._ahead |= self._clock.now() - began_s > _SLOW_S
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {self._error()}")
        for token_id in stops.token_ids | self._vocabulary.eos_token_ids:
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        ends: frozenset[int] = frozenset()
        if matcher.is_accepting():
            if not mask.any():
                ends = stops.token_ids or frozenset({stops.end})
            elif self._count >= stops.min_tokens:
                ends = stops.token_ids
        for token_id in ends:
            mask[token_id >> 3] |= 1 << (token_id & 7)
        self._has_mask = True


class _Constraint:
    """Implements TokenConstraint for one position of an output."""

    __slots__ = ("_index", "_output")

    def __init__(self, output: _OutputState, index: int) -> None:
        self._output = output
        self._index = index

    def allows(self, token_id: int) -> bool:
        return self._output.allows(self._index, token_id)

    def mask(self) -> memoryview:
        return self._output.mask(self._index)
