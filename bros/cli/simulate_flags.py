"""The options of `bros simulate`. Imports next to nothing, so that --help is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bros.cli.flags import RANGE_VALUES
from bros.core.config import EngineConfig
from bros.core.config_sources import FILE_FLAG, options_of

DESCRIPTION = (
    "Run the scheduler on a virtual clock: requests come as they would, steps take the time that "
    "a profile says, nothing is computed. The same seed gives the same result everywhere."
)
HELP = "compare scheduling policies on a virtual clock"
USAGE = (
    "bros simulate [--policy LIST] [--rt-rate RATES | --trace FILE] [--be N] [options]\n"
    "       bros simulate --replicas LIST [--router LIST] [--workload NAME] [--rate X] [options]"
)
DEFAULT_POLICIES = "bros,priority,fcfs"
REPLICA_POLICY = "fcfs"
DEFAULT_PROFILE = "1x-h200/llama-3-8b-fp16"
REPLICA_PROFILE = "1x-a6000/mistral-7b-fp16"
RT_LENGTHS = ("lmsys", "sharegpt")
"""The keys of workload.RT_SIZES."""
MOONCAKE, AZURE = "mooncake", "azure"
RECORDED = (MOONCAKE, AZURE)
WORKLOADS = ("toolbench", "embodied", "programming", "video", "loogle", *RECORDED)
"""The keys of prefix_workloads.KINDS, and recorded ones."""
POPULARITIES = ("even", "zipf", "dataset")
DEFAULT_ROUTERS = "e2,rr,least,oracle"
MOST_REQUESTS = 64_000
MOONCAKE_RATE = 0.08
"""Per replica: an A6000 is busy for two thirds of the time, as these prompts are long and its KV
cache has few of them. Even an endless one would have 37 % of their tokens in Mooncake's trace of
conversations, and 17 % of the first 600 requests'."""
AZURE_RATE = 1.5
"""Per replica."""
REPLICA_ROWS, REPLICA_STEP_TOKENS = 256, 512
"""Most requests and tokens of an iteration, as in the paper's engines."""

