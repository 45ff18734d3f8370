"""Checks grammars of clients before an engine compiles them.

    server ── FairGate ── thread ══ text ══▶ process, with the model's tokenizer
                                                │ fork, per text
                                                └▶ compiles it, with bounds ══▶ answer

A short text can take minutes and gigabytes to compile, or end the process that compiles it by
running out of stack. So a child compiles it first, with bounds on time, memory and stack; a text
that passes takes no more in the engine. Its process has read the tokenizer, so that a child starts
in milliseconds, and it survives what happens to its children.

    `python -m bros.text.grammar_check FD FOLDER VOCAB_SIZE EOS_IDS`
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bros.core.errors import InvalidRequestError, OverloadedError
from bros.core.fair import CpuUse, FairGate, FairMemory
from bros.core.request import Grammar
from bros.core.tenants import TenantAccounts
from bros.core.worker_process import (
    WorkerClosedError,
    WorkerEndedError,
    WorkerHungError,
    WorkerProcess,
    answer_jobs,
    settle,
)

if TYPE_CHECKING:  # optional, as in engine/grammars.py
    from llguidance import LLMatcher

_CPU_S = 0.5
"""Most CPU time that a grammar takes to compile."""

_WALL_S = 15.0
"""Most time in all, as a busy machine may give a child its CPU time late. After that the grammar is
neither good nor bad, and its client has to try again."""

_BLOCKING_TRIES = 12
"""Number of tries of `check_blocking`: rows of a batch have no client that would try again."""

_MEMORY_BYTES = 2**29
"""Most memory that it takes beyond the tokenizer's."""

_RETRY_S = 1.0
"""When a client should try again that had no answer."""

MAX_CACHED_GRAMMARS = 1024
_MAX_CACHED_BYTES = 2**24
"""Bounds on the good texts that are remembered: their number, and their bytes."""

_MAX_FORCED = 256
"""Most tokens that are followed: an endless grammar forces thousands."""

_TOO_LONG = "it takes too much time or memory to compile; make it smaller or less ambiguous"
_BUSY = b"\0"
"""What the process answers if the child had no time."""


