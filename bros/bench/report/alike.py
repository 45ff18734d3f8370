"""Whether the runs of a report were made alike, so that their figures can be compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from bros.bench.flags import FLAGS
from bros.bench.report.words import name_of, ordered
from bros.bench.results import BenchResult, ScenarioResult

_MOST_NAMES = 4
_COMPARED_ELSEWHERE = ("--slo-ttft", "--slo-tpot", "--seed", "--model")


class _Trait(NamedTuple):
    """words: of a run in which it is another. of: None where a run has no such thing.

    among: runs are only compared with those that have the same.
    """

    words: str
    of: Callable[[ScenarioResult], Hashable]
    among: Callable[[ScenarioResult], Hashable]


def _all(run: ScenarioResult) -> Hashable:
    return None


def _server_options(run: ScenarioResult) -> Hashable:
    """Those that the command passed on to servers."""
    settings = run.command.settings
    return frozenset(
        (flag, value)
        for flag, value in settings.items()
        if flag not in FLAGS and flag not in _COMPARED_ELSEWHERE
    )


def _machine(run: ScenarioResult) -> Hashable:
    environment = run.command.environment
    return (environment.cpu, environment.cores, environment.memory_bytes)


def _versions(run: ScenarioResult) -> Hashable:
    environment = run.command.environment
    packages = frozenset(environment.packages.items())
    return (environment.bros, environment.commit, environment.python, packages)


_TRAITS = (
    _Trait("held to other objectives", lambda r: r.command.slo if r.rt_digest else None, _all),
    _Trait("sent other real-time requests", lambda r: r.rt_digest or None, lambda r: r.rt_rate),
    _Trait(
        "sent other best-effort requests",
        lambda r: (r.be_digest, r.be_load) if r.be_digest else None,
        _all,
    ),
    _Trait(
        "measured over another time",
        lambda r: (r.metrics.window.start_s, r.metrics.window.end_s),
        _all,
    ),
    _Trait("asked at another endpoint", lambda r: r.command.settings.get("--endpoint"), _all),
    _Trait("made with another model", lambda r: r.command.settings.get("--model", ""), _all),
    _Trait("made on another machine", _machine, _all),
    _Trait("made with other versions of bros or its packages", _versions, lambda r: r.target),
    _Trait("another version of the server", lambda r: r.server_version, lambda r: r.target),
    _Trait("other options for the server", _server_options, lambda r: r.target),
)


def differences(bench: BenchResult) -> list[str]:
    """A sentence for everything in which runs differ that their names do not say."""
    runs = ordered(bench)
    return [text for trait in _TRAITS for text in _differing(bench, trait, runs)]


def _differing(bench: BenchResult, trait: _Trait, runs: Sequence[ScenarioResult]) -> Iterator[str]:
    """Against the first run of each group."""
    first: dict[Hashable, ScenarioResult] = {}
    others: dict[Hashable, list[ScenarioResult]] = {}
    for run in runs:
        if trait.of(run) is None:
            continue
        group = trait.among(run)
        if trait.of(run) != trait.of(first.setdefault(group, run)):
            others.setdefault(group, []).append(run)
    for group, found in others.items():
        names = [name_of(bench, run) for run in found]
        more = f"; and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield (
            f"{'; '.join(names[:_MOST_NAMES])}{more}: {trait.words} than "
            f"{name_of(bench, first[group])}"
        )
