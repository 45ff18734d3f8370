"""Weights, KV memory and the forward pass: runs the plans that the scheduler makes."""

from __future__ import annotations

import os

# How many rounds an idle OpenMP thread spins before it sleeps; libgomp reads this when torch is
# loaded. A thread that sleeps between two kernels must be woken for each one, which is slow on a
# virtual machine; a thread that spins takes the core from other processes. Measured with one int4
# row on two virtual cores, ms per token:
#
#     rounds                                       1,000   5,000   10,000   30,000   100,000
#     idle machine                                 40-54   23-52    24-30    23-26     23-27
#     beside a busy process on one of the cores    44-48   76-81   94-105  180-209   281-428
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
