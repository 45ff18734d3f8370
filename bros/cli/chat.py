"""`bros chat`: a chat in the terminal, with a local model or an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import httpx
from rich.console import Console

from bros.cli.remote import auth_headers, base_url, error_message, message_of
from bros.core.errors import BrosError
from bros.core.request import CHAT_SAMPLING
from bros.core.sse import read_events

HELP = """\
/system TEXT  set the system prompt (without TEXT: remove it)
/clear        forget the conversation, keep the system prompt
/quit         leave (or Ctrl-D)
Ctrl-C        stop the response\
"""
_CONNECT_TIMEOUT_S = 10.0
_UNPRINTABLE = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


class ChatBackend(Protocol):
    """A model that continues conversations."""

    def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """Pieces of the response as they arrive. Raises BrosError if there is none."""
        ...


def run_chat(
    opening: AbstractAsyncContextManager[ChatBackend],
    *,
    system: str | None = None,
    read_line: Callable[[str], str] = input,
    console: Console | None = None,
) -> int:
    """Chat until /quit or the end of the input; returns the exit status.

    Only responses run on the event loop, where Ctrl-C cancels the current one. Lines are read
    between them, where Ctrl-C only clears the line. Raises what entering `opening` raises, and
    KeyboardInterrupt while it is entered.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
    console = console or Console(highlight=False)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            backend = runner.run(stack.enter_async_context(opening))
            chat = Chat(backend, runner, console, system)
            if interactive:
                console.print("Type /help for help, Ctrl-D to leave.", style="dim")
            while _handle_line(chat, read_line, "> " if interactive else ""):
                pass
        finally:
            runner.run(stack.aclose())
    return 0


def _handle_line(chat: Chat, read_line: Callable[[str], str], prompt: str) -> bool:
    """Read and handle one line; False to leave."""
    try:
        line = read_line(prompt).strip()
    except EOFError:
        return False
    except KeyboardInterrupt:
        chat.say("")
        return True
    return chat.handle(line) if line else True


def _enable_line_editing() -> None:
    # Imported for its effect on input(); not every Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


async def _interruptible(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; Ctrl-C cancels it even while the event loop is idle.

    asyncio.Runner's plain signal handler does not wake up a loop that is about to wait.
    """
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert task is not None
    # Handlers are possible only in the main thread, and not on every system.
    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await work
    finally:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


class Chat:
    """A conversation, which the user's lines change."""

    def __init__(
        self, backend: ChatBackend, runner: asyncio.Runner, console: Console, system: str | None
    ) -> None:
        self._backend = backend
        self._runner = runner
        self._console = console
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, system prompt first."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._turns

    def say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def handle(self, line: str) -> bool:
        """Run a command or answer a message; False if the user wants to leave."""
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/clear":
            self._turns.clear()
        elif command == "/system":
            self._system = rest.strip() or None
        elif command == "/help":
            self.say(HELP, style="dim")
        elif command.startswith("/"):
            self.say(f"There is no command {command}; type /help for the list.", style="yellow")
        else:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        """Send a message, print the response, and keep both in the conversation.

        A partial response is kept; without any response the message is dropped as well.
        """
        self._turns.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            self._runner.run(_interruptible(self._print_answer(pieces)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            self.say("\n(stopped)", style="dim")
        except BrosError as error:
            start_of_line = "\n" if pieces else ""
            self.say(f"{start_of_line}error: {error}", style="red")
        else:
            # Such as one whose reasoning has taken all tokens.
            self.say("" if pieces else "(the answer is empty)", style=None if pieces else "dim")
        if pieces:
            self._turns.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._turns.pop()

    async def _print_answer(self, pieces: list[str]) -> None:
        async for piece in self._backend.stream(self.messages):
            pieces.append(piece)
            # Control characters in the text could manipulate the terminal.
            self._console.file.write(piece.translate(_UNPRINTABLE))
            self._console.file.flush()


class RemoteChat:
    """A ChatBackend over /v1/chat/completions of a server."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """Pieces of the response. Raises BrosError with the server's message."""
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "temperature": CHAT_SAMPLING.temperature,
            "top_p": CHAT_SAMPLING.top_p,
        }
        with _readable_errors(self._client):
            async with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise _refusal(response)
                async for data in read_events(response.aiter_bytes()):
                    if data == b"[DONE]":
                        return
                    if piece := _piece(json.loads(data)):
                        yield piece
        raise BrosError("the server ended the response early")


@contextlib.asynccontextmanager
async def remote_chat(
    url: str,
    model: str | None,
    api_key: str | None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> AsyncIterator[RemoteChat]:
    """A chat with the server at `url`, with or without /v1.

    model: None: the first one that the server has.
    Raises ConfigError if `url` is no http URL, BrosError if the server does not answer or has no
    model.
    """
    base, headers = base_url(url) + "/v1/", auth_headers(api_key)
    # The first token may handle long: only connecting has a timeout.
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=timeout, transport=transport
    ) as client:
        yield RemoteChat(client, model or await _first_model(client))


async def _first_model(client: httpx.AsyncClient) -> str:
    with _readable_errors(client):
        response = await client.get("models")
        if response.is_error:
            raise _refusal(response)
        models = response.json()["data"]
        if not models:
            raise BrosError(f"{client.base_url} serves no model")
        return str(models[0]["id"])


@contextlib.contextmanager
def _readable_errors(client: httpx.AsyncClient) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise BrosError(f"{client.base_url} does not answer: {reason}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BrosError(f"{client.base_url} does not speak the OpenAI API: {error!r}") from error


def _piece(event: dict[str, Any]) -> str:
    """The text of one event of a stream. Raises BrosError for an error event."""
    if event.get("error") is not None:  # some servers name it in every event
        raise BrosError(message_of(event["error"]))
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _refusal(response: httpx.Response) -> BrosError:
    return BrosError(f"{response.status_code}: {error_message(response)}")
