"""Contents by the names that users write.

lmsys, sharegpt, synthetic                             BROS Table 2
toolbench, embodied, programming, video, loogle        Preble Table 1
multiturn                                              chats whose prompts grow
azure:FILE, mooncake:FILE, burstgpt:FILE               traces
sharegpt:FILE                                          real text
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bros.bench.workloads.contents import (
    CHATS,
    FILES,
    NAMES,
    SHARED_PREFIX,
    Chats,
    Content,
    chats,
    documents,
    preble,
)
from bros.bench.workloads.loops import RecordedArrivals
from bros.bench.workloads.recorded import (
    Encoder,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_sharegpt,
)
from bros.core.errors import ConfigError
from bros.simulator.lengths import Uniform
from bros.simulator.workload import RT_SIZES


class Found(NamedTuple):
    """arrivals: as recorded, for traces. notes: for people, what was left out of a file."""

    content: Content
    arrivals: RecordedArrivals | None = None
    notes: tuple[str, ...] = ()


def find(
    name: str, *, seed: int, requests: int, tokenizer: Encoder | None = None, zipf: float = 0.0
) -> Found:
    """The content called `name`, one of NAMES with a path for FILE.

    requests: about so many will be sent; decides how many groups share prefixes, and how much
    of a file of real text is read. zipf: how unequally popular groups are. tokenizer: needed
    for real text. Raises ConfigError for other names and files that cannot be used.
    """
    kind, colon, path = name.partition(":")
    if colon and kind in FILES:
        return _from_file(kind, Path(path), seed, requests, tokenizer)
    if name in CHATS:
        return Found(chats(name))
    if name == "synthetic":
        return Found(documents())
    if name in SHARED_PREFIX:
        return Found(preble(name, requests, zipf))
    if name == "multiturn":
        return Found(multiturn())
    raise ConfigError(f"there is no workload {name!r}; there are {', '.join(NAMES)}")


def multiturn() -> Chats:
    """2 to 6 turns with the lengths of LMSYS chats, 10 s apart, after a common text."""
    sizes = RT_SIZES["lmsys"]
    return Chats(
        "multiturn", Uniform(2, 6), sizes.prompt, sizes.output, system_tokens=100, think_s=10.0
    )


def _from_file(kind: str, path: Path, seed: int, requests: int, tokenizer: Encoder | None) -> Found:
    if kind == "sharegpt":
        if tokenizer is None:
            raise ConfigError(f"sharegpt:{path} needs the model's tokenizer")
        read = read_sharegpt(path, tokenizer, seed=seed, take=max(1, requests))
        left_out = f"{path.name}: left out {read.too_short} too short, {read.too_long} too long"
        if read.without_question:
            left_out += f", {read.without_question} without an answered question"
        return Found(read.content, notes=(left_out,))
    readers = {"azure": read_azure, "mooncake": read_mooncake, "burstgpt": read_burstgpt}
    trace = readers[kind](path)
    notes = (f"{path.name}: left out {trace.skipped} failed requests",) if trace.skipped else ()
    return Found(trace.content, trace.arrivals, notes)
