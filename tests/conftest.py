"""Set-up for all tests: tiers, repeatable property tests, one thread each, quiet libraries."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.ray_cluster import ENVIRONMENT, local_ray
from support.tier import choose_tier, is_long, run_seed

# The fast tier tries the same examples in every run, so that a failure is about the code and not
# about luck. The long one draws new ones and prints how to repeat those that fail.
settings.register_profile(
    "fast",
    derandomize=True,
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    derandomize=False,
    deadline=None,
    max_examples=500,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)

# Two workers on two cores: more threads would only wait for each other. Libraries read these when
# they are loaded, here and in processes that tests start.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
# Servers and engines of tests have a thread for each core. Threads that spin while they wait for
# one another take the core from what they wait for: a file of identity tests 80 s, so 43 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests start processes; tokenizers warns after a fork unless told not to use threads. The
# hub cannot be asked by accident.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.update(ENVIRONMENT)


# GPU machines may lack what servers need; the tests of all else can be run there.
_NEEDS = {
    "executor/test_gguf.py": "gguf",
    "executor/test_model_store.py": "gguf",
    "executor/test_weights.py": "gguf",
    "executor/parallel/test_sharded_models.py": "gguf",
    "engine/test_messages.py": "msgspec",
    "transport/test_process_client.py": "zmq",
    "transport/test_process_ranks.py": "zmq",
    "transport/test_wire.py": "zmq",
    "transport/test_ray_client.py": "zmq",
    "transport/test_supervised_client.py": "zmq",
}
collect_ignore = [file for file, name in _NEEDS.items() if importlib.util.find_spec(name) is None]

# Two instances of Ray on one machine mistake each other's tokens.
_RAY_FILES = (
    "tests/integration/test_cluster_server.py",
    "tests/integration/test_replicas_cached.py",
    "tests/server/test_cluster.py",
    "tests/transport/test_ray_client.py",
)

NO_CUDA = "no CUDA device"

# Kernels in Triton run on the CPU where there is no NVIDIA device. It has to be known before
# triton is imported, by whichever test is first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


_RAY: pytest.StashKey[contextlib.ExitStack] = pytest.StashKey()


@pytest.fixture(scope="session")
def ray_address(pytestconfig: pytest.Config) -> Iterator[str]:
    """Of a Ray instance of this machine with two CPUs. It ends after the last test of Ray, since
    its processes take 5 % of both cores even when idle."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with contextlib.ExitStack() as stack:
        pytestconfig.stash[_RAY] = stack
        yield stack.enter_context(local_ray())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """With the usual handler: a shell lets what it starts in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    is_over = nextitem is None or not nextitem.nodeid.startswith(_RAY_FILES)
    if is_over and _RAY in item.config.stash:
        item.config.stash[_RAY].close()
        del item.config.stash[_RAY]


def pytest_configure(config: pytest.Config) -> None:
    # Nothing of what is imported and collected is ever garbage: looking for some took a quarter of
    # the time of collection, 4 to 12 s of each worker, and a tenth of that of tests.
    gc.disable()
    choose_tier(bool(config.getoption("--long")))
    settings.load_profile("long" if is_long() else "fast")
    if hasattr(config, "workerinput") and config.args == ["tests"]:
        worker = int(config.workerinput["workerid"].removeprefix("gw"))
        count = config.workerinput["workercount"]
        share = worker % count / count  # one that replaces a crashed worker has a higher number
        config.args = _all_tests(config.rootpath / "tests", share)


def _all_tests(tests: Path, share: float) -> list[str]:
    """All that is in the folder of tests, beginning after a share of it: in a fresh clone each
    worker then compiles other files, 15 s of CPU time in all, and reads those of the others."""
    folders = {path.relative_to(tests).parts[0]: 0 for path in sorted(tests.rglob("test_*.py"))}
    for path in tests.rglob("test_*.py"):
        folders[path.relative_to(tests).parts[0]] += path.stat().st_size
    begins = [*itertools.accumulate(folders.values(), initial=0)]
    at = next(index for index, each in enumerate(begins) if each >= share * begins[-1])
    names = [str(tests / name) for name in folders]
    return names[at:] + names[:at]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    return f"tier: long, TEST_SEED={run_seed()}" if is_long() else "tier: fast"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--long", action="store_true", help="the long tier: all, with larger budgets")
    if not pluginmanager.has_plugin("asyncio"):
        # GPU machines may lack it. Its options, which are in pyproject.toml, would be errors.
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "of pytest-asyncio, which is not installed")


@pytest.hookimpl(tryfirst=True)  # before pytest orders them by their fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        items.sort(key=lambda item: item.path)  # the same order in all workers
        _slow_files_first(items)
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="of the long tier: runs with --long"))
        if not config.pluginmanager.has_plugin("asyncio"):
            if inspect.iscoroutinefunction(getattr(item, "function", None)):
                item.add_marker(pytest.mark.skip(reason="needs pytest-asyncio"))
        if "ray_address" in getattr(item, "fixturenames", ()):
            assert item.nodeid.startswith(_RAY_FILES), f"_RAY_FILES lacks the file of {item.nodeid}"
    _skip_without_cuda([item for item in items if item.get_closest_marker("gpu")])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One worker runs all tests of a file, which share servers and models, and one worker runs
    all files of Ray. (Marks of groups, which xdist has for this, pytest 9.2 leaves unread.)"""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(_RAY_FILES) else nodeid.partition("::")[0]

    return FileScheduling(config, log)


def _slow_files_first(items: list[pytest.Item]) -> None:
    """So that no worker begins a long file when the other has nothing left to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    if not items:
        return
    # Late: most test files do without torch, which takes seconds to import.
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=NO_CUDA))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """`make test-gpu` has to say that it has tested nothing."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]
    if f"Skipped: {NO_CUDA}" in reasons and terminalreporter.config.getoption("markexpr") == "gpu":
        terminalreporter.write_line(f"{NO_CUDA}: {len(skipped)} tests skipped")