_Flag = tuple[str, str, str | None, str]
_OWN: tuple[_Flag, ...] = (  # flag, metavar, default, help
    ("--policy", "LIST", None, "policies to compare, with commas between them (default: "
     f"{DEFAULT_POLICIES}; with --replicas {REPLICA_POLICY})"),
    ("--rt-rate", "RATES", "4", "real-time requests per second: 4, or 1,2,4, or 1:15 for "
     f"{RANGE_VALUES} values from 1 to 15, or 1:15:2 in steps of 2"),
    ("--rt-lengths", "NAME", "lmsys", f"lengths of real-time requests: {', '.join(RT_LENGTHS)}"),
    ("--trace", "FILE", None, "real-time arrivals from a CSV file with the columns TIMESTAMP, "
     f"ContextTokens, GeneratedTokens, instead of --rt-rate; for --workload {AZURE}: two of "
     "them, of code and of conversations, with a comma between them; for "
     f"{MOONCAKE}: JSON lines of a Mooncake trace"),
    ("--trace-speed", "X", "1", "play the trace X times as fast"),
    ("--be", "N", "16", "best-effort requests in flight"),
    ("--duration", "SECONDS", "600", "simulated time of each run"),
    ("--warm-up", "SECONDS", "0", "beginning of each run that the figures leave out"),
    ("--noise", "X", "0", "steps vary: standard deviation of the logarithm of their time"),
    ("--slowdown", "X", "1", "steps take X times as long as the scheduler is told"),
    ("--json", "FILE", None, "write settings and results there"),
    ("--jobs", "N", None, "runs at the same time (default: all cores)"),
)  # fmt: skip
_OF_REPLICAS: tuple[_Flag, ...] = (
    ("--replicas", "LIST", None, "simulate several replicas behind a router: 4, or 1,2,8, or "
     "1:1024 for 1, 2, 4, ... 1024"),
    ("--router", "LIST", DEFAULT_ROUTERS, "how requests are routed"),
    ("--workload", "NAME", "toolbench", f"{', '.join(WORKLOADS)} (the last two need --trace)"),
    ("--rate", "X", None, "requests per second, all replicas (default: half the paper's for each "
     f"replica, whose experiments had two; {MOONCAKE}: {MOONCAKE_RATE:g} for each, "
     f"{AZURE}: {AZURE_RATE:g})"),
    ("--requests", "N", None, "requests of each run (default: half the paper's for each replica, "
     f"but {MOST_REQUESTS} at most; {MOONCAKE} and {AZURE}: the whole trace)"),
    ("--families", "N", None, "how many tools, environments, problems, videos or documents "
     "(default: as many for so many requests as in the paper)"),
    ("--popularity", "NAME", "even", f"how requests choose among these: {', '.join(POPULARITIES)}"),
    ("--be-requests", "X", "0", "share of requests that are best-effort"),
    ("--notice-delay", "MS", "50", "until the router hears what a replica says"),
    ("--decision-time", "MS", "0", "what the router takes for one request"),
)  # fmt: skip
_FROM_ENGINE = {
    "profile": "device and model: a file made by `bros profile`, or a name such as "
    f"{DEFAULT_PROFILE} (default; with --replicas {REPLICA_PROFILE})",
    "kv_blocks": "KV cache in blocks of 16 tokens (default: what the profile's device holds)",
    "max_model_len": "longest prompt + output in tokens (default: what the KV cache holds)",
    "host_kv_blocks": "copies of KV on the host in blocks of 16 tokens (default: as many as "
    "--kv-blocks; with --replicas 0)",
    "max_num_seqs": f"most requests in one iteration (default: 64; with --replicas {REPLICA_ROWS})",
    "max_batch_tokens": "most tokens in one iteration, longer prompts are split (default: 256; "
    f"with --replicas {REPLICA_STEP_TOKENS})",
    "max_queue": "most waiting requests per class before 429 (default: 512; with --replicas all "
    "may wait)",
    "seed": "seed of arrivals, lengths and noise (default: 0)",
}
_NOT_SIMULATED = (
    *("model", "weights", "kernels", "kv_dtype", "kv_memory", "host_kv_memory", "threads"),
    *("tp", "tp_timeout"),
    *("policy", "prefix_cache", "rt_cache_share"),
    *("device", "gpu_memory_utilization"),
    *("self_attention", "shared_attention", "cuda_graphs", "async_scheduling"),
)
ONE_ENGINE = (
    *("--rt-rate", "--rt-lengths", "--trace-speed", "--be", "--be-batches"),
    *("--duration", "--warm-up", "--noise", "--slowdown"),
)
"""What several replicas have no use for."""
OF_REPLICAS = tuple(flag for flag, *_ in _OF_REPLICAS)
FLAGS = (
    FILE_FLAG,
    "--be-batches",
    *(flag for flag, *_ in _OWN),
    *OF_REPLICAS,
    *(o.flag for o in options_of(EngineConfig) if o.name not in _NOT_SIMULATED),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bros simulate`: its own, and the engine's that mean something here."""
    parser.add_argument(FILE_FLAG, metavar="FILE", default=argparse.SUPPRESS, help="TOML file")
    _add(parser, _OWN)
    parser.add_argument(
        "--be-batches",
        action="store_true",
        help="the next best-effort requests follow when all of the last ones have finished",
    )
    _add(parser.add_argument_group("several replicas"), _OF_REPLICAS)
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


def changed_flags(args: argparse.Namespace) -> list[str]:
    """Those of the command's own flags that are not at their defaults."""
    own = [(flag, default) for flag, _, default, _ in (*_OWN, *_OF_REPLICAS)]
    given = [flag for flag, default in own if getattr(args, _dest(flag)) != default]
    return [*given, *(["--be-batches"] if args.be_batches else [])]


def _add(group: argparse._ActionsContainer, flags: Sequence[_Flag]) -> None:
    for flag, metavar, default, text in flags:
        shown = f"{text} (default: {default})" if default is not None else text
        group.add_argument(flag, metavar=metavar, default=default, help=shown, dest=_dest(flag))


def _dest(flag: str) -> str:
    return "simulate_" + flag.removeprefix("--").replace("-", "_")
