"""Set-up for all tests: repeatable property tests and quiet libraries."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Examples are the same in every run, so that a failure is about the code and not about luck.
settings.register_profile(
    "bros",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bros")

# Tests start processes; tokenizers warns after a fork unless told not to use threads. The
# hub cannot be asked by accident.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
