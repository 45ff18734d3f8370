"""What tenants hold is counted, whatever is released when, and limited."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.errors import (
    InvalidRequestError,
    OverTenantLimitError,
    ServerLimitError,
    TenantLimitError,
)
from bros.core.fair import FairMemory
from bros.core.tenants import (
    CPU_WINDOW_S,
    HeldElsewhere,
    QuotaHold,
    Resource,
    TenantAccounts,
    TenantLimits,
    check_limit,
)
from support.tier import examples

TENANTS = ["ann", "bob"]
RESOURCES = [Resource.RT_REQUESTS, Resource.SESSION_CHARS]
LIMITS = TenantLimits(requests=3, session_chars=10)
TOGETHER = TenantLimits(requests=5, session_chars=15)

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("hold"),
            st.sampled_from(TENANTS),
            st.sampled_from(RESOURCES),
            st.integers(0, 12),
        ),
        st.tuples(st.just("resize"), st.integers(0, 20), st.integers(0, 12)),
        st.tuples(st.just("release"), st.integers(0, 20)),
    ),
    max_size=30,
)


@settings(max_examples=examples(50, long=1000))
@given(STEPS)
def test_what_is_counted_is_what_is_held(steps: list[tuple[object, ...]]) -> None:
    accounts = TenantAccounts({"ann": LIMITS}, TenantLimits(), server_limits=TOGETHER)
    holds: list[QuotaHold] = []
    amounts: dict[QuotaHold, int] = {}
    for step in steps:
        match step:
            case ("hold", str(tenant), Resource() as resource, int(amount)):
                used, limit = accounts.used(tenant, resource), accounts.limits(tenant).of(resource)
                total = sum(accounts.used(each, resource) for each in TENANTS)
                most = TOGETHER.of(resource)
                fits_own = limit is None or used + amount <= limit
                fits_all = most is None or total + amount <= most
                limits = [each for each in (limit, most) if each is not None]
                try:
                    hold = accounts.hold(tenant, resource, amount)
                except ServerLimitError:
                    assert fits_own and not fits_all and most is not None and amount <= most
                except TenantLimitError:
                    assert not fits_own and limit is not None and amount <= limit
                except InvalidRequestError:
                    assert any(amount > each for each in limits)
                else:
                    assert fits_own and fits_all
                    holds.append(hold)
                    amounts[hold] = amount
            case ("resize", int(number), int(amount)) if number < len(holds):
                holds[number].resize(amount)
                if holds[number] in amounts:
                    amounts[holds[number]] = amount
            case ("release", int(number)) if number < len(holds):
                holds[number].release()
                amounts.pop(holds[number], None)
        accounts.check_integrity(amounts)
    for hold in holds:
        hold.release()
    assert accounts.held == {}


def test_a_refusal_names_the_limit_and_when_to_retry() -> None:
    accounts = TenantAccounts({"ann": LIMITS, "bob": LIMITS})
    with accounts.hold("ann", Resource.BE_REQUESTS, 3):
        with pytest.raises(TenantLimitError) as refused:
            accounts.hold("ann", Resource.BE_REQUESTS)
        accounts.hold("bob", Resource.BE_REQUESTS, 3).release()
        accounts.hold("ann", Resource.RT_REQUESTS, 3).release()
    assert str(refused.value) == (
        "Your API key has 3 open best-effort requests, and its limit is 3 (max_requests)."
    )
    assert refused.value.ends_soon and refused.value.retry_after_s == 1.0
    with pytest.raises(InvalidRequestError, match="limit of your API key is 3 .* needs 4"):
        accounts.hold("ann", Resource.BE_REQUESTS, 4)
    with accounts.hold("ann", Resource.SESSION_CHARS, 10):
        with pytest.raises(TenantLimitError) as later:
            accounts.hold("ann", Resource.SESSION_CHARS)
    assert not later.value.ends_soon and later.value.retry_after_s == 60.0


@pytest.mark.parametrize(
    ("resource", "one"),
    [
        (Resource.FILES, "1 file"),
        (Resource.FILE_BYTES, "1 byte of files"),
        (Resource.BATCHES, "1 unfinished batch"),
        (Resource.WAITS, "1 request that waits for values or responses"),
    ],
)
def test_one_of_a_resource_is_named_in_the_singular(resource: Resource, one: str) -> None:
    limits = TenantLimits(files=1, file_bytes=1, batches=1, waits=1)
    with pytest.raises(TenantLimitError, match=f"^Your API key has {one}, and its limit is 1 "):
        check_limit(limits, resource, 1)
    with pytest.raises(OverTenantLimitError, match=rf"^The limit of your API key is {one} \("):
        check_limit(limits, resource, 0, 2)


@settings(max_examples=examples(50, long=1000))
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 7))))
def test_a_memory_bounds_sizes_and_the_values_of_a_tenant(puts: list[tuple[str, int, int]]) -> None:
    memory: FairMemory[tuple[str, int], int] = FairMemory(99, max_size=20)
    expected: dict[str, OrderedDict[int, int]] = {"a": OrderedDict(), "b": OrderedDict()}
    for tenant, key, size in puts:
        used = memory.use((tenant, key))
        assert used == expected[tenant].get(key)
        if used is not None:
            expected[tenant].move_to_end(key)
        memory.put(tenant, (tenant, key), size, size=size, most=3)
        expected[tenant].pop(key, None)
        expected[tenant][key] = size
        if len(expected[tenant]) > 3:
            expected[tenant].popitem(last=False)
        while sum(sum(values.values()) for values in expected.values()) > 20:
            largest = max(expected.values(), key=lambda values: sum(values.values()))
            if sum(expected["a"].values()) == sum(expected["b"].values()):  # either may lose one
                oldest = next(iter(expected["a"]))
                largest = expected["b" if memory.get(("a", oldest)) is not None else "a"]
            largest.popitem(last=False)
        memory.check_integrity()
        assert memory.counts() == {name: len(each) for name, each in expected.items() if each}
        for name, values in expected.items():
            assert all(memory.get((name, key)) == value for key, value in values.items())


@settings(max_examples=examples(50, long=1000))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=40))
def test_a_full_memory_forgets_the_oldest_of_the_tenant_that_has_most(
    puts: list[tuple[str, int]],
) -> None:
    memory: FairMemory[tuple[str, int], int] = FairMemory(5)
    expected: dict[str, OrderedDict[int, int]] = {}
    for count, (tenant, key) in enumerate(puts):
        memory.put(tenant, (tenant, key), count)
        of_tenant = expected.setdefault(tenant, OrderedDict())
        of_tenant.pop(key, None)
        of_tenant[key] = count
        if sum(map(len, expected.values())) > 5:
            most = max(map(len, expected.values()))
            # Of tenants with equally many, either may lose one.
            (loser,) = (
                name
                for name, values in expected.items()
                if len(values) == most and memory.get((name, next(iter(values)))) is None
            )
            expected[loser].popitem(last=False)
        memory.check_integrity()
        for name, values in expected.items():
            assert memory.count(name) == len(values)
            assert all(memory.get((name, key)) == value for key, value in values.items())


def test_figures_are_of_all_who_are_named_or_hold_something() -> None:
    accounts = TenantAccounts({"ann": LIMITS, "bob": LIMITS}, TenantLimits(files=7))
    accounts.note_refusal("bob", Resource.RT_REQUESTS)
    with accounts.hold("ann", Resource.SESSION_CHARS, 4):
        figures = accounts.figures({("ann", Resource.FILES): 2, ("old", Resource.FILES): 5})
    found = {(each.tenant, each.resource): each for each in figures}
    assert found.keys() == {(name, each) for name in ("ann", "bob", "old") for each in Resource}
    assert len(found) == len(figures)
    assert found["ann", Resource.SESSION_CHARS].used == 4
    assert found["ann", Resource.SESSION_CHARS].limit == 10
    assert found["ann", Resource.FILES].used == 2 and found["ann", Resource.FILES].limit is None
    assert found["bob", Resource.RT_REQUESTS].refused == 1
    assert found["bob", Resource.RT_REQUESTS].option == "max_requests"
    assert found["old", Resource.FILES].used == 5 and found["old", Resource.FILES].limit == 7
    assert sum(each.used for each in figures) == 11 and sum(e.refused for e in figures) == 1


def test_what_is_held_elsewhere_counts_beside_what_accounts_count() -> None:
    """Files in the store, and uploads that are received."""
    limits = TenantLimits(file_bytes=10)
    accounts = TenantAccounts({"ann": limits}, server_limits=TenantLimits(file_bytes=14))
    stored = {("ann", Resource.FILE_BYTES): 3, ("old", Resource.FILE_BYTES): 6}
    beside = HeldElsewhere(of_tenant=3, of_all=9)
    with accounts.count("ann", Resource.FILE_BYTES, 0) as upload:
        accounts.check_growth(upload, 5, beside)
        upload.resize(5)
        with pytest.raises(ServerLimitError):
            accounts.check_growth(upload, 6, beside)
        with pytest.raises(TenantLimitError):
            accounts.check_growth(upload, 8, HeldElsewhere(of_tenant=3, of_all=3))
        with pytest.raises(OverTenantLimitError):
            accounts.check_growth(upload, 11, beside)
        figures = {each.tenant: each for each in accounts.figures(stored) if each.used}
        assert {name: each.used for name, each in figures.items()} == {"ann": 8, "old": 6}
        (figure,) = accounts.server_figures(stored)
        assert figure.used == 14


def test_a_tenant_that_has_used_up_its_cpu_time_gets_it_back() -> None:
    clock = ManualClock()
    accounts = TenantAccounts({"ann": TenantLimits(cpu_seconds=30)}, clock=clock)
    accounts.spend("ann", 29.0)
    accounts.check_cpu("ann")
    accounts.spend("ann", 31.0)
    accounts.spend("bob", 1000.0)
    accounts.check_cpu("bob")
    with pytest.raises(
        TenantLimitError, match=r"used 30 CPU .* limit \(max_cpu_seconds\)"
    ) as error:
        accounts.check_cpu("ann")
    wait_s = error.value.retry_after_s
    assert wait_s == accounts.cpu_wait_s("ann") == pytest.approx(CPU_WINDOW_S * math.log(2))
    (figure,) = (
        each for each in accounts.figures({}) if each.resource is Resource.CPU_SECONDS
        and each.tenant == "ann"
    )  # fmt: skip
    assert (figure.used, figure.limit, figure.option) == (60, 30, "max_cpu_seconds")
    clock.advance(wait_s / 2)
    assert accounts.cpu_wait_s("ann") == pytest.approx(wait_s / 2)
    clock.advance(wait_s / 2 + 0.001)
    accounts.check_cpu("ann")


@given(st.floats(0.01, 3.0), st.integers(1, 60))
def test_a_busy_tenant_gets_its_seconds_per_minute(job_s: float, limit: int) -> None:
    """As soon as it may, it begins a job."""
    clock, spent = ManualClock(), 0.0
    accounts = TenantAccounts({"ann": TenantLimits(cpu_seconds=limit)}, clock=clock)
    while clock.now() < 600:
        while accounts.cpu_wait_s("ann") <= 0:
            accounts.spend("ann", job_s)
            spent += job_s
        clock.advance(max(accounts.cpu_wait_s("ann"), 0.01))
    assert limit * 10 * 0.9 < spent < limit * 11 + 12 * job_s


def test_tenants_without_work_are_forgotten() -> None:
    clock = ManualClock()
    accounts = TenantAccounts(clock=clock)
    for number in range(100):
        accounts.spend(f"user-{number}", 1.0)
        clock.advance(10.0)
    names = {each.tenant for each in accounts.figures({})}
    assert len(accounts._cpu) < 70 and "user-99" in names


def test_what_is_held_together_is_held_whole_or_not_at_all() -> None:
    accounts = TenantAccounts({"ann": TenantLimits(requests=3, grammars=2)})
    both = [Resource.RT_REQUESTS, Resource.GRAMMARS]
    held = accounts.hold_all("ann", both, 2)
    with pytest.raises(TenantLimitError, match="max_grammars"):
        accounts.hold_all("ann", both, 1)
    assert accounts.held == {("ann", each): 2 for each in both}
    held.resize(1)
    accounts.hold_all("ann", both, 1).release()
    held.release()
    assert accounts.held == {}


def test_a_hold_that_grows_counts_once() -> None:
    accounts = TenantAccounts({"ann": TenantLimits(input_bytes=10)})
    with (
        accounts.count("ann", Resource.INPUT_BYTES, 0) as one,
        accounts.hold("ann", Resource.INPUT_BYTES, 4),
    ):
        for amount in (3, 6):
            accounts.check_growth(one, amount)
            one.resize(amount)
        with pytest.raises(TenantLimitError, match="10 bytes of requests"):
            accounts.check_growth(one, 7)
        with pytest.raises(OverTenantLimitError, match="needs 11"):
            accounts.check_growth(one, 11)
    assert accounts.held == {}


# Limits per minute


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 20.0, 100.0])),
        st.tuples(st.just("ask"), st.integers(1, 70)),
        st.tuples(st.just("answer"), st.integers(1, 200)),
    ),
    max_size=60,
)


@settings(max_examples=examples(50, long=1000))
@given(EVENTS)
def test_limits_per_minute_are_those_of_buckets_that_leak(events: list[tuple[str, float]]) -> None:
    """A refused request is accepted after the time that the refusal names, and not before."""
    clock = ManualClock()
    limits = TenantLimits(requests_per_minute=6, tokens_per_minute=60)
    accounts = TenantAccounts({"ann": limits}, clock=clock)
    requests = tokens = 0.0
    for event, amount in events:
        if event == "wait":
            clock.advance(amount)
            requests, tokens = max(0.0, requests - amount / 10), max(0.0, tokens - amount)
        elif event == "answer":
            accounts.count_tokens("ann", int(amount))
            tokens += amount
        else:
            wait_s = max(10 * (requests + 1 - 6), tokens + amount - 60)
            try:
                accounts.begin_request("ann", int(amount))
            except OverTenantLimitError:
                assert amount > 60
            except TenantLimitError as error:
                assert wait_s > 0
                named_s = error.retry_after_s
                assert 0 < named_s <= wait_s + 1e-6, "of the limit that is checked first"
                assert error.ends_soon == (named_s <= 60), "else clients would ask in vain"
            else:
                assert wait_s <= 1e-6
                requests, tokens = requests + 1, tokens + amount
        found = accounts.rates("ann")
        assert found[Resource.REQUESTS_PER_MINUTE].reset_s == pytest.approx(10 * requests)
        assert found[Resource.TOKENS_PER_MINUTE].reset_s == pytest.approx(tokens)
        assert found[Resource.TOKENS_PER_MINUTE].remaining == max(0, math.floor(60 - tokens + 1e-9))
    accounts.begin_request("bob", 1_000_000)  # it has no limits
    assert accounts.rates("bob") == {}


def test_with_two_limits_used_up_the_longer_wait_is_told() -> None:
    limits = TenantLimits(requests_per_minute=60, tokens_per_minute=60)
    accounts = TenantAccounts({"ann": limits}, clock=ManualClock())
    for _ in range(60):
        accounts.begin_request("ann", 0)
    accounts.count_tokens("ann", 58)
    with pytest.raises(TenantLimitError) as refused:
        accounts.begin_request("ann", 60)
    assert refused.value.retry_after_s == pytest.approx(58.0)


def test_a_request_that_the_engine_refused_counts_for_no_limit_per_minute() -> None:
    accounts = TenantAccounts(
        {}, TenantLimits(requests_per_minute=1, tokens_per_minute=5), ManualClock()
    )
    for _ in range(2):
        accounts.begin_request("ann", 4)
        accounts.undo_request("ann", 4)
    assert accounts.rates("ann")[Resource.REQUESTS_PER_MINUTE].remaining == 1
    accounts.begin_request("ann", 4)
    with pytest.raises(TenantLimitError, match=r"limit of 1 request per minute \(max_requests_per"):
        accounts.begin_request("ann", 1)
