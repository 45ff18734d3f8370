"""Weights, KV memory and the forward pass. Runs step plans, decides nothing."""

from __future__ import annotations

import os

# How long an idle OpenMP thread spins before it sleeps, in rounds; libgomp reads it when torch is
# loaded. Between two kernels Python takes about 100 microseconds: a thread that sleeps sooner has
# to be woken for every kernel, and where the machine is virtual that takes long (two cores, int4,
# one row: 52 ms a token with 1,000 rounds, 24 with 5,000). One that spins longer takes the core
# from whoever else needs it (beside a busy process on one of the two cores: 46 ms with 1,000, 78
# with 5,000, 100 with 10,000, 940 with libgomp's own 300,000).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
