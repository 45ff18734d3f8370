"""New sessions, with all that belongs to one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bros.core.clock import Clock
from bros.core.interfaces import EngineClient
from bros.core.request import IdGenerator
from bros.semantic.live import LiveSession
from bros.semantic.nodes import Turn
from bros.semantic.prompt import Begun, Sharing
from bros.semantic.session import SessionCore
from bros.semantic.settings import SessionSettings


class Opener:
    """Makes sessions; keeps none of them."""

    def __init__(
        self,
        engine: EngineClient,
        clock: Clock,
        ids: IdGenerator,
        settings: SessionSettings,
        estimate: Callable[[str, Turn], float],
    ) -> None:
        """estimate: seconds that a turn of a tenant will take."""
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._estimate = estimate

    def open(
        self, tenant: str, session_id: str | None, *, scope: str, **fields: Any
    ) -> LiveSession:
        """A session under an id that never was there before, or under `session_id`.

        scope: see SessionService.create. fields: the others of LiveSession.
        """
        uid, now = self._ids.new("sess"), self._clock.now()
        sharing = Sharing(
            model=self._engine.info.model,
            cache_salt=tenant,
            private_salt=f"scope:{scope}" if scope else uid,
        )
        estimate = functools.partial(self._estimate, tenant)
        return LiveSession(
            id=session_id or uid,
            uid=uid,
            tenant=tenant,
            scope=scope,
            created_s=now,
            created_unix_s=self._clock.unix_time(),
            touched_s=now,
            core=SessionCore(uid, estimate=estimate, limits=self._settings.limits()),
            sharing=sharing,
            begun=Begun(self._engine.info.block_size),
            **fields,
        )