class GrammarChecker:
    """Checks the grammars of one server. Close it at the end.

    One tenant has at most two of the three processes at a time, so its slow grammars do not keep
    others waiting: one for best-effort requests, and one for real-time ones, which go first. Good
    texts are remembered for each tenant alone: how long a check takes says nothing about others.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        accounts: TenantAccounts | None = None,
        on_hung: Callable[[], None] = lambda: None,
    ) -> None:
        """folder: of the model; the others as in EngineInfo. accounts: limits of tenants; None:
        there are none. on_hung: called on a thread when a process hung."""
        arguments = [str(folder), str(vocab_size), json.dumps(list(eos_token_ids))]
        self._all = [WorkerProcess(__name__, arguments, on_hung=on_hung) for _ in range(4)]
        self._free, self._blocking = self._all[:3], self._all[3]
        self._accounts = accounts or TenantAccounts()
        self._gate = FairGate(slots=3, per_tenant=1, budget=self._accounts, name="grammars")
        self._lock = threading.Lock()  # of _good
        self._taking = threading.Lock()  # what is free stays so while it is held
        self._one_blocks = threading.Lock()  # uses _blocking
        self._good: FairMemory[tuple[str, str], bool] = FairMemory(
            MAX_CACHED_GRAMMARS, _MAX_CACHED_BYTES
        )

    def counts(self) -> dict[str, int]:
        """Tenant -> number of its grammars that are remembered."""
        with self._lock:
            return self._good.counts()

    def knows(self, tenant: str, grammar: Grammar) -> bool:
        """Whether the tenant's grammar is remembered as a good one, so that `check` returns at
        once."""
        with self._lock:
            return self._good.use((tenant, grammar.text)) is not None

    async def check(self, tenant: str, grammar: Grammar, *, urgent: bool = True) -> None:
        """Raises InvalidRequestError, naming its `param`, if a grammar is wrong or takes too long,
        and OverloadedError if the machine is too busy to say.

        tenant: whose it is. urgent: it is checked before those of the same tenant that are not: its
            request is real-time.
        """
        if self.knows(tenant, grammar):
            return
        used = CpuUse()

        def work() -> None:
            process = self._take(urgent=urgent)
            try:
                self._ask(process, tenant, grammar)
            finally:
                used.seconds = process.cpu_s
                self._free.insert(0, process)

        await self._gate.run(tenant, work, used, urgent=urgent)

    def check_blocking(self, tenant: str, grammar: Grammar) -> None:
        """Like `check`, for a thread of its own, such as one that validates the rows of a batch."""
        if self.knows(tenant, grammar):
            return
        with self._one_blocks:
            for tries in range(1, _BLOCKING_TRIES + 1):
                try:
                    return self._ask(self._blocking, tenant, grammar)
                except OverloadedError:
                    if tries == _BLOCKING_TRIES:
                        raise

    def close(self) -> None:
        """End the processes. Callers that still wait get an InvalidRequestError."""
        for process in self._all:
            process.close()

    def _take(self, *, urgent: bool) -> WorkerProcess:
        """A process that is free. Beside a check that is not urgent another one is started, which
        takes up to some seconds, for urgent ones that may come meanwhile."""
        with self._taking:
            process = self._free.pop(0)
            if not urgent and self._free:
                self._free[0].start()
        return process

    def _ask(self, process: WorkerProcess, tenant: str, grammar: Grammar) -> None:
        text = grammar.text
        try:
            reply = process.ask(text.encode("utf-8", "surrogatepass"))
        except WorkerClosedError as error:
            raise _refusal(grammar, "the server stops") from error
        except WorkerHungError:
            reply = _BUSY
        except WorkerEndedError as error:
            raise _refusal(grammar, _TOO_LONG) from error
        if reply == _BUSY:
            message = f"The server is too busy to check the grammar in '{grammar.param}'."
            raise OverloadedError(message, _RETRY_S)
        if reply:
            raise _refusal(grammar, reply.decode())
        most = self._accounts.limits(tenant).cached_grammars
        with self._lock:
            self._good.put(tenant, (tenant, text), True, size=len(text), most=most)


_ONE_OF = (
    "more than one option of a 'oneOf' may hold; use anyOf, or a required property that has other "
    "values in each option"
)


def _refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    schema = re.match(r"failed to compile JSON schema: (.*)", reason)
    if schema is not None:
        found = _ONE_OF if schema[1].startswith("oneOf constraints") else schema[1]
        message = f"Invalid schema in '{grammar.param}': {found}."
        return InvalidRequestError(message, grammar.param, "invalid_json_schema")
    message = f"The grammar in '{grammar.param}' cannot be used: {reason}."
    return InvalidRequestError(message, grammar.param, "invalid_grammar")


# ---- In the process.


def main() -> None:
    """Answer until the server closes its end."""
    connection = settle(int(sys.argv[1]))
    compiler = _Compiler(Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    answer_jobs(
        connection, 1, lambda text: _in_child(compiler, text.decode("utf-8", "surrogatepass"))
    )


class _Compiler:
    """Compiles as the engine does.

    error: why it cannot.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from bros.engine.grammars import load_tokenizer

        self._ends = sum(1 << token_id for token_id in set(eos_token_ids))
        self.error: str | None = None
        try:
            self._tokenizer = load_tokenizer(folder, vocab_size, eos_token_ids)
        except ImportError:
            self.error = "the package llguidance is not installed on the server"
        except Exception as error:  # llguidance raises various ones
            self.error = f"the model's tokenizer is not supported: {error}"

    def __call__(self, text: str) -> str:
        """What is wrong with a text; empty if it is good."""
        from bros.engine.grammars import compile_grammar, first_line

        try:
            matcher = compile_grammar(self._tokenizer, text)
        except ValueError as error:
            reason = str(error)
            return "it is too large" if reason.startswith("panic") else reason
        found = self._error_at_beginning(matcher)
        return f"it cannot be followed: {first_line(found)}" if found else ""

    def _error_at_beginning(self, matcher: LLMatcher) -> str:
        """Why no output can begin; empty if one can. It follows the tokens that the grammar forces
        first, and then one or two that it allows.

        A grammar that is too complex nearly always is so there, for instance an object of 600
        optional fields behind its brace, or 3,000 alternatives. The parser counts those of a
        position only when a token is taken there, so a mask alone does not show it. The engine
        would find that while others wait for its step, and its client after half an answer.
        """
        forced = matcher.compute_ff_tokens()[:_MAX_FORCED]
        # A text that reads like a special token is not that token, as tokenizer and masks think.
        if forced and (count := matcher.validate_tokens(forced)):
            matcher.consume_tokens(forced[:count])
        if matcher.is_stopped():
            return matcher.get_error()
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~self._ends
        error = matcher.get_error()
        if error or not mask:
            return error
        for token_id in ((mask & -mask).bit_length() - 1, mask.bit_length() - 1):
            after = matcher.deep_copy()
            if not after.validate_tokens([token_id]) or after.consume_token(token_id):
                return ""
            error = after.get_error()
        return error


_GOOD = b"+"
"""What a child answers if the text is good. No answer means that it was ended."""


def _in_child(compiler: _Compiler, text: str) -> bytes:
    """What is wrong with a text, by a child, which is ended when it takes too long; or _BUSY."""
    if compiler.error is not None:
        return compiler.error.encode()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _answer_and_exit(compiler, text, write)
    os.close(write)
    answer = bytearray()
    with open(read, "rb", buffering=0) as pipe:
        while has_more := bool(select.select([pipe], [], [], _WALL_S)[0]):
            part = pipe.read(2**20)
            if not part:
                break
            answer += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not has_more:
        return _BUSY
    return b"" if answer == _GOOD else bytes(answer) or _TOO_LONG.encode()


def _answer_and_exit(compiler: _Compiler, text: str, write: int) -> None:
    import resource

    if sys.platform == "linux":  # elsewhere it does not limit, or cannot be set
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # of the library, when it panics or runs out of memory
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # SIGPROF ends the process
    try:
        answer = compiler(text).encode() or _GOOD
    except BaseException:  # llguidance's panics are BaseExceptions
        answer = _TOO_LONG.encode()
    while answer:
        answer = answer[os.write(write, answer) :]
    os._exit(0)


if __name__ == "__main__":
    main()
