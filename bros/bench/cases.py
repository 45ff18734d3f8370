"""Which runs make a comparison.

    bros servers of our own, one per policy          a server that runs already
    S0   real-time alone      under `bros`           classes told
    S1   mixed, unprotected   under `fcfs`           classes not told
    S2   best-effort alone    under `fcfs`           classes told
    S3   mixed, protected     under each other one   classes told

If the policy of a row is not among those compared, the first one takes its place; S1 then has none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from bros.bench.results import Scenario

_PROTECTED, _UNPROTECTED = "bros", "fcfs"


class Case(NamedTuple):
    """One run. rate: real-time requests per second; None without any, or as recorded."""

    scenario: Scenario
    rate: float | None

    @property
    def tells_classes(self) -> bool:
        return self.scenario is not Scenario.S1


def mixed_scenario(policy: str | None, *, has_classes: bool) -> Scenario:
    """The most that a server can do for a mixed load. policy: None if it is not known."""
    return Scenario.S3 if has_classes and policy != _UNPROTECTED else Scenario.S1


def cases_of_policy(
    policy: str,
    policies: Sequence[str],
    rates: Sequence[float | None],
    scenarios: Collection[Scenario],
) -> list[Case]:
    """The runs on a server of our own with `policy`, one of `policies`."""
    alone = _PROTECTED if _PROTECTED in policies else policies[0]
    bound = _UNPROTECTED if _UNPROTECTED in policies else policies[0]
    mixed = mixed_scenario(policy, has_classes=True)
    wanted: list[Case] = []
    if policy == alone:
        wanted += [Case(Scenario.S0, rate) for rate in rates]
    if policy == bound:
        wanted.append(Case(Scenario.S2, None))
    wanted += [Case(mixed, rate) for rate in rates]
    return [case for case in wanted if case.scenario in scenarios]


def cases_of_target(
    rates: Sequence[float | None], scenarios: Collection[Scenario], *, has_classes: bool
) -> list[Case]:
    """The runs on somebody else's server. has_classes: it can be told what is best-effort."""
    wanted = [Case(Scenario.S0, rate) for rate in rates]
    wanted.append(Case(Scenario.S2, None))
    mixed = dict.fromkeys((Scenario.S1, mixed_scenario(None, has_classes=has_classes)))
    wanted += [Case(scenario, rate) for scenario in mixed for rate in rates]
    return [case for case in wanted if case.scenario in scenarios]
