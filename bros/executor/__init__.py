"""Weights, KV memory and the forward pass: runs the plans that the scheduler makes."""

from __future__ import annotations

import os

# How many rounds an idle OpenMP thread of torch spins before it sleeps; libgomp reads this when
# torch is loaded. By default it spins for milliseconds, and takes its core from the threads of the
# kernels (csrc/team.cpp), of which it knows nothing. Encoders, which compute with both in turns,
# embed as many texts per second with 100 as with 5,000 rounds; the default was not measured.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
