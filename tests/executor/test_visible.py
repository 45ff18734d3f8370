"""Which GPUs the engines of one machine find."""

from __future__ import annotations

import pytest
import torch

from bros.executor.target import set_visible_devices, visible_devices


@pytest.mark.parametrize(
    ("ranks", "shown", "count", "expected"),
    [
        (1, None, 4, [("0",), ("1",), ("2",)]),
        (2, None, 8, [("0", "1"), ("2", "3"), ("4", "5")]),
        (1, "5,3,GPU-a", 3, [("5",), ("3",), ("GPU-a",)]),
        (1, None, 2, [("0",), ("1",), ("0",)]),  # they share
        (2, None, 1, [("0",), ("0",), ("0",)]),  # too few for the ranks, which report it
        (2, None, 0, [(), (), ()]),
    ],
)
def test_each_replica_has_devices_of_its_own(
    ranks: int, shown: str | None, count: int, expected: list[tuple[str, ...]]
) -> None:
    assert [visible_devices(replica, ranks, shown, count) for replica in range(3)] == expected


def test_a_process_sees_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    set_visible_devices(1, 2, environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "6,7"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    set_visible_devices(1, 2, environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "6,7"}
