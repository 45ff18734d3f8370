"""Random programs over a router, whose replicas die, restart and come back: nothing is lost, done
twice, starved or left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.config import EngineConfig
from bros.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
)
from bros.core.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    ServiceClass,
)
from bros.engine.client import OutputStream
from bros.router.client import RouterClient
from bros.router.fleet import make_fleet
from bros.router.replica_set import ReplicaState
from bros.router.state import RouterSettings
from bros.scheduler.cost_model import CostModel
from bros.semantic.errors import Cause, ConflictError, SessionGoneError, UpstreamError
from bros.semantic.schema import Criteria, Perf
from bros.semantic.service.service import SessionService
from bros.simulator.fleet import fleet_config
from bros.simulator.simulation import BLOCK_SIZE, Device
from bros.simulator.virtual_loop import LoopClock, run_virtual
from support.killable_replicas import KillableReplica
from support.program_engine import byte_ids, make_service
from support.programs import TENANT
from support.random_programs import (
    Node,
    expected_values,
    native_value,
    nodes_behind,
    shaped_programs,
)
from support.tier import examples

STEPS = CostModel(constant_s=0.02, token_s=5e-5, sample_s=0.0, pair_s=0.0, context_s=1e-6)
DEVICE = Device(name="d", model="m", weights="w", steps=STEPS, kv_blocks=96)
"""Room for about five requests, so that replicas preempt and evict."""

CONFIG = fleet_config(
    EngineConfig(policy="bros", max_num_seqs=4, max_batch_tokens=256, be_max_wait=2.0)
)
REPLICAS = 3
RECOVERY_S, PATIENCE_S = 5.0, 20.0

NO_CALL_WAITS_S = 30.0
"""No value takes longer from when all replicas are up again, though there is always other work. It
is ten times what the programs take."""


@dataclass(frozen=True)
class Event:
    at_s: float
    what: str
    which: int


WHAT = [
    *("get", "get", "get", "stream", "leave", "upgrade", "cancel", "close session"),
    *("die", "die", "die", "start", "drain", "move", "restart", "resume", "gone"),
    *("refuse", "no room", "error"),
]
EVENTS = st.lists(
    st.builds(
        Event,
        st.integers(0, 200).map(lambda ticks: ticks / 100),
        st.sampled_from(WHAT),
        st.integers(0, 30),
    ),
    max_size=16,
)
PERF = [Perf.THROUGHPUT, Perf.LATENCY, Perf.TTFT, Perf.TPOT]
PROGRAMS = st.lists(shaped_programs(), min_size=1, max_size=3)


class Cluster:
    """A service over a router over replicas that can be killed.

    asked: what the service has submitted, by id. outages: when no replica was alive, as (begin,
    end). busy: other requests that there always are, of both classes.
    """

    def __init__(self) -> None:
        self.replicas = [KillableReplica(CONFIG, DEVICE) for _ in range(REPLICAS)]
        fleet = make_fleet("e2", RouterSettings(warm_up=5), block_size=BLOCK_SIZE)
        self.router = RouterClient(fleet, LoopClock(), random.Random(0))
        self.fleet = fleet
        for replica in self.replicas:
            self.router.add(replica, restart=replica.restart)
            replica.changed = self._note_outage
        self.gone: set[int] = set()
        self.asked: dict[str, EngineRequest] = {}
        self.outages: list[tuple[float, float]] = []
        self._dark_s: float | None = None
        submit = self.router.submit

        async def recorded(request: EngineRequest) -> OutputStream:
            self.asked[request.request_id] = request
            return await submit(request)

        self.router.submit = recorded  # type: ignore[method-assign]
        self.service: SessionService = make_service(
            self.router, 0, self.router, recovery_s=RECOVERY_S, patience_s=PATIENCE_S
        )
        others = [ServiceClass.BE] * 8 + [ServiceClass.RT] * 2
        self._others = [asyncio.create_task(self._ask(n, kind)) for n, kind in enumerate(others)]
        self._checks = asyncio.create_task(self._check_always())

    @property
    def alive(self) -> bool:
        return any(replica.alive for replica in self.replicas)

    def happen(self, what: str, which: int) -> None:
        number = which % REPLICAS
        replica = self.replicas[number]
        match what:
            case "die":
                replica.die()
            case "start":
                self._start(number)
            case "drain" | "move" | "restart":
                with contextlib.suppress(InvalidRequestError):  # the last one
                    restart = what == "restart"
                    self.router.drain(number, move=what == "move" or which > 15, restart=restart)
            case "resume":
                self.router.resume(number)
            case "gone" if len(self.gone) < REPLICAS - 1:
                replica.die()
                self.gone.add(number)
                self.router.mark_gone(number, "It broke.")
            case "refuse":
                refusal = QueueFullError(3, 0.5) if which % 2 else OverloadedError("Oh.", 1.0)
                replica.refusals += [refusal] * (1 + which // 3)
            case "no room" | "error":
                retry_s = 0.25 if what == "no room" else None
                replica.errors.append(
                    RequestOutput(
                        request_id="", finish_reason=FinishReason.ERROR, error="Oops.",
                        retry_after_s=retry_s,
                    )
                )  # fmt: skip

    async def recover(self) -> None:
        """All replicas that may come back do, and none refuses anything any more."""
        for number, replica in enumerate(self.replicas):
            replica.refusals.clear()
            replica.errors.clear()
            self.router.resume(number)
            self._start(number)
        await asyncio.sleep(2.0)  # restarts that were under way have ended
        for number in range(REPLICAS):
            self.router.resume(number)
            self._start(number)

    async def close(self) -> None:
        """Stop the other requests, and see that nothing is left."""
        self._checks.cancel()
        for task in self._others:
            task.cancel()
        await asyncio.gather(self._checks, *self._others, return_exceptions=True)
        await asyncio.sleep(1.0)
        self._check()
        assert self.router.num_open == 0
        for number, replica in enumerate(self.replicas):
            assert not replica.open_ids and (replica.alive or number in self.gone)
            if replica.alive:
                stats = await replica.stats()
                waiting = [values.waiting + values.running for values in stats.by_class.values()]
                assert (sum(waiting), stats.kv_blocks_pinned) == (0, 0)
        assert not any(replica.works for replica in self.fleet.replicas.values())
        await self.router.close()

    def check_alone(self) -> None:
        """The clients' requests have left no KV pinned; other requests pin none."""
        for replica in self.replicas:
            if replica.alive:
                assert replica.scheduler.stats().kv_blocks_pinned == 0

    def lost(self, request_id: str) -> int:
        """How many engines were lost with a request."""
        return sum(request_id in ids for replica in self.replicas for ids in replica.lost)

    def _start(self, number: int) -> None:
        if number not in self.gone and not self.replicas[number].alive:
            self.replicas[number].start()

    def _note_outage(self) -> None:
        now = LoopClock().now()
        if self._dark_s is None and not self.alive:
            self._dark_s = now
        elif self._dark_s is not None and self.alive:
            self.outages.append((self._dark_s, now))
            self._dark_s = None

    async def _ask(self, number: int, kind: ServiceClass) -> None:
        """A client that asks again as soon as it has its answer; a real-time one pauses."""
        rng = random.Random(number)
        for count in range(100_000):
            text = f"Other {number} {count}: " + "so it is " * rng.randrange(20)
            request = EngineRequest(
                request_id=f"other-{number}-{count}",
                prompt_token_ids=byte_ids(text),
                sampling=SamplingParams(temperature=0.0, max_tokens=20),
                service_class=kind,
                arrival_s=LoopClock().now(),
            )
            with contextlib.suppress(EngineDeadError, QueueFullError, OverloadedError):
                stream = await self.router.submit(request)
                try:
                    async for _ in stream:
                        pass
                except asyncio.CancelledError:
                    await self.router.abort(request.request_id)
                    raise
            await asyncio.sleep(0.05 if kind is ServiceClass.BE else 0.4)

    async def _check_always(self) -> None:
        while True:
            await asyncio.sleep(0.0437)
            self._check()

    def _check(self) -> None:
        self.router.check_integrity()
        for session in self.service._registry:  # what a session knows has no public way in
            session.machine.check_integrity()
        down_s = LoopClock().now() - 0.001
        for replica, status in zip(self.replicas, self.router.replicas(), strict=True):
            if replica.alive:
                replica.scheduler.check_integrity()
            elif replica.died_s < down_s:
                assert status.state in (ReplicaState.DOWN, ReplicaState.GONE)
                assert status.open == 0, "calls are left on a dead replica"
            self._check_groups(replica)

    def _check_groups(self, replica: KillableReplica) -> None:
        """What was placed again is in the group that it was in, and in the same program."""
        for request_id, request in replica.submitted[-1].items():
            hints = self.asked[request_id].hints
            assert (request.hints.group, request.hints.program) == (hints.group, hints.program)


