"""How fast this machine is, for limits on processor time that hold on any machine."""

from __future__ import annotations

import gc
import json
import time

NOMINAL_S = 0.0015
"""Processor time of `_work` on a machine of nominal speed, an AMD EPYC that does nothing else."""

_ROUNDS = 5


def slowdown() -> float:
    """Processor time that a fixed piece of work takes now, relative to a machine of nominal speed.

    Limits in seconds are stated for the nominal machine; a test multiplies them by this. Call it in
    the test, next to what is measured: the speed depends on what else the machine does. The slowest
    of a few rounds counts, as limits are about the longest of many times. The garbage collector is
    off: a full collection in one round makes it 50 times as long.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return max(_measured_s() for _ in range(_ROUNDS)) / NOMINAL_S
    finally:
        if was_on:
            gc.enable()


def _measured_s() -> float:
    begun_s = time.thread_time()
    _work()
    return time.thread_time() - begun_s


def _work() -> None:
    """What servers do most: calls, small objects, dictionaries, text."""
    rows = [{"id": number, "text": f"row {number}", "parts": [number] * 3} for number in range(800)]
    texts = {row["id"]: row for row in json.loads(json.dumps(rows))}
    assert sum(len(texts[number]["text"]) for number in range(800)) > 0
