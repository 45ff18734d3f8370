"""`bros doctor`: shows the hardware and the kernels in use, and tests the kernels."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from bros import __version__
from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.core.machine import available_cores, cpu_name
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
from bros.terminal import print_table

_PACKAGES = ("torch", "triton", "xformers", "numpy", "transformers", "safetensors", "tokenizers")
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_SEED = 0
_DRIVER_TIMEOUT_S = 20.0
_NO_DRIVER = "none found"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Tested:
    """The self-test of one back end.

    failure: None if all checks passed.
    """

    backend: Backend
    checks: tuple[Check, ...]
    seconds: float
    failure: str | None


@dataclass(frozen=True, slots=True)
class Table:
    """The arguments of terminal.print_table."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int


@dataclass(slots=True)
class Findings:
    """Everything that `bros doctor` found.

    machine: (name, value).
    versions: package -> version; None: not installed.
    tested: back ends whose kernels were tested.
    tried: (what, result) of the small models and the KV copies.
    problems: reasons why the engine does not work with these options.
    advice: possible improvements.
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
    """Inspect, test and print. Returns 0 if everything that these options use works, else 1.

    Only the options for device, kernels and precision matter. Results are printed as they become
    available, because compiling kernels takes long.
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
    """Fills in `found` and yields each section as it becomes available."""
    yield from _inventory(found)
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
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _available_memory()
    left = "" if available is None else f"{available // _MIB:,} MiB available of "
    return [
        ("CPU", f"{cpu_name()}, {available_cores()} threads"),
        ("memory", f"{left}{total // _MIB:,} MiB"),
        ("NVIDIA driver", _driver() or _NO_DRIVER),
        *gpu_facts(),
    ]


def _available_memory() -> int | None:
    """Bytes that programs can get, those of files in memory included; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def _driver() -> str | None:
    """The version of the driver, which torch does not report."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_DRIVER_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(dict.fromkeys(done.stdout.split())) or None


def _versions() -> dict[str, str | None]:
    """Package -> version; None: not installed."""
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
    except Exception as error:  # any failure becomes part of the report
        failure = _describe_error(error)
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
    """Compare the kernels in use with the CPU reference in fp32; then run the real precision."""
    exact = dataclasses.replace(config, weights="fp32", kv_dtype="fp32", self_attention="auto")
    plain = dataclasses.replace(exact, device="cpu", kernels="reference", async_scheduling="auto")
    try:
        expected = generate(plain, clock, margins=True)
        same = generate(exact, clock)
        yield _record_trial(found, *_described(same))
        difference = first_difference(expected, same.tokens)
        if difference is not None:
            found.problems.append(f"a small model generates other tokens: {difference}")
        if same.weights != (found.choice.target and found.choice.target.weights):
            yield _record_trial(found, *_described(generate(config, clock)))
    except Exception as error:  # as above
        found.problems.append(f"a small model does not run: {_describe_error(error)}")


def _test_copies(found: Findings, target: Target) -> Iterator[str]:
    try:
        error = check_kv_copies(target)
    except Exception as failure:  # as above
        found.problems.append(f"KV cannot be copied to the host: {_describe_error(failure)}")
        return
    yield _record_trial(found, f"KV to the host and back, {target.device}", f"error {error:g}")
    if error != 0.0:
        found.problems.append("KV that was copied to the host and back has changed")


def _record_trial(found: Findings, what: str, result: str) -> str:
    found.tried.append((what, result))
    return f"{what}: {result}"


def _described(generated: Generated) -> tuple[str, str]:
    count = sum(map(len, generated.tokens.values()))
    return (
        f"greedy, {generated.weights}, {generated.kernels}, {generated.device}",
        f"{count} tokens for {len(generated.tokens)} prompts",
    )


def _describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _advise(found: Findings) -> None:
    """Adds advice on speed; none of it is a problem."""
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


def _inventory(found: Findings) -> Iterator[Table]:
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
    """One line per operation; a single one for a back end that is not in use and passed."""
    worst: dict[str, Check] = {}
    for one in tested.checks:
        name = one.operation if tested.backend.in_use or not one.passed else "all operations"
        if name not in worst or not _error_share(one) <= _error_share(worst[name]):
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


def _error_share(check: Check) -> float:
    """The error as a fraction of the tolerance."""
    return check.error / check.tolerance
