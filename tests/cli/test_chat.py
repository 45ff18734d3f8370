"""The terminal chat: commands, what it remembers, Ctrl-C on a real terminal, a remote server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
from rich.console import Console

from bros.cli.chat import RemoteChat, remote_chat, run_chat
from bros.core.errors import BrosError, ConfigError

Messages = list[dict[str, str]]


class Scripted:
    """A backend that answers each turn with the next script: pieces, or an error to raise."""

    def __init__(self, *scripts: list[str | BaseException]) -> None:
        self.scripts = list(scripts)
        self.asked: list[Messages] = []
        self.closed = False

    @contextlib.asynccontextmanager
    async def opening(self) -> AsyncIterator[Scripted]:
        yield self
        self.closed = True

    async def stream(self, messages: Messages) -> AsyncIterator[str]:
        self.asked.append(messages)
        for piece in self.scripts.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def talk(backend: Scripted, *lines: str | type[BaseException], system: str | None = None) -> str:
    """Run a chat on some lines, then end of input; what it printed."""
    script: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read_line(prompt: str) -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    screen = io.StringIO()
    console = Console(file=screen, highlight=False, width=100)
    assert run_chat(backend.opening(), system=system, read_line=read_line, console=console) == 0
    assert backend.closed
    return screen.getvalue()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def test_answers_are_printed_and_remembered() -> None:
    backend = Scripted(["Hel", "lo"], ["4"])
    assert talk(backend, "Hi", "  2 + 2? ") == "Hello\n4\n"
    assert backend.asked == [[user("Hi")], [user("Hi"), assistant("Hello"), user("2 + 2?")]]


def test_empty_lines_and_ctrl_c_at_the_prompt_ask_nothing() -> None:
    backend = Scripted(["a"])
    assert talk(backend, "", "   ", KeyboardInterrupt, "one").strip() == "a"
    assert backend.asked == [[user("one")]]


def test_clear_forgets_the_conversation_but_not_the_system_prompt() -> None:
    backend = Scripted(["a"], ["b"])
    talk(backend, "one", "/clear", "two", system="Be brief.")
    assert backend.asked[1] == [system("Be brief."), user("two")]


def test_system_sets_and_removes_the_system_prompt() -> None:
    backend = Scripted(["a"], ["b"], ["c"])
    talk(backend, "one", "/system Be brief.", "two", "/system", "three")
    assert backend.asked[1][0] == system("Be brief.")
    assert backend.asked[2][0] == user("one")


def test_quit_leaves_at_once() -> None:
    backend = Scripted()
    talk(backend, "/quit", "never asked")
    assert backend.asked == []


def test_help_names_every_command_and_unknown_ones_point_to_it() -> None:
    printed = talk(Scripted(), "/help", "/bye")
    assert all(command in printed for command in ("/system", "/clear", "/quit", "Ctrl-C"))
    assert "There is no command /bye; type /help" in printed


def test_failed_question_is_forgotten_and_the_chat_goes_on() -> None:
    backend = Scripted([BrosError("queue full")], ["b"])
    assert "error: queue full" in talk(backend, "one", "two")
    assert backend.asked[1] == [user("two")]


def test_an_empty_answer_is_said_to_be_empty() -> None:
    backend = Scripted([], ["b"])
    assert talk(backend, "one", "two") == "(the answer is empty)\nb\n"
    assert backend.asked[1] == [user("two")]


def test_part_of_an_answer_before_an_error_stays() -> None:
    backend = Scripted(["half", BrosError("engine died")], ["b"])
    assert talk(backend, "one", "two").startswith("half\nerror: engine died\n")
    assert backend.asked[1] == [user("one"), assistant("half"), user("two")]


def test_answer_cannot_steer_the_terminal_or_be_taken_for_markup() -> None:
    backend = Scripted(["\x1b[2Ja\x07\x9b", "[red]b[/red]\r\tc\n"])
    assert talk(backend, "one") == "[2Ja[red]b[/red]\tc\n\n"


def test_errors_of_our_own_code_end_the_chat_and_close_the_backend() -> None:
    backend = Scripted([ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        talk(backend, "one")


# A terminal, for Ctrl-C, Ctrl-D and line editing. Opening the terminal by name makes it the
# controlling one of the new session, so that Ctrl-C becomes a signal.
CHILD = """
import asyncio, contextlib, os
os.close(os.open(os.ttyname(0), os.O_RDWR))
from bros.cli.chat import run_chat

class Echo:
    async def stream(self, messages):
        yield f"<{len(messages)} {messages[-1]['content']}>"
        if messages[-1]["content"] == "wait":
            await asyncio.Event().wait()

@contextlib.asynccontextmanager
async def opening():
    yield Echo()

