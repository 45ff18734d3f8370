"""The two tiers of the tests: the fast one by default, the long one with --long.

Both run the same code. What a test tries more or less of, examples, kills or seeds, it asks for
here. tests/conftest.py chooses the tier before any test module is imported. Processes that tests
start inherit it.
"""

from __future__ import annotations

import os
import random
from typing import TypeVar

T = TypeVar("T")

_TIER = "TEST_TIER"
_SEED = "TEST_SEED"


def choose_tier(long: bool) -> None:
    """Called once, by tests/conftest.py. The seed of a long run is new unless it is given in
    TEST_SEED; workers of pytest-xdist get the one of their parent."""
    os.environ[_TIER] = "long" if long else "fast"
    if long:
        os.environ.setdefault(_SEED, str(random.SystemRandom().getrandbits(32)))


def is_long() -> bool:
    return os.environ.get(_TIER) == "long"


def by_tier(*, fast: T, long: T) -> T:
    """The value for the tier that runs."""
    return long if is_long() else fast


def examples(fast: int, *, long: int | None = None) -> int:
    """How many examples hypothesis tries; in the long tier ten times as many, unless given."""
    return by_tier(fast=fast, long=10 * fast if long is None else long)


def seed(fixed: int) -> int:
    """A seed for `random`: the given one in the fast tier, one of this run's own in the long."""
    return by_tier(fast=fixed, long=hash((run_seed(), fixed)))


def run_seed() -> int:
    """What `seed` derives its numbers from in the long tier; TEST_SEED repeats a run."""
    return int(os.environ.get(_SEED, "0"))
