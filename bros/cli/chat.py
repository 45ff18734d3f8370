"""A chat in the terminal, with a model of this process or behind an OpenAI-compatible API."""

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

from bros.core.errors import BrosError, ConfigError
from bros.core.request import CHAT_SAMPLING
from bros.core.sse import read_events

HELP = """\
/system TEXT  set the system prompt (without TEXT: remove it)
/clear        forget the conversation, keep the system prompt
/quit         leave; so does Ctrl-D
Ctrl-C        stop the answer\
"""
_CONNECT_TIMEOUT_S = 10.0
_UNPRINTABLE = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


class ChatBackend(Protocol):
    """Something that continues conversations."""

    def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """Pieces of the answer as they come. Raises BrosError if there is none."""
        ...


def run_chat(
    opening: AbstractAsyncContextManager[ChatBackend],
    *,
    system: str | None = None,
    read_line: Callable[[str], str] = input,
    console: Console | None = None,
) -> int:
    """Talk until the input ends or /quit; returns the exit status.

    Only answers run on the event loop: Ctrl-C then cancels the one that is running. Lines are
    read between them, where it only empties the line.
    Raises what `opening` raises, and KeyboardInterrupt if interrupted meanwhile.
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
            while _turn(chat, read_line, "> " if interactive else ""):
                pass
        finally:
            runner.run(stack.aclose())
    return 0


def _turn(chat: Chat, read_line: Callable[[str], str], prompt: str) -> bool:
    """One line of the user and its consequence; False to leave."""
    try:
        line = read_line(prompt).strip()
    except EOFError:
        return False
    except KeyboardInterrupt:
        chat.say("")
        return True
    return chat.take(line) if line else True


def _enable_line_editing() -> None:
    # Imported for its effect on input(); not every Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


async def _interruptible(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; Ctrl-C cancels it even while nothing happens on the event loop.

    A plain handler, as asyncio.Runner has, is not seen by a loop that is just about to wait.
    """
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert task is not None
    # Only the main thread may have handlers, and not on every system.
    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await work
    finally:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


class Chat:
    """A conversation and what the user's lines do to it."""

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

    def take(self, line: str) -> bool:
        """Obey a command or answer a message; False if the user wants to leave."""
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
        """Ask, print and remember; without an answer, forget the question as well.

        The part of an answer that came before an interruption stays in the conversation.
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
            self.say("")
        if pieces:
            self._turns.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._turns.pop()

    async def _print_answer(self, pieces: list[str]) -> None:
        async for piece in self._backend.stream(self.messages):
            pieces.append(piece)
            # Text of a model must not be able to steer the terminal.
            self._console.file.write(piece.translate(_UNPRINTABLE))
            self._console.file.flush()


class RemoteChat:
    """Answers conversations through /v1/chat/completions of a server."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """Pieces of the answer as they come. Raises BrosError saying what the server said."""
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
                    raise BrosError(_reason(response))
                async for data in read_events(response.aiter_bytes()):
                    if data == b"[DONE]":
                        return
                    if piece := _piece(json.loads(data)):
                        yield piece
        raise BrosError("the server ended the answer early")


@contextlib.asynccontextmanager
async def remote_chat(
    url: str,
    model: str | None,
    api_key: str | None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> AsyncIterator[RemoteChat]:
    """A chat with the server at `url`, with or without /v1; model None takes its first one.

    Raises ConfigError for something that is no http URL, BrosError if the server does not
    answer or has no model.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} must start with http:// or https://")
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # An answer may take long to begin: only connecting has a limit.
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=timeout, transport=transport
    ) as client:
        yield RemoteChat(client, model or await _first_model(client))


async def _first_model(client: httpx.AsyncClient) -> str:
    with _readable_errors(client):
        response = await client.get("models")
        if response.is_error:
            raise BrosError(_reason(response))
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
    """The text in one event of a stream; raises BrosError if it carries an error."""
    if "error" in event:
        raise BrosError(_message(event["error"]))
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _reason(response: httpx.Response) -> str:
    try:
        message = _message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    return f"{response.status_code}: {message}"


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
