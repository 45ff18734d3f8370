"""`bros doctor`: what this machine has, which kernels would be used, and whether they are right."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from bros import __version__
from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.engine.self_test import Generated, first_difference, generate
from bros.executor.diagnosis import (
    Backend,
    ChosenBackend,
    backends,
    check_backend,
    check_kv_copies,
    choose_backend,
    gpu_facts,
)
from bros.executor.target import Target
from bros.kernels.self_test import Check
from bros.scheduler.profiles import available_cores, cpu_name
from bros.terminal import print_table

_PACKAGES = ("torch", "triton", "xformers", "numpy", "transformers", "safetensors", "tokenizers")
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_SEED = 0
_DRIVER_TIMEOUT_S = 20.0
_NO_DRIVER = "none found"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Tested:
    """What came of trying one back end.

    failure: None if all is well.
    """

    backend: Backend
    checks: tuple[Check, ...]
    seconds: float
    failure: str | None


@dataclass(frozen=True, slots=True)
class Table:
    """Something to print; see terminal.print_table."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int


@dataclass(slots=True)
class Findings:
    """Everything that is printed.

    problems: what keeps the engine from working as asked.
    """

    machine: list[tuple[str, str]]
    versions: Mapping[str, str | None]
    choice: ChosenBackend
    backends: list[Backend]
    tested: list[Tested] = field(default_factory=list)
    tried: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def run_doctor(config: EngineConfig, as_json: bool, clock: Clock) -> int:
    """Look, test and print. Returns 0 if all that an engine with these options uses works, else 1.

    Of the options, those count that say where and in which precision it runs. What is found is
    printed at once, as kernels that have to be compiled take their time.
    """
    choice = choose_backend(config)
    found = Findings(_machine(), _versions(), choice, backends(choice))
    if choice.problem is not None:
        found.problems.append(choice.problem)
    for section in _examine(found, config, clock):
        if not as_json:
            _show(section)
    if as_json:
        print(json.dumps(_as_json(found), indent=2))
    return 1 if found.problems else 0


def _examine(found: Findings, config: EngineConfig, clock: Clock) -> Iterator[Table | str]:
    """Completes what is found and yields it as it becomes known."""
    yield from _what_there_is(found)
    for backend in found.backends:
        if backend.open is not None:
            tested = _test_kernels(found, backend, clock)
            yield Table(
                f"Self-test of {backend.name} against the reference",
                ("", "types", "error", "allowed", ""),
                _test_rows(tested),
                left=2,
            )
    target = found.choice.target
    if target is not None and not found.problems:
        for what in _test_generation(found, config, clock):
            yield f"A small model, {what}"
        if config.on_pressure == "checkpoint":
            yield from _test_copies(found, target)
    _advise(found)
    yield from (f"Note: {line.rstrip('.')}." for line in found.advice)
    yield from (f"Problem: {line.rstrip('.')}." for line in found.problems)
    if not found.problems:
        yield "Everything that is in use works."


def _machine() -> list[tuple[str, str]]:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(f"SC_{which}PHYS_PAGES") for which in ("", "AV"))
    return [
        ("CPU", f"{cpu_name()}, {available_cores()} threads"),
        ("memory", f"{free // _MIB:,} MiB free of {total // _MIB:,} MiB"),
        ("NVIDIA driver", _driver() or _NO_DRIVER),
        *gpu_facts(),
    ]


