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

import contextlib
import json
import os
import re
import select
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from bros.core.errors import InvalidRequestError
from bros.core.fair import FairGate
from bros.core.grammars import is_gbnf
from bros.core.request import Grammar
from bros.core.worker_process import WorkerClosedError, WorkerEndedError, WorkerProcess

_CPU_S, _WALL_S = 0.5, 0.8
"""Most CPU time, and most time in all, that a grammar takes to compile."""

_MEMORY_BYTES = 2**29
"""Most memory that it takes beyond the tokenizer's."""

_NICE = 5
"""Lower priority than the engine's, which may use all cores."""

_KEPT = 1024
_KEPT_BYTES = 2**24
"""Bounds on the texts whose answers are kept: their number, and their bytes."""

_GOOD, _BAD = b"+", b"-"
_TOO_LONG = "it takes too much time or memory to compile; make it smaller or less ambiguous"


class GrammarChecker:
    """Checks the grammars of one server. Close it at the end.

    One tenant has at most one of the two processes at a time, so its slow grammars do not keep
    others waiting.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """folder: of the model; the others as in EngineInfo."""
        arguments = [str(folder), str(vocab_size), json.dumps(list(eos_token_ids))]
        self._all = [WorkerProcess(__name__, arguments) for _ in range(3)]
        self._free, self._blocking = self._all[:2], self._all[2]
        self._gate = FairGate(slots=2, per_tenant=1)
        self._lock = threading.Lock()  # of _answers
        self._one_blocks = threading.Lock()  # uses _blocking
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0

    async def check(self, tenant: str, grammar: Grammar) -> Grammar:
        """The grammar for the engine: in Lark. tenant: whose it is.

        Raises InvalidRequestError, naming its `param`, if it is wrong or takes too long.
        """
        known = self._known(grammar)
        if known is not None:
            return known

        def work() -> Grammar:
            process = self._free.pop(0)
            try:
                return self._ask(process, grammar)
            finally:
                self._free.insert(0, process)

        return await self._gate.run(tenant, work)

    def check_blocking(self, grammar: Grammar) -> Grammar:
        """Like `check`, for a thread of its own, such as one that validates the rows of a batch."""
        known = self._known(grammar)
        if known is not None:
            return known
        with self._one_blocks:
            return self._ask(self._blocking, grammar)

    def close(self) -> None:
        """End the processes. Callers that still wait get an InvalidRequestError."""
        for process in self._all:
            process.close()

    def _known(self, grammar: Grammar) -> Grammar | None:
        with self._lock:
            text = self._answers.get(grammar.text)
            if text is None:
                return None
            self._answers.move_to_end(grammar.text)
        return Grammar(text, grammar.after, grammar.param)

    def _ask(self, process: WorkerProcess, grammar: Grammar) -> Grammar:
        try:
            reply = process.ask(grammar.text.encode("utf-8", "surrogatepass"))
        except WorkerClosedError as error:
            raise _refusal(grammar, "the server stops") from error
        except WorkerEndedError as error:
            raise _refusal(grammar, _TOO_LONG) from error
        text = reply[1:].decode()
        if reply[:1] != _GOOD:
            raise _refusal(grammar, text)
        checked = Grammar(text, grammar.after, grammar.param)
        with self._lock:
            if grammar.text not in self._answers:
                self._answers[grammar.text] = text
                self._bytes += len(text) + len(grammar.text)
            while len(self._answers) > _KEPT or self._bytes > _KEPT_BYTES:
                oldest, answer = self._answers.popitem(last=False)
                self._bytes -= len(oldest) + len(answer)
        return checked


def _refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    schema = re.match(r"failed to compile JSON schema: (.*)", reason)
    if schema is not None:
        message = f"Invalid schema in '{grammar.param}': {schema[1]}."
        return InvalidRequestError(message, grammar.param, "invalid_json_schema")
    message = f"The grammar in '{grammar.param}' cannot be used: {reason}."
    return InvalidRequestError(message, grammar.param, "invalid_grammar")


# ---- In the process.


def main() -> None:
    """Answer until the server closes its end."""
    import resource  # late: not on every system, and only needed here

    # Ctrl-C reaches the whole process group; the server decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(int(sys.argv[1]))
    compiler = _Compiler(Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    with contextlib.suppress(EOFError, OSError):
        while True:
            text = connection.recv_bytes().decode("utf-8", "surrogatepass")
            connection.send_bytes(_in_child(compiler, text))


class _Compiler:
    """Compiles as the engine does. error: why it cannot."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from bros.engine.grammars import load_tokenizer

        self.error: str | None = None
        try:
            self._tokenizer = load_tokenizer(folder, vocab_size, eos_token_ids)
        except ImportError:
            self.error = "the package llguidance is not installed on the server"
        except Exception as error:  # llguidance raises various ones
            self.error = f"the model's tokenizer is not supported: {error}"

    def __call__(self, text: str) -> bytes:
        """The answer for a text."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        from bros.engine.grammars import first_line, parser_limits

        if is_gbnf(text):
            try:
                text = gbnf_to_lark(text)
            except Exception as error:  # of its own class, or any from its parser
                return _BAD + first_line(str(error)).encode()
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            reason = first_line(matcher.get_error())
            if reason.startswith("panic"):
                reason = "it is too large"
            return _BAD + reason.encode()
        return _GOOD + text.encode()


def _in_child(compiler: _Compiler, text: str) -> bytes:
    """The answer of a child, which is ended when it takes too long."""
    if compiler.error is not None:
        return _BAD + compiler.error.encode()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _answer_and_exit(compiler, text, write)
    os.close(write)
    answer = bytearray()
    with open(read, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], _WALL_S)[0] and (part := pipe.read(2**20)):
            answer += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return bytes(answer) or _BAD + _TOO_LONG.encode()


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
        answer = compiler(text)
    except BaseException:  # llguidance's panics are BaseExceptions
        answer = _BAD + _TOO_LONG.encode()
    while answer:
        answer = answer[os.write(write, answer) :]
    os._exit(0)


if __name__ == "__main__":
    main()
