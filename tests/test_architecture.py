"""The layers and rules of docs/architecture.md, read from the source of bros/.

`check(path, source)` returns one line per breach, `file:line: what is wrong`. Half of this file
tries the checker itself on small snippets, because a checker that finds nothing proves nothing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "bros").rglob("*.py"))

# Higher may import lower; packages of one level may not import each other.
LEVELS: Sequence[tuple[str, ...]] = (
    ("core",),
    ("kvcache", "kernels", "workload"),
    ("scheduler", "executor"),
    ("profiling",),
    ("engine",),
    ("text",),
    ("transport",),
    ("semantic", "batch", "router"),
    ("simulator", "server", "bench"),
    ("cli", "terminal", "llm", "langchain", "__main__"),
)
# Inside a package the same holds of its parts; a module that is not listed stands above them all.
PARTS: Mapping[str, Sequence[tuple[str, ...]]] = MappingProxyType(
    {"semantic": (("errors",), ("schema", "transforms"), ("core",), ("service", "client"))}
)
MAY_IMPORT_PART = frozenset({("bros/semantic/client/local.py", "service")})  # both in one process
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
TOP = len(LEVELS) - 1

SERVER_ONLY = ("bros/server/",)
WIRE_ONLY = ("bros/transport/ipc.py", "bros/transport/process_client.py", "bros/transport/ray.py")
CONFINED = {  # library -> where it may be imported
    "torch": ("bros/kernels/", "bros/executor/", "bros/server/build.py"),
    "triton": ("bros/kernels/",),
    "starlette": SERVER_ONLY,
    "uvicorn": SERVER_ONLY,
    "pydantic": (*SERVER_ONLY, "bros/langchain/"),  # LangChain's models are pydantic's
    "langchain_core": ("bros/langchain/",),
    "pydantic_core": SERVER_ONLY,
    "prometheus_client": SERVER_ONLY,
    "zmq": WIRE_ONLY,
    "msgspec": WIRE_ONLY,
    "ray": ("bros/transport/ray.py",),
    "sqlalchemy": ("bros/batch/",),
    "alembic": ("bros/batch/",),
    "time": ("bros/core/clock.py",),
    "secrets": ("bros/server/",),
    "uuid": (),
}
STDLIB_ONLY = "bros/core/"
# The second is told by torchrun which rank it is. The others set what has no argument: for libgomp
# when torch is loaded, for Ray when it starts a cluster, for gloo, and for the Python of ranks.
MAY_READ_ENVIRONMENT = (
    *("bros/cli/main.py", "bros/transport/process.py", "bros/executor/__init__.py"),
    *("bros/transport/ray.py", "bros/transport/launcher.py", "bros/executor/parallel/ranks.py"),
)
MAY_DRAW_ENTROPY = ("bros/transport/local.py", "bros/server/build.py")

# (file, name) of state outside objects that an interface from elsewhere asks for.
FOREIGN_INTERFACES = frozenset(
    {
        ("bros/text/tokenizer.py", "tags"),  # jinja2 wants a set in the class
        # The Parrot paper's `get` names no session: it is that of the `with` block around it.
        ("bros/semantic/client/program.py", "CURRENT"),
    }
)

MUTABLE_TYPES = frozenset(
    {"list", "dict", "set", "bytearray", "array", "defaultdict", "deque", "Counter"}
    | {"OrderedDict", "ChainMap", "WeakValueDictionary", "WeakKeyDictionary", "count", "cycle"}
    | {"Lock", "RLock", "Event", "Queue", "local", "ContextVar", "Random", "SystemRandom"}
)
MUTATORS = frozenset(
    {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update"}
    | {"add", "discard", "setdefault", "popitem", "appendleft", "popleft", "extendleft"}
)
CACHES = frozenset({"cache", "lru_cache"})
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def check(path: str, source: str) -> list[str]:
    """Every breach in one file of bros/; `path` is relative to the repository."""
    tree = ast.parse(source)
    found = [
        *_layers(path, tree),
        *_parts(path, tree),
        *_libraries(path, tree),
        *_ambient(path, tree),
        *_module_state(path, tree),
    ]
    return [f"{path}:{line}: {rule}" for line, rule in sorted(found)]


Breaches = Iterator[tuple[int, str]]


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones resolved, `from a import b` as a.b."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _unit(dotted: str) -> str | None:
    """The layer a name of bros belongs to; None for bros/__init__.py itself."""
    name = dotted.split(".")[1] if "." in dotted else ""
    if name == "LLM":
        return "llm"
    return None if name in ("", "__init__", "__version__", "SamplingParams") else name


def _layers(path: str, tree: ast.Module) -> Breaches:
    here = _unit(path.removesuffix(".py").replace("/", "."))
    if here is not None and here not in LEVEL:
        yield 1, f"{here} has no place in LEVELS; give it one"
        return
    level = TOP if here is None else LEVEL[here]
    for line, dotted in _imports(path, tree):
        there = _unit(dotted) if dotted.split(".")[0] == "bros" else None
        if there is None or there == here:
            continue
        if there not in LEVEL:
            yield line, f"{there} has no place in LEVELS; give it one"
        elif LEVEL[there] > level or (LEVEL[there] == level and level != TOP):
            yield line, f"{here} must not import {there}: see LEVELS"


def _parts(path: str, tree: ast.Module) -> Breaches:
    """The order of the parts of one package."""
    package, *rest = path.removesuffix(".py").split("/")[1:]
    levels = PARTS.get(package, ())
    level_of = {name: level for level, names in enumerate(levels) for name in names}
    here = rest[0] if rest else ""
    for line, dotted in _imports(path, tree):
        there = dotted.split(".")[2:3] if dotted.startswith(f"bros.{package}.") else []
        if not there or there[0] == here or here not in level_of:
            continue
        if level_of.get(there[0], len(levels)) >= level_of[here]:
            if (path, there[0]) not in MAY_IMPORT_PART:
                yield line, f"{package}.{here} must not import {package}.{there[0]}: see PARTS"


def _libraries(path: str, tree: ast.Module) -> Breaches:
    for line, dotted in _imports(path, tree):
        library = dotted.split(".")[0]
        allowed = CONFINED.get(library)
        if allowed is not None and not path.startswith(allowed):
            yield line, f"{library} may be imported only in {', '.join(allowed) or 'no file'}"
        if path.startswith(STDLIB_ONLY) and library not in {*sys.stdlib_module_names, "bros"}:
            yield line, f"{library} is not of the standard library, which is all core may use"


def _ambient(path: str, tree: ast.Module) -> Breaches:
    """Time, randomness and environment that were not passed in."""
    for line, dotted in _imports(path, tree):
        if dotted.startswith("random.") and dotted.split(".")[1] not in ("Random", "SystemRandom"):
            yield line, f"{dotted} draws from hidden state: take a random.Random"
        if dotted in ("os.environ", "os.getenv") and path not in MAY_READ_ENVIRONMENT:
            yield line, "the environment is read only in " + ", ".join(MAY_READ_ENVIRONMENT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from _ambient_attribute(path, node, f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.Call) and _called(node) == "SystemRandom":
            if path not in MAY_DRAW_ENTROPY:
                yield node.lineno, "entropy is drawn only in " + ", ".join(MAY_DRAW_ENTROPY)
        if isinstance(node, ast.Call) and _called(node) == "Random" and not node.args:
            yield node.lineno, "random.Random without a seed: pass one in"


def _ambient_attribute(path: str, node: ast.Attribute, dotted: str) -> Breaches:
    module, name = dotted.split(".")
    if module == "random" and name not in ("Random", "SystemRandom"):
        yield node.lineno, f"{dotted} draws from hidden state: take a random.Random"
    if dotted in ("os.environ", "os.getenv") and path not in MAY_READ_ENVIRONMENT:
        yield node.lineno, "the environment is read only in " + ", ".join(MAY_READ_ENVIRONMENT)
    if module in ("datetime", "date") and name in ("now", "utcnow", "today"):
        yield node.lineno, f"{dotted} reads the time: take a Clock"


def _module_state(path: str, tree: ast.Module) -> Breaches:
    """Anything at module or class level that can change while the program runs."""
    constants = set()
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (node for scope in scopes for node in scope.body):
        for name, value in _assigned(node):
            if isinstance(value, DISPLAYS) and _is_constant(name):
                constants.add(name)
            elif isinstance(value, DISPLAYS) or _called(value) in MUTABLE_TYPES:
                if (path, name) not in FOREIGN_INTERFACES:
                    yield node.lineno, f"{name} is mutable state outside any object"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: pass it in instead"
        for name in constants.intersection(_mutated(node)):
            yield getattr(node, "lineno", 1), f"{name} is a constant and must not be changed"
    yield from _module_caches(tree)


def _module_caches(tree: ast.Module) -> Breaches:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {_called(decorator) or _name(decorator) for decorator in node.decorator_list}
            if names & CACHES:
                yield node.lineno, f"the cache of {node.name} is mutable state outside any object"


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value


def _is_constant(name: str) -> bool:
    return name.isupper() or (name.startswith("__") and name.endswith("__"))


def _mutated(node: ast.AST) -> Iterator[str]:
    """Names that a statement or call changes in place, or rebinds with an operator."""
    targets: Sequence[ast.expr] = ()
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
        if isinstance(node.target, ast.Name):
            yield node.target.id
    for target in targets:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            yield target.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in MUTATORS and isinstance(node.func.value, ast.Name):
            yield node.func.value.id


def _called(node: ast.expr) -> str | None:
    return _name(node.func) if isinstance(node, ast.Call) else None


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Subscript):  # deque[int]()
        return _name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("path", FILES)
def test_file_keeps_the_rules(path: str) -> None:
    breaches = check(path, (ROOT / path).read_text(encoding="utf-8"))
    assert not breaches, "\n" + "\n".join(breaches)


def test_every_package_is_seen() -> None:
    assert {_unit(path.removesuffix(".py").replace("/", ".")) for path in FILES} >= {
        *("core", "kvcache", "kernels", "scheduler", "executor", "engine", "server"),
        *("cli", "llm", "__main__"),
    }


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("bros/core/x.py", "import bros.kvcache.manager", "core must not import kvcache"),
        ("bros/kvcache/x.py", "from bros.kernels import _C", "kvcache must not import kernels"),
        ("bros/scheduler/x.py", "from bros import executor", "scheduler must not import executor"),
        ("bros/engine/x.py", "from bros import LLM", "engine must not import llm"),
        ("bros/engine/x.py", "from ..server import app", "engine must not import server"),
        ("bros/engine/a/x.py", "from ...server.app import y", "engine must not import server"),
        ("bros/engine/x.py", "def f():\n  import bros.server", "engine must not import server"),
        ("bros/engine/x.py", "import bros.novelty", "novelty has no place in LEVELS"),
        ("bros/novelty/x.py", "", "novelty has no place in LEVELS"),
        ("bros/semantic/core/x.py", "from bros.semantic.service import y", "must not import"),
        ("bros/semantic/core/x.py", "from bros.semantic.picture import y", "must not import"),
        ("bros/semantic/client/x.py", "import bros.semantic.service.y", "must not import"),
        ("bros/semantic/service/x.py", "from bros.semantic import client", "must not import"),
        ("bros/semantic/schema.py", "from bros.semantic.core import nodes", "must not import"),
        ("bros/core/x.py", "import numpy", "numpy is not of the standard library"),
        ("bros/engine/x.py", "import torch.nn as nn", "torch may be imported only in"),
        ("bros/server/app.py", "from torch import nn", "torch may be imported only in"),
        ("bros/batch/x.py", "import starlette.routing", "starlette may be imported only in"),
        ("bros/server/x.py", "import zmq", "zmq may be imported only in"),
        ("bros/engine/x.py", "import msgspec", "msgspec may be imported only in"),
        ("bros/engine/x.py", "import time", "time may be imported only in bros/core/clock.py"),
        ("bros/core/request.py", "import uuid", "uuid may be imported only in no file"),
        ("bros/engine/x.py", "from random import choice", "random.choice draws from hidden state"),
        ("bros/engine/x.py", "import random\nrandom.seed(1)", "random.seed draws from hidden"),
        ("bros/scheduler/x.py", "r = lambda: random.Random()", "random.Random without a seed"),
        ("bros/scheduler/x.py", "f(random.SystemRandom())", "entropy is drawn only in"),
        ("bros/engine/x.py", "import os\nos.environ['A']", "the environment is read only in"),
        ("bros/engine/x.py", "from os import environ", "the environment is read only in"),
        ("bros/engine/x.py", "datetime.now()", "datetime.now reads the time"),
        ("bros/core/x.py", "cache = {}", "cache is mutable state"),
        ("bros/core/x.py", "seen: set[int] = set()", "seen is mutable state"),
        ("bros/core/x.py", "QUEUE = collections.deque()", "QUEUE is mutable state"),
        ("bros/core/x.py", "Q = deque[int]()", "Q is mutable state"),
        ("bros/core/x.py", "class A:\n  items = []", "items is mutable state"),
        ("bros/core/x.py", "NAMES = []\nNAMES.append(1)", "NAMES is a constant"),
        ("bros/core/x.py", "N = {}\ndef f():\n  N['a'] = 1", "N is a constant"),
        ("bros/core/x.py", "N = [1]\ndef f():\n  del N[0]", "N is a constant"),
        ("bros/core/x.py", "N = [1]\nN += [2]", "N is a constant"),
        ("bros/core/x.py", "def f():\n  global x\n  x = 1", "global x"),
        ("bros/core/x.py", "@functools.cache\ndef f(): ...", "the cache of f is mutable state"),
        ("bros/core/x.py", "@lru_cache(3)\ndef f(): ...", "the cache of f is mutable state"),
    ],
)
def test_breach_is_found(path: str, source: str, rule: str) -> None:
    [breach] = check(path, source)
    file, line, message = breach.split(":", 2)
    assert file == path
    assert 1 <= int(line) <= max(1, len(source.splitlines()))
    assert rule in message


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("bros/server/x.py", "from bros.engine.client import EngineClient\nimport starlette"),
        ("bros/semantic/client/local.py", "from bros.semantic.service.service import y"),
        ("bros/semantic/service/x.py", "from bros.semantic.core import y"),
        ("bros/semantic/picture.py", "from bros.semantic.service import y"),
        ("bros/server/x.py", "from . import app\nfrom .routes import chat"),
        ("bros/cli/chat.py", "from bros.cli.main import main\nfrom bros.server.build import serve"),
        ("bros/core/x.py", "from bros import __version__\nimport json"),
        ("bros/transport/ipc.py", "import zmq, msgspec"),
        ("bros/scheduler/x.py", "import random\ndef f(rng: random.Random): rng.random()"),
        ("bros/engine/build.py", "import random\nx = lambda seed: random.Random(seed)"),
        ("bros/core/x.py", "NAMES = {'a': 1}\n__all__ = ['f']\nlogger = logging.getLogger('x')"),
        ("bros/core/x.py", "def f():\n  names = []\n  names.append(1)\n  return names"),
        ("bros/core/x.py", "class A:\n  @cached_property\n  def f(self): ..."),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert check(path, source) == []


def test_modules_of_semantic_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, too."""
    files = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in FILES
        if path.startswith("bros/semantic/")
    }
    imports = {
        module: {
            dotted if dotted in files else dotted.rpartition(".")[0]
            for _, dotted in _imports(path, ast.parse((ROOT / path).read_text(encoding="utf-8")))
        }
        for module, path in files.items()
    }
    TopologicalSorter({name: found & files.keys() for name, found in imports.items()}).prepare()