class Client:
    """One program in a session of its own, and those who wait for it."""

    def __init__(self, cluster: Cluster, nodes: list[Node]) -> None:
        self.cluster = cluster
        self.service = cluster.service
        self.nodes = nodes
        self.size = sum(len(node.outputs) for node in nodes)
        self.session = self.service.create(TENANT).id
        specs = [node.spec() for node in nodes]
        found = self.service.submit(TENANT, self.session, specs)
        self.requests = [submitted.request_id for submitted in found]
        self.cancelled: set[str] = set()
        self.closed = False
        self.results: list[tuple[int, str | Cause]] = []
        self.gets: list[asyncio.Task[None]] = []
        self.functions = [
            asyncio.create_task(self.run_native(node, request))
            for node, request in zip(nodes, self.requests, strict=True)
            if node.kind != "llm"
        ]

    async def get(self, variable: int, perf: Perf = Perf.LATENCY) -> None:
        deadline_s = 3.0 if variable % 2 else None
        with self.unless_closed():
            try:
                criteria = Criteria(perf=perf, deadline_s=deadline_s)
                view = await self.service.get(TENANT, self.session, f"v{variable}", criteria)
                assert view.value is not None
                self.results.append((variable, view.value))
            except UpstreamError as error:
                self.results.append((variable, error.cause))

    async def stream(self, variable: int) -> None:
        """The pieces are the value: nothing comes twice when a call goes on elsewhere."""
        text = ""
        with self.unless_closed():
            try:
                async for piece in self.service.stream(TENANT, self.session, f"v{variable}"):
                    text += piece
                self.results.append((variable, text))
            except UpstreamError as error:
                assert expected_values(self.nodes)[variable].startswith(text)
                self.results.append((variable, error.cause))

    async def run_native(self, node: Node, request: str) -> None:
        """What the client does with a function of its own."""
        try:
            views = [await self.service.get(TENANT, self.session, f"v{i}") for i in node.inputs]
            texts = [view.value or "" for view in views]
            if node.kind == "native-fails":
                self.service.fail(TENANT, self.session, request, "no")
                return
            for i in node.outputs:
                self.service.set(TENANT, self.session, f"v{i}", native_value(texts, i))
        except (UpstreamError, SessionGoneError, ConflictError):
            pass  # it has been cancelled, or an input is not there

    def happen(self, what: str, which: int) -> None:
        if self.closed:
            return
        variable, perf = which % self.size, PERF[which % len(PERF)]
        match what:
            case "get":
                self.gets.append(asyncio.create_task(self.get(variable, perf)))
            case "stream":
                self.gets.append(asyncio.create_task(self.stream(variable)))
            case "leave":
                if self.gets:
                    self.gets[which % len(self.gets)].cancel()
            case "upgrade":
                criteria = Criteria(perf=perf, deadline_s=1.0)
                self.service.want(TENANT, self.session, f"v{variable}", criteria)
            case "cancel":
                request = self.requests[which % len(self.requests)]
                self.cancelled.add(request)
                self.service.cancel(TENANT, self.session, request)
            case "close session" if which > 20:
                self.closed = True
                self.gets.append(asyncio.create_task(self.delete()))

    async def delete(self) -> None:
        self.closed = True
        await self.service.delete(TENANT, self.session)

    async def settle(self) -> None:
        """Get everything, a part of it as best-effort work, and wait for it."""
        if not self.closed:
            perfs = [PERF[i % len(PERF)] for i in range(self.size)]
            self.gets += [asyncio.create_task(self.get(i, perf)) for i, perf in enumerate(perfs)]
        await asyncio.gather(*self.gets, *self.functions, return_exceptions=True)
        for task in (*self.gets, *self.functions):
            assert task.cancelled() or task.exception() is None, task

    def check(self) -> None:
        """A value is what the program says; a failure has a cause that is true."""
        if self.closed:
            return
        expected, behind = expected_values(self.nodes), nodes_behind(self.nodes)
        view = self.service.inspect(TENANT, self.session)
        assert view.expires_in_s is not None, "nothing runs or waits"
        for variable in view.variables:
            number = int(variable.id[1:])
            assert variable.state != "pending"
            result = variable.value if variable.error is None else variable.error
            assert result is not None
            self.results.append((number, result))
        for variable, result in self.results:
            if isinstance(result, str):
                assert result == expected[variable]
            else:
                assert self.requests.index(result.request_id) in behind[variable]
                self.check_cause(result)
        for node, call in zip(self.nodes, view.calls, strict=True):
            for llm_call, i in zip(call.llm_calls, node.outputs, strict=False):
                if node.kind == "llm" and llm_call.state == "finished":
                    value = expected[i]
                    assert llm_call.output_tokens == len(value) + 1, "with the end of sequence"

    def check_cause(self, cause: Cause) -> None:
        cluster, node = self.cluster, self.nodes[self.requests.index(cause.request_id)]
        request_ids = [
            asked
            for asked in cluster.asked
            if asked.split("~")[0].split(".")[0] == cause.request_id
        ]
        match cause.stage:
            case "cancelled":
                assert cause.request_id in self.cancelled
            case "native":
                assert node.kind == "native-fails"
            case "transform":
                assert node.transform == "json"
            case "generate" if cause.message == "Oops.":
                assert any(i in replica.erred for replica in cluster.replicas for i in request_ids)
            case "generate":
                assert "3 engines were lost" in cause.message
                assert any(cluster.lost(i) >= 3 for i in request_ids)
            case "engine":
                assert node.kind == "llm"
                longest = max((end - begin for begin, end in cluster.outages), default=0.0)
                assert len(cluster.outages) >= 3 or longest >= RECOVERY_S, cause
            case _:
                raise AssertionError(cause)

    @contextlib.contextmanager
    def unless_closed(self) -> Iterator[None]:
        try:
            yield
        except SessionGoneError:
            assert self.closed


async def live_through(programs: list[list[Node]], happenings: list[Event]) -> None:
    cluster = Cluster()
    clients = [Client(cluster, nodes) for nodes in programs]
    passed = 0.0
    for event in sorted(happenings, key=lambda event: event.at_s):
        await asyncio.sleep(event.at_s - passed)
        passed = event.at_s
        cluster.happen(event.what, event.which)
        clients[event.which % len(clients)].happen(event.what, event.which)
    await cluster.recover()
    async with asyncio.timeout(NO_CALL_WAITS_S):
        await asyncio.gather(*(client.settle() for client in clients))
    for client in clients:
        client.check()
    await asyncio.sleep(0.1)
    cluster.check_alone()
    for client in clients:
        if not client.closed:
            await client.delete()
    await cluster.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@settings(max_examples=examples(8, long=600))
@given(programs=PROGRAMS, happenings=EVENTS)
def test_programs_live_through_the_deaths_of_replicas(
    programs: list[list[Node]], happenings: list[Event]
) -> None:
    async def main() -> None:
        await live_through(programs, happenings)

    run_virtual(main)
