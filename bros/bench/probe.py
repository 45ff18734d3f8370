"""Questions to a server besides the load: what it serves, how it is, whether it is idle."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple, Self

import aiohttp

from bros.bench.scrape import is_idle, parse_metrics
from bros.core.clock import Clock
from bros.core.errors import BrosError

_TIMEOUT_S = 10.0
_POLL_S = 0.2


class NoServerError(BrosError):
    """Nothing that speaks OpenAI's API answers at the address."""


class Model(NamedTuple):
    """context_tokens: most tokens of prompt and answer; None if the server does not say."""

    name: str
    context_tokens: int | None


class Probe:
    """One server. An asynchronous context manager; usable inside it."""

    def __init__(self, base_url: str, clock: Clock, api_key: str | None = None) -> None:
        self._base = base_url.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def model(self, wanted: str | None = None) -> Model:
        """The model that is called `wanted`, or the first one. Raises NoServerError.

        A server with an empty list (one that loads models when they are asked for) is believed
        to have the wanted one.
        """
        status, text = await self._get("/v1/models")
        if status != 200:
            raise NoServerError(f"{self._base}/v1/models answers with status {status}")
        try:
            models = [_model(entry) for entry in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError):
            raise NoServerError(f"{self._base}/v1/models is no list of models") from None
        for model in models:
            if wanted is None or model.name == wanted:
                return model
        if wanted is not None and not models:
            return Model(wanted, None)
        names = ", ".join(model.name for model in models) or "nothing"
        asked = "any model" if wanted is None else repr(wanted)
        raise NoServerError(f"{self._base} does not serve {asked}; it serves {names}")

    async def version(self) -> str | None:
        """What `/version` says, as bros and vLLM have it; None where that is not known."""
        try:
            status, text = await self._get("/version")
            version = json.loads(text)["version"] if status == 200 else None
        except (NoServerError, ValueError, KeyError, TypeError):
            return None
        return version if isinstance(version, str) else None

    async def metrics(self) -> dict[str, float]:
        """Those of scrape.SAMPLED that it has; empty if it has none or does not answer."""
        try:
            status, text = await self._get("/metrics")
        except NoServerError:
            return {}
        return parse_metrics(text) if status == 200 else {}

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until it has nothing left to do; False if it cannot be told, or is not in time."""
        end_s = self._clock.now() + timeout_s
        while self._clock.now() < end_s:
            sample = await self.metrics()
            if not sample:
                return False
            if is_idle(sample):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _get(self, path: str) -> tuple[int, str]:
        assert self._session is not None, "not entered"
        try:
            async with self._session.get(self._base + path) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise NoServerError(f"{self._base} does not answer: {reason}") from None


def _model(entry: dict[str, Any]) -> Model:
    context = entry.get("max_model_len")
    return Model(str(entry["id"]), context if isinstance(context, int) else None)
