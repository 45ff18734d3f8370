"""Which GPUs an engine finds, where there are several engines on a machine."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

_SHOWN = "CUDA_VISIBLE_DEVICES"


def show_devices_of(replica: int, ranks: int, environ: MutableMapping[str, str]) -> None:
    """Let this process find the devices of one replica only. Before CUDA is used for anything.

    environ: of this process.
    """
    # Asks the driver's library, and does not start CUDA.
    devices = devices_of(replica, ranks, environ.get(_SHOWN), torch.cuda.device_count())
    if devices:
        environ[_SHOWN] = ",".join(devices)


def devices_of(replica: int, ranks: int, shown: str | None, count: int) -> tuple[str, ...]:
    """The names of a device for each rank, as CUDA_VISIBLE_DEVICES has them.

    shown: what it says now. count: devices there are of those. If that is not enough for all
    replicas, they share.
    """
    names = shown.split(",")[:count] if shown else [str(number) for number in range(count)]
    mine = [names[(replica * ranks + rank) % count] for rank in range(ranks if count else 0)]
    return tuple(dict.fromkeys(mine))
