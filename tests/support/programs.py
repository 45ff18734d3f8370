"""Short ways to write programs for sessions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from bros.semantic.errors import UpstreamError
from bros.semantic.schema import CallSpec, Criteria, Parameter, Perf, Role
from bros.semantic.service.service import SessionService
from bros.simulator.virtual_loop import run_virtual
from support.program_engine import ProgramEngine, make_service

T = TypeVar("T")

TENANT = "tenant"
LATENCY = Criteria(perf=Perf.LATENCY)
THROUGHPUT = Criteria(perf=Perf.THROUGHPUT)
DUE_LATER = Criteria(perf=Perf.TTFT, deadline_s=1e6)
"""Task groups before such a value are best-effort until its deadline is at risk."""


def call(template: str, name: str = "", **fields: Any) -> CallSpec:
    """A call whose placeholders are the variables of the same names.

    fields: of CallSpec; transforms, sampling, values, criteria: of placeholders, by name.
    """
    by_name = {
        kind: fields.pop(kind, {}) for kind in ("transforms", "samplings", "values", "criteria")
    }
    names = dict.fromkeys(
        part.split("}}")[0].strip().split(":")[-1] for part in template.split("{{")[1:]
    )
    parameters = [
        Parameter(
            name=placeholder,
            variable=None if placeholder in by_name["values"] else placeholder,
            value=by_name["values"].get(placeholder),
            transforms=by_name["transforms"].get(placeholder),
            sampling=by_name["samplings"].get(placeholder),
            criteria=by_name["criteria"].get(placeholder),
        )
        for placeholder in names
    ]
    return CallSpec(name=name, template=template, parameters=parameters, **fields)


def native(inputs: str, outputs: str, name: str = "") -> CallSpec:
    """A function of the client; names of variables, with spaces between."""
    parameters = [Parameter(name=n, variable=n, role=Role.INPUT) for n in inputs.split()]
    parameters += [Parameter(name=n, variable=n, role=Role.OUTPUT) for n in outputs.split()]
    return CallSpec(name=name, native=True, parameters=parameters)


class Desk:
    """A service on a fake engine, and one session of it."""

    def __init__(self, engine: Any = None, seed: int = 0, **settings: Any) -> None:
        """seed: of ids, which must differ for services on one engine."""
        self.engine = engine or ProgramEngine()
        self.service: SessionService = make_service(self.engine, seed, **settings)
        self.session = self.service.create(TENANT).id

    def submit(self, *calls: CallSpec) -> list[str]:
        """Ids of the requests."""
        found = self.service.submit(TENANT, self.session, calls)
        return [submitted.request_id for submitted in found]

    async def value(
        self, variable: str, criteria: Criteria | None = None, timeout_s: float | None = None
    ) -> str:
        view = await self.service.get(TENANT, self.session, variable, criteria, timeout_s)
        assert view.value is not None
        return view.value

    async def cause(self, variable: str) -> tuple[str, str, str]:
        """(request, stage, message) of the failure that a get ends with."""
        try:
            await self.value(variable)
        except UpstreamError as error:
            return error.cause.request_id, error.cause.stage.value, error.cause.message
        raise AssertionError(f"{variable} has a value")

    def want(self, variable: str, criteria: Criteria = LATENCY) -> None:
        self.service.want(TENANT, self.session, variable, criteria)

    def set(self, variable: str, value: str) -> None:
        self.service.set(TENANT, self.session, variable, value)

    def state(self, variable: str) -> str:
        return self.service.variable(TENANT, self.session, variable).state.value

    def view(self, request_id: str) -> Any:
        views = self.service.inspect(TENANT, self.session).calls
        return next(view for view in views if view.id == request_id)

    async def close(self) -> None:
        await self.service.delete(TENANT, self.session)


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test in virtual time, after which nothing is left to do on the loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            await test(*args, **kwargs)
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"left behind: {left}"

        run_virtual(main)

    return run


async def soon(work: Awaitable[T], seconds: float = 10_000.0) -> T:
    """The result of what must not hang."""
    async with asyncio.timeout(seconds):
        return await work