def _driver() -> str | None:
    """Its version; torch does not tell it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_DRIVER_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(dict.fromkeys(done.stdout.split())) or None


def _versions() -> dict[str, str | None]:
    """None: not installed."""
    cupy = next((_version(name) for name in _CUPY if _version(name) is not None), None)
    packages = {name: _version(name) for name in _PACKAGES}
    return {"bros": __version__, "python": platform.python_version(), **packages, "cupy": cupy}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _test_kernels(found: Findings, backend: Backend, clock: Clock) -> Tested:
    began = clock.now()
    checks: list[Check] = []
    failure = None
    try:
        for result in check_backend(backend, _SEED):
            checks.append(result)
    except Exception as error:  # whatever it is, the report goes on and says so
        failure = _words(error)
    wrong = [each for each in checks if not each.passed]
    if wrong:
        failure = f"{wrong[0].operation} is wrong: error {wrong[0].error:.1e}"
    tested = Tested(backend, tuple(checks), clock.now() - began, failure)
    found.tested.append(tested)
    if failure is not None:
        where = found.problems if backend.in_use else found.advice
        where.append(f"kernels {backend.name}: {failure}")
    return tested


def _test_generation(found: Findings, config: EngineConfig, clock: Clock) -> Iterator[str]:
    """The reference on the CPU in fp32; the same with what is in use; then in its precision."""
    exact = dataclasses.replace(config, weights="fp32", kv_dtype="fp32", self_attention="auto")
    plain = dataclasses.replace(exact, device="cpu", kernels="reference", async_scheduling="auto")
    try:
        expected = generate(plain, clock, margins=True)
        same = generate(exact, clock)
        yield _tried(found, *_described(same))
        difference = first_difference(expected, same.tokens)
        if difference is not None:
            found.problems.append(f"a small model generates something else: {difference}")
        if same.weights != (found.choice.target and found.choice.target.weights):
            yield _tried(found, *_described(generate(config, clock)))
    except Exception as error:  # as above
        found.problems.append(f"a small model does not run: {_words(error)}")


def _test_copies(found: Findings, target: Target) -> Iterator[str]:
    try:
        error = check_kv_copies(target)
    except Exception as failure:  # as above
        found.problems.append(f"KV cannot be copied to the host: {_words(failure)}")
        return
    yield _tried(found, f"KV to the host and back, {target.device}", f"error {error:g}")
    if error != 0.0:
        found.problems.append("KV that went to the host has come back as something else")


def _tried(found: Findings, what: str, result: str) -> str:
    found.tried.append((what, result))
    return f"{what}: {result}"


def _described(generated: Generated) -> tuple[str, str]:
    count = sum(map(len, generated.tokens.values()))
    return (
        f"greedy, {generated.weights}, {generated.kernels}, {generated.device}",
        f"{count} tokens for {len(generated.tokens)} prompts",
    )


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _advise(found: Findings) -> None:
    """What would make it faster; nothing here is wrong."""
    for backend in found.backends:
        slow = found.choice.kernels == "reference" and backend.name == "cpu"
        if backend.open is None and slow:
            found.advice.append(f"much faster on this CPU: {backend.note}")
    facts = dict(found.machine)
    if facts["NVIDIA driver"] != _NO_DRIVER and facts["GPU"].startswith("not used"):
        found.advice.append(f"there is a GPU that is {facts['GPU']}")


def _as_json(found: Findings) -> dict[str, object]:
    return {
        "ok": not found.problems,
        "problems": found.problems,
        "advice": found.advice,
        "machine": dict(found.machine),
        "versions": dict(found.versions),
        "kernels": [
            {
                "name": each.name,
                "device": str(each.device),
                "in_use": each.in_use,
                "usable": each.open is not None,
                "note": each.note,
            }
            for each in found.backends
        ],
        "tests": [
            {
                "kernels": each.backend.name,
                "seconds": round(each.seconds, 3),
                "failure": each.failure,
                "checks": [
                    {**dataclasses.asdict(one), "passed": one.passed} for one in each.checks
                ],
            }
            for each in found.tested
        ],
        "tried": [{"what": name, "result": text} for name, text in found.tried],
    }


def _what_there_is(found: Findings) -> Iterator[Table]:
    rows = [*found.machine, *((name, text or "-") for name, text in found.versions.items())]
    yield Table(f"bros {__version__}", ("", ""), rows, left=2)
    yield Table(
        "Kernels",
        ("", "in use", "", "what it is, or why it cannot be used"),
        [
            (each.name, "yes" if each.in_use else "", str(each.device), each.note)
            for each in found.backends
        ],
        left=4,
    )


def _show(section: Table | str) -> None:
    if isinstance(section, str):
        print(section, flush=True)
    else:
        print_table(section.title, section.headings, section.rows, left=section.left)
        sys.stdout.flush()


def _test_rows(tested: Tested) -> list[tuple[str, str, str, str, str]]:
    """One line per operation, or one for all where nothing but a spare is tested."""
    worst: dict[str, Check] = {}
    for one in tested.checks:
        name = one.operation if tested.backend.in_use or not one.passed else "all operations"
        if name not in worst or not _part(one) <= _part(worst[name]):
            worst[name] = one
    rows = [
        (
            name,
            "/".join(filter(None, (one.activations, one.cache))),
            f"{one.error:.1e}",
            f"{one.tolerance:.0e}",
            "ok" if one.passed else "WRONG",
        )
        for name, one in worst.items()
    ]
    if tested.failure is not None and all(one.passed for one in tested.checks):
        rows.append(("", "", "", "", tested.failure))
    return rows


def _part(check: Check) -> float:
    """Of what is allowed, how much."""
    return check.error / check.tolerance
