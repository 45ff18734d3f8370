"""The results of a comparison as plain data and as JSON.

In JSON every run and every class has our figures (in seconds) and beside them those of
`vllm bench serve` under its names (in milliseconds; metrics.NAMES). Shares of requests come with
their 95 % confidence interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bros import __version__
from bros.bench.load import ClientHealth
from bros.bench.metrics import (
    ATTAINMENTS,
    NAMES,
    ClassMetrics,
    RtTax,
    RunMetrics,
    TenantMetrics,
    be_efficiency,
    confidence_interval,
    rt_tax,
)
from bros.core.clock import Clock
from bros.core.errors import BrosError
from bros.core.machine import available_cores, cpu_name
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import Attainment

SCHEMA_VERSION = 2
_VLLM = "vllm"


class BadResultsError(BrosError):
    """The text was not written by to_json."""


class Scenario(StrEnum):
    """What is sent, and whether the server distinguishes the classes.

    S0 and S2 run one class alone; they bound what S3 can reach. S1 runs both without priorities.
    """

    S0 = "S0"
    S1 = "S1"
    S2 = "S2"
    S3 = "S3"

    @property
    def label(self) -> str:
        return _LABELS[self]

    @property
    def mixed(self) -> bool:
        return self in (Scenario.S1, Scenario.S3)


_LABELS = {
    Scenario.S0: "real-time alone",
    Scenario.S1: "mixed, unprotected",
    Scenario.S2: "best-effort alone",
    Scenario.S3: "mixed, protected",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The client's machine.

    memory_bytes, commit: None if unknown.
    date: ISO 8601.
    packages: name -> version of the packages that affect timings.
    """

    cpu: str
    cores: int
    memory_bytes: int | None
    python: str
    bros: str
    date: str
    commit: str | None
    packages: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The `bros bench` command that made a run, and its environment.

    settings: flag -> value.
    seed: of the plans.
    slo: objectives of real-time requests.
    """

    environment: Environment
    settings: dict[str, str | int | float | bool | None]
    seed: int
    slo: Slo


class ServerSample(NamedTuple):
    """The server's own metrics at a time: short name (running.SAMPLED) -> value.

    at_s: seconds after the start of the run.
    """

    at_s: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """One run.

    target: name of the server.
    policy: None if unknown.
    rt_rate: real-time requests per second; None without any.
    rt_load, be_load: human-readable.
    rt_digest, be_digest: of the requests, see planning.Plan.
    server_version: None if the server does not report it.
    timeline: empty if the server has no metrics.
    tenants: what each got, if several share the load.
    notes: what was left out of the planned load or shortened.
    """

    command: Command
    scenario: Scenario
    target: str
    dialect: str
    policy: str | None
    rt_rate: float | None
    rt_digest: str
    be_digest: str
    metrics: RunMetrics
    client: ClientHealth
    rt_load: str = ""
    be_load: str = ""
    server_version: str | None = None
    timeline: tuple[ServerSample, ...] = ()
    tenants: tuple[TenantMetrics, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies a run within a comparison."""
        return (self.scenario, self.target, self.policy, self.rt_rate)

    @property
    def rt(self) -> ClassMetrics:
        return self.metrics.by_class[ServiceClass.RT]

    @property
    def be(self) -> ClassMetrics:
        return self.metrics.by_class[ServiceClass.BE]

    @property
    def slowdown(self) -> float | None:
        """Mean slowdown of the real-time streams that finished in the measured time, by the
        server's own account; None if it gives none."""
        seen = [s.values for s in self.timeline if s.at_s in self.metrics.window]
        streams = sum(values.get("streams", 0.0) for values in seen)
        total = sum(values.get("slowdown_sum", 0.0) for values in seen)
        return total / streams if streams > 0.0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityTrial:
    """One run of a capacity search.

    both_met: attainment of both objectives.
    """

    rate: float
    both_met: Attainment

    def meets(self, asked: float) -> bool:
        """Whether the attainment is at least `asked`; False if nothing was decided."""
        return self.both_met.value is not None and self.both_met.value >= asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityResult:
    """A capacity search.

    asked: required attainment of both objectives.
    rate: the highest rate that reached it, in requests per second; None: none did.
    """

    command: Command
    target: str
    policy: str | None
    asked: float
    rate: float | None
    tried: tuple[CapacityTrial, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies a search within a comparison."""
        return (self.target, self.policy, self.asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Runs of one or several commands.

    files: names of the files that were written beside result.json.
    """

    results: tuple[ScenarioResult, ...]
    capacities: tuple[CapacityResult, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def commands(self) -> list[Command]:
        """The distinct commands, in the order of the runs."""
        found: list[Command] = []
        for result in self.results:
            if result.command not in found:
                found.append(result.command)
        return found

    @property
    def objectives(self) -> list[Slo]:
        """The distinct objectives of real-time requests."""
        return list(dict.fromkeys(command.slo for command in self.commands))

    def with_run(self, new: ScenarioResult) -> BenchResult:
        """With `new` at the end; it replaces a run with the same key."""
        kept = [old for old in self.results if old.key != new.key]
        return replace(self, results=(*kept, new))

    def with_capacity(self, new: CapacityResult) -> BenchResult:
        """With `new` at the end; it replaces a search with the same key."""
        kept = [old for old in self.capacities if old.key != new.key]
        return replace(self, capacities=(*kept, new))

    def rt_tax(self, result: ScenarioResult) -> RtTax | None:
        """`result` minus S0; None without an S0 run."""
        alone = self.like(result, Scenario.S0)
        return None if alone is None else rt_tax(result.rt, alone.rt)

    def be_efficiency(self, result: ScenarioResult, base: Scenario) -> float | None:
        """Best-effort throughput of `result` relative to S1 or S2; None if either is missing."""
        other = self.like(result, base)
        if other is None or not result.be.took_part:
            return None
        return be_efficiency(result.be, other.be)

    def like(self, result: ScenarioResult, scenario: Scenario) -> ScenarioResult | None:
        """The run of a scenario on the same server, if possible with the same policy.

        S0 and S1 have the same rate; S2 has none.
        """
        found = [
            other
            for other in self.results
            if other.scenario is scenario
            and other.target == result.target
            and (scenario is Scenario.S2 or other.rt_rate == result.rt_rate)
        ]
        return min(found, key=lambda other: other.policy != result.policy, default=None)

    def to_json(self) -> str:
        """The inverse of from_json. Raises ValueError for a number that is not finite."""
        tree = {"schema_version": SCHEMA_VERSION, **_encode(self)}
        return json.dumps(tree, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BenchResult:
        """Raises BadResultsError."""
        try:
            tree = json.loads(text)
            version = tree["schema_version"]
            if version != SCHEMA_VERSION:
                raise BadResultsError(f"schema version {version!r} instead of {SCHEMA_VERSION}")
            decoded: BenchResult = _decode(cls, tree)
        except (KeyError, TypeError, ValueError) as error:
            raise BadResultsError(f"not a result of bros bench: {error!r}") from error
        return decoded


def _encode(value: Any) -> Any:
    """Values as JSON. The fields of `metrics` and `vllm` are inlined into their object."""
    if dataclasses.is_dataclass(value):
        tree: dict[str, Any] = {}
        if isinstance(value, ScenarioResult):
            tree["label"] = value.scenario.label
        for field in dataclasses.fields(value):
            encoded = _encode(getattr(value, field.name))
            if field.name == _VLLM or field.type == RunMetrics.__name__:
                tree.update(encoded)
            else:
                tree[field.name] = encoded
            if field.name in ATTAINMENTS:
                low, high = confidence_interval(getattr(value, field.name)) or (None, None)
                encoded.update(low=low, high=high)
        return tree
    if isinstance(value, Mapping):
        return {str(_encode(key)): _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _decode(kind: Any, tree: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        return _decode_union(typing.get_args(kind), tree)
    if origin is tuple:
        return tuple(_decode(typing.get_args(kind)[0], item) for item in tree)
    if origin is dict:
        of_key, of_item = typing.get_args(kind)
        return {_decode(of_key, key): _decode(of_item, item) for key, item in tree.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, tree)
    if kind is ServerSample:
        at_s, values = tree
        return ServerSample(_decode(float, at_s), _decode(dict[str, float], values))
    return _decode_plain(kind, tree)


def _decode_union(kinds: tuple[Any, ...], tree: Any) -> Any:
    if tree is None and types.NoneType in kinds:
        return None
    given = [kind for kind in kinds if kind is not types.NoneType]
    if len(given) == 1:
        return _decode(given[0], tree)
    if type(tree) not in given:
        raise TypeError(f"{tree!r} is none of {kinds}")
    return tree


def _decode_fields(kind: Any, tree: Any) -> Any:
    values = {}
    optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    for name, hint in typing.get_type_hints(kind).items():
        if name not in tree and name in optional:
            continue
        if name == _VLLM:
            values[name] = {key: _decode(float | None, tree[key]) for key in NAMES}
        else:
            values[name] = _decode(hint, tree if hint is RunMetrics else tree[name])
    return kind(**values)


def _decode_plain(kind: Any, tree: Any) -> Any:
    if issubclass(kind, Enum):
        return kind(tree)
    allowed = (int, float) if kind is float else (kind,)
    if type(tree) not in allowed:
        raise TypeError(f"{tree!r} is not of {kind.__name__}")
    return tree


# ---- The environment of a measurement.


_PACKAGES = ("aiohttp", "numpy", "tokenizers", "torch", "transformers")
"""Packages that affect the timings of servers and of the client."""

_SOURCE = Path(__file__).resolve().parents[2]


def environment(clock: Clock) -> Environment:
    """The environment of this process."""
    now = datetime.datetime.fromtimestamp(clock.unix_time(), datetime.UTC)
    return Environment(
        cpu=cpu_name(),
        cores=available_cores(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
        bros=__version__,
        date=now.isoformat(timespec="seconds"),
        commit=_commit(),
        packages=dict(_packages()),
    )


def _packages() -> Iterator[tuple[str, str]]:
    """(name, version) of those that are installed, read without importing them."""
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _commit() -> str | None:
    """Of the source tree that bros runs from, with a plus if it is modified; None without git."""
    if not (_SOURCE / ".git").exists():
        return None
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", "bros") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(_SOURCE), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
