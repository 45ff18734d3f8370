"""Weights, KV memory and the forward pass. Runs step plans, decides nothing."""

from __future__ import annotations

import os

# How long an idle OpenMP thread spins before it sleeps; libgomp reads it when torch is loaded.
# Its default suits a machine with nothing else to do: with one more busy process on two cores a
# decode step took 940 ms instead of 26. A thousand rounds cost next to nothing on an idle one.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
