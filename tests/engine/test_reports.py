"""The reports of an engine to its subscriber."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest, RequestOutput, SamplingParams, ServiceClass, expanded
from bros.engine.engine import Engine
from bros.engine.loop import run_engine
from bros.engine.messages import Command, Reply, Reported, Shutdown, StatsReply, Submit, Subscribe
from bros.engine.thread_client import ThreadEngineClient
from support.scheduling import engine_info, make_scheduler
from support.tier import examples
from support.toy_model import ToyModel

SIZE = 4


class Steps(ToyModel):
    """Each takes a hundredth of a second."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(SIZE)
        self._clock = clock

    def execute(self, plan, should_abort=None):  # type: ignore[no-untyped-def]
        self._clock.advance(0.01)
        return super().execute(plan, should_abort)


def make_engine(blocks: int = 64, policy: str = "bros", **options: object) -> Engine:
    clock = ManualClock(5.0)
    options = {"prefix_cache": "class-aware", **options}
    scheduler = make_scheduler(policy, blocks=blocks, **options)  # type: ignore[arg-type]
    return Engine(scheduler, Steps(clock), clock, engine_info(blocks=blocks, policy=policy))


def ask(
    name: str, prompt: Sequence[int], tokens: int = 1, service_class: ServiceClass = ServiceClass.RT
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        service_class=service_class,
    )


def drain(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_work:
        outputs += map(expanded, engine.step())
    return outputs


class View:
    """The prefixes that are there, as told: what the last word on each says."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.there: set[tuple[int, ...]] = set()
        self.versions: list[int] = []

    def take(self, report: EngineReport | None) -> None:
        if report is None:
            return
        self.versions.append(report.version)
        if report.full:
            self.there.clear()
        for name, tokens in report.cached_prefixes:
            text = self.texts[name]
            assert tokens <= len(text) and tokens % SIZE == 0
            ends = range(SIZE, len(text) + 1, SIZE)
            prefixes = [tuple(text[:end]) for end in ends]
            if not report.full:
                self.there.difference_update(prefixes[tokens // SIZE :])
            self.there.update(prefixes[: tokens // SIZE])

    def matched(self, prompt: Sequence[int]) -> int:
        """Of all but the last token, which is always computed."""
        end = 0
        while end + SIZE < len(prompt) and tuple(prompt[: end + SIZE]) in self.there:
            end += SIZE
        return end


@settings(max_examples=examples(20, long=400), deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(8, 30), host=st.sampled_from([0, 4]))
def test_reports_say_what_requests_find_in_the_cache(seed: int, blocks: int, host: int) -> None:
    rng, view = random.Random(seed), View()
    engine = make_engine(blocks, host_blocks=host)
    engine.subscribe()
    beginnings = [[n + 1] * rng.randint(4, 16) for n in range(3)]
    for number in range(12):
        name = f"r{number}"
        prompt = [*rng.choice(beginnings), *rng.choices(range(1, 99), k=rng.randint(1, 6))]
        if number and rng.random() < 0.3:
            prompt = view.texts[f"r{rng.randrange(number)}"][: 4 * blocks - 12]
        view.texts[name] = list(prompt)
        tokens = rng.randint(1, 10)
        view.texts[name] += ToyModel.continuation(prompt, tokens)
        engine.submit(ask(name, prompt, tokens, rng.choice(list(ServiceClass))))
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.5:
            view.take(engine.report(full=rng.random() < 0.3))
    drain(engine)
    view.take(engine.report())
    assert engine.report() is None, "nothing has changed"
    for number in range(12):
        prompt = view.texts[f"r{number}"][: 4 * blocks - 1]
        expected = view.matched(prompt)
        view.texts[f"again {number}"] = [*prompt, *ToyModel.continuation(prompt, 1)]
        engine.submit(ask(f"again {number}", prompt))
        (output,) = drain(engine)
        assert output.cached_tokens == expected
        view.take(engine.report())
    assert view.versions == list(range(1, len(view.versions) + 1))


def test_there_are_no_reports_without_a_subscriber_and_a_full_one_comes_first() -> None:
    engine = make_engine()
    engine.submit(ask("a", [1] * 8, 2))
    engine.step()
    assert engine.report() is None and engine.report(full=True) is None
    engine.subscribe()
    first = engine.report()
    assert first is not None and first.slowdown < 1.0, "steps take less than was said"
    expected = EngineReport(
        version=1, full=True, cached_prefixes=(("a", 8),), running=1, used_blocks=2
    )
    assert dataclasses.replace(first, slowdown=1.0) == expected
    assert engine.report() is None
    drain(engine)
    second = engine.report()
    assert second is not None
    assert (second.version, second.full, second.cached_prefixes) == (2, False, ())
    assert (second.running, second.used_blocks, second.cached_blocks) == (0, 0, 2)


class Talk:
    """A transport that says what a test says, one batch per step."""

    has_arrivals = True

    def __init__(self, *batches: Sequence[Command]) -> None:
        self._batches = list(batches)
        self.replies: list[Reply] = []

    def receive(self, *, wait: bool) -> Sequence[Command]:
        if wait or len(self._batches) > 1:
            return self._batches.pop(0)
        return ()

    def send(self, reply: Reply) -> None:
        self.replies.append(reply)


def test_notices_come_ten_times_a_second_and_when_the_engine_rests_and_digests_at_times() -> None:
    talk = Talk([Subscribe()], [Submit(ask("a", [1] * 4, 150))], [Submit(ask("b", [2] * 4, 1700))],
                [Shutdown()])  # fmt: skip
    engine = make_engine(blocks=600)
    run_engine(engine, talk)
    reports = [reply.report for reply in talk.replies if isinstance(reply, Reported)]
    assert [report.version for report in reports] == list(range(1, len(reports) + 1))
    assert reports[0] == EngineReport(version=1, full=True)
    full = [number for number, report in enumerate(reports) if report.full]
    assert len(full) == 2 and 85 <= full[1] <= 101, "the second one after ten seconds"
    assert 150 <= len(reports) <= 175, "seventeen seconds"
    kept = dict(pair for report in reports for pair in report.cached_prefixes)
    assert reports[-1].running == 0 and kept == {"a": 152, "b": 1700}
    assert isinstance(talk.replies[-1], Reported)


def test_an_engine_without_a_subscriber_sends_no_reports() -> None:
    talk = Talk([Submit(ask("a", [1] * 4, 150))], [Shutdown()])
    run_engine(make_engine(), talk)
    assert not any(isinstance(reply, Reported | StatsReply) for reply in talk.replies)


async def test_a_client_hears_of_an_engine_on_a_thread() -> None:
    client, heard = ThreadEngineClient(make_engine), asyncio.Queue[EngineReport]()
    await client.wait_ready()
    client.subscribe(heard.put_nowait)
    assert await heard.get() == EngineReport(version=1, full=True)
    async for _ in await client.submit(ask("a", [1] * 8)):
        pass
    while not (report := await heard.get()).cached_prefixes:
        pass
    assert report.cached_prefixes == (("a", 8),)
    await client.close()
