"""The stream of a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from bros.core.errors import EngineDeadError
from bros.core.interfaces import OutputSink
from bros.core.request import RequestOutput, ServiceClass
from bros.engine.client import OutputStream

_TURNS = 20
"""Of the loop before each output: the reader keeps up, so that none is merged with the next."""


class PlayedStream(OutputStream):
    """Plays a script from the moment when it is connected, until it is stopped."""

    def __init__(self, service_class: ServiceClass, script: AsyncIterator[RequestOutput]) -> None:
        super().__init__(service_class)
        self._script = script
        self._task: asyncio.Task[None] | None = None

    def connect(self, sink: OutputSink) -> None:
        super().connect(sink)
        self._task = asyncio.create_task(self._play())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _play(self) -> None:
        try:
            async for output in self._script:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                self.put(output)
        except EngineDeadError as error:
            self.put(error)
        except Exception as error:  # a bug, which the reader must see
            self.put(error)  # type: ignore[arg-type]