raise SystemExit(run_chat(opening()))
"""


class Terminal:
    """The far end of a pseudo-terminal with the chat on it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` is on the screen; fail if nothing new comes for long."""
        while text not in self._unread:
            ready, _, _ = select.select([self._fd], [], [], 30.0)
            assert ready, f"waited for {text!r}, got {self._unread!r}"
            self._unread += os.read(self._fd, 4096).decode()
        self._unread = self._unread.partition(text)[2]


@pytest.fixture
def chat_on_a_terminal() -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        yield Terminal(ours), child
    finally:
        child.kill()
        child.wait()
        os.close(ours)


@pytest.mark.multiprocess
def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(
    chat_on_a_terminal: tuple[Terminal, subprocess.Popen[bytes]],
) -> None:
    terminal, child = chat_on_a_terminal
    terminal.wait_for("Ctrl-D to leave")
    terminal.wait_for("> ")
    terminal.type("wait\n")
    terminal.wait_for("<1 wait>")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    terminal.type("again\n")
    terminal.wait_for("<3 again>")  # the stopped answer is still part of the conversation
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert child.wait(timeout=30) == 0


@pytest.mark.multiprocess
def test_lines_can_be_edited_and_recalled(
    chat_on_a_terminal: tuple[Terminal, subprocess.Popen[bytes]],
) -> None:
    pytest.importorskip("readline", reason="this Python was built without readline")
    terminal, _ = chat_on_a_terminal
    left, up = "\x1b[D", "\x1b[A"
    terminal.wait_for("> ")
    terminal.type(f"ac{left}b\n")
    terminal.wait_for("<1 abc>")
    terminal.wait_for("> ")
    terminal.type(f"{up}d\n")
    terminal.wait_for("<3 abcd>")


Handler = Callable[[httpx.Request], httpx.Response]


def events(*payloads: object) -> httpx.Response:
    lines = [": comment\n\n"]
    lines += [f"data: {p if isinstance(p, str) else json.dumps(p)}\n\n" for p in payloads]
    return httpx.Response(200, text="".join(lines))


def delta(text: str | None) -> dict[str, object]:
    return {"choices": [{"delta": {} if text is None else {"content": text}}]}


async def answer(
    handler: Handler,
    url: str = "http://host:1",
    model: str | None = "m",
    api_key: str | None = None,
) -> str:
    transport = httpx.MockTransport(handler)
    async with remote_chat(url, model, api_key, transport) as chat:
        return "".join([piece async for piece in chat.stream([user("Hi")])])


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1/"])
async def test_remote_answer_is_streamed(url: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://host:1/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer secret"
        assert json.loads(request.content) == {
            "model": "m",
            "messages": [user("Hi")],
            "stream": True,
            "temperature": 0.2,
            "top_p": 0.9,
        }
        usage = {"choices": [], "usage": {}, "error": None}
        return events(delta(None), delta("Hel"), delta("lo"), usage, "[DONE]", delta("no"))

    assert await answer(handler, url, api_key="secret") == "Hello"


async def test_remote_model_is_the_first_one_served() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        return events(delta(json.loads(request.content)["model"]), "[DONE]")

    assert await answer(handler, model=None) == "first"


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (refuse, "http://host:1/v1/ does not answer: connection refused"),
        (
            lambda request: httpx.Response(401, json={"error": {"message": "wrong key"}}),
            "401: wrong key",
        ),
        (lambda request: httpx.Response(502, text="bad gateway"), "502: bad gateway"),
        (lambda request: httpx.Response(503), "503: Service Unavailable"),
        (lambda request: events({"error": {"message": "engine died"}}), "engine died"),
        (lambda request: events(delta("half")), "the server ended the response early"),
        (lambda request: events("no json"), "does not speak the OpenAI API"),
    ],
)
async def test_remote_failure_says_what_happened(handler: Handler, message: str) -> None:
    with pytest.raises(BrosError) as caught:
        await answer(handler)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (refuse, "does not answer: connection refused"),
        (lambda request: httpx.Response(200, json={"data": []}), "serves no model"),
        (lambda request: httpx.Response(200, json=[]), "does not speak the OpenAI API"),
        (lambda request: httpx.Response(404, text="<html>"), "404: <html>"),
    ],
)
async def test_remote_without_a_model_is_refused(handler: Handler, message: str) -> None:
    with pytest.raises(BrosError, match=message):
        await answer(handler, model=None)


async def test_remote_url_must_be_one() -> None:
    with pytest.raises(ConfigError, match="--url: 'host:1' must start with http"):
        await answer(refuse, url="host:1")


async def test_leaving_a_remote_answer_early_closes_its_stream() -> None:
    closed = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield f"data: {json.dumps(delta('x'))}\n\n".encode()

        async def aclose(self) -> None:
            closed.append(True)

    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Endless()))
    async with httpx.AsyncClient(base_url="http://host/v1/", transport=transport) as client:
        stream = RemoteChat(client, "m").stream([user("Hi")])
        assert await anext(stream) == "x"
        await stream.aclose()  # type: ignore[attr-defined]
    assert closed == [True]
