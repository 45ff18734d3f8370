"""The options of `bros simulate`. Imports next to nothing, so that --help is quick."""

from __future__ import annotations

import argparse

from bros.core.config import EngineConfig
from bros.core.config_sources import FILE_FLAG, options_of
from bros.core.flag_values import RANGE_VALUES

DESCRIPTION = (
    "Run the scheduler on a virtual clock: requests come as they would, steps take the time that "
    "a profile says, nothing is computed. The same seed gives the same result everywhere."
)
HELP = "compare scheduling policies on a virtual clock"
USAGE = "bros simulate [--policy LIST] [--rt-rate RATES | --trace FILE] [--be N] [options]"
DEFAULT_POLICIES = "bros,priority,fcfs"
DEFAULT_PROFILE = "1x-h200/llama-3-8b-fp16"
RT_LENGTHS = ("lmsys", "sharegpt")
"""The keys of workload.RT_SIZES."""

_OWN = (  # flag, metavar, default, help
    ("--policy", "LIST", DEFAULT_POLICIES, "policies to compare, with commas between them"),
    ("--rt-rate", "RATES", "4", "real-time requests per second: 4, or 1,2,4, or 1:15 for "
     f"{RANGE_VALUES} values from 1 to 15, or 1:15:2 in steps of 2"),
    ("--rt-lengths", "NAME", "lmsys", f"lengths of real-time requests: {', '.join(RT_LENGTHS)}"),
    ("--trace", "FILE", None, "real-time arrivals from a CSV file with the columns TIMESTAMP, "
     "ContextTokens, GeneratedTokens, instead of --rt-rate"),
    ("--trace-speed", "X", "1", "play the trace X times as fast"),
    ("--be", "N", "16", "best-effort requests in flight"),
    ("--duration", "SECONDS", "600", "simulated time of each run"),
    ("--warm-up", "SECONDS", "0", "beginning of each run that the figures leave out"),
    ("--noise", "X", "0", "steps vary: standard deviation of the logarithm of their time"),
    ("--slowdown", "X", "1", "steps take X times as long as the scheduler is told"),
    ("--json", "FILE", None, "write settings and results there"),
    ("--jobs", "N", None, "runs at the same time (default: all cores)"),
)  # fmt: skip
_FROM_ENGINE = {
    "profile": "device and model: a file made by `bros profile`, or a name such as "
    f"{DEFAULT_PROFILE} (default)",
    "kv_blocks": "KV cache in blocks of 16 tokens (default: what the profile's device holds)",
    "max_model_len": "longest prompt + output in tokens (default: what the KV cache holds)",
    "max_num_seqs": "most requests in one iteration (default: 64)",
    "max_batch_tokens": "most tokens in one iteration, longer prompts are split (default: 256)",
    "seed": "seed of arrivals, lengths and noise (default: 0)",
}
_NOT_SIMULATED = (
    *("model", "weights", "kernels", "kv_dtype", "kv_memory", "host_kv_memory", "threads"),
    *("tp", "tp_timeout"),
    *("policy", "prefix_cache", "rt_cache_share"),
    *("device", "gpu_memory_utilization"),
    *("self_attention", "shared_attention", "cuda_graphs", "async_scheduling"),
)
FLAGS = (
    FILE_FLAG,
    "--be-batches",
    *(flag for flag, *_ in _OWN),
    *(o.flag for o in options_of(EngineConfig) if o.name not in _NOT_SIMULATED),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bros simulate`: its own, and the engine's that mean something here."""
    parser.add_argument(FILE_FLAG, metavar="FILE", default=argparse.SUPPRESS, help="TOML file")
    for flag, metavar, default, text in _OWN:
        shown = f"{text} (default: {default})" if default is not None else text
        parser.add_argument(flag, metavar=metavar, default=default, help=shown, dest=_dest(flag))
    parser.add_argument(
        "--be-batches",
        action="store_true",
        help="the next best-effort requests follow when all of the last ones have finished",
    )
    group = parser.add_argument_group("engine options")
    for option in options_of(EngineConfig):
        if option.name not in _NOT_SIMULATED:
            choices = option.field.metadata.get("choices")
            metavar = "FILE|NAME" if option.name == "profile" else "N"
            group.add_argument(
                option.flag,
                dest=option.name,
                default=argparse.SUPPRESS,
                metavar="{" + ",".join(choices) + "}" if choices else metavar,
                help=_FROM_ENGINE.get(option.name) or option.help(),
            )


def _dest(flag: str) -> str:
    return "simulate_" + flag.removeprefix("--").replace("-", "_")
