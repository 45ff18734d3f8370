"""Weights, KV memory and the forward pass. Runs step plans, decides nothing."""

from __future__ import annotations

import os

# How long an idle OpenMP thread spins before it sleeps, in rounds; libgomp reads it when torch is
# loaded. A thread that sleeps between two kernels has to be woken for each of them, and where the
# machine is virtual that takes long; one that spins takes the core from other work. One
# int4 row on two virtual cores, ms per token:
#
#     rounds                                       1,000   5,000   10,000   30,000   100,000
#     nothing else runs                            40-54   23-52    24-30    23-26     23-27
#     beside a busy process on one of the cores    44-48   76-81   94-105  180-209   281-428
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
