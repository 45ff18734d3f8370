"""The same trace and seed give the same plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bros.core.config import POLICIES
from support.virtual_time import plans_digest

ROOT = Path(__file__).parents[2]
SEED = 3


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same_plans(policy: str) -> None:
    assert plans_digest(policy, SEED) == plans_digest(policy, SEED)


def test_policies_and_traces_differ() -> None:
    assert len({plans_digest(policy, SEED) for policy in POLICIES}) == len(POLICIES)
    assert plans_digest("bros", SEED) != plans_digest("bros", SEED + 1)


@pytest.mark.multiprocess
def test_plans_do_not_depend_on_how_strings_are_hashed() -> None:
    code = (
        "from support.virtual_time import plans_digest\n"
        f"print(*[plans_digest(policy, {SEED}) for policy in {POLICIES!r}], sep='\\n')"
    )
    found = []
    for hash_seed in ("1", "2"):
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        result = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        found.append(result.stdout.split())
    assert found[0] == found[1] == [plans_digest(policy, SEED) for policy in POLICIES]
