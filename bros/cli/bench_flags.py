"""The options of `bros bench`. Imports next to nothing, so that --help is quick."""

from __future__ import annotations

import argparse

from bros.bench.dialects import DIALECTS, Endpoint
from bros.bench.workloads.contents import NAMES
from bros.core.config import POLICIES
from bros.core.config_sources import add_flags

DESCRIPTION = (
    "Send real-time requests at their times and keep best-effort requests in flight beside them, "
    "and say how many of the former met their objectives and how much of the latter got done. "
    "Without --target, a bros server is started here for each policy."
)
HELP = "measure what hybrid load a server carries within its objectives"
USAGE = "bros bench [MODEL] [--policies LIST | --target URL] [--rates RATES] [options]"
SCENARIOS = "S0,S1,S2,S3"

_OWN = (  # flag, metavar, default, help
    ("--policies", "LIST", "fcfs,bros", f"policies to compare, of {', '.join(POLICIES)}"),
    ("--target", "URL", None, "measure this OpenAI-compatible server instead"),
    ("--dialect", "NAME", "bros", f"what the target understands: {', '.join(DIALECTS)}"),
    ("--target-name", "NAME", None, "what the report calls the target (default: the dialect)"),
    ("--target-policy", "NAME", None, "the policy it runs, for the report"),
    ("--target-model", "NAME", None, "model name in requests (default: the first it serves)"),
    ("--scenarios", "LIST", SCENARIOS, "S0 real-time alone, S1 mixed and unprotected, "
     "S2 best-effort alone, S3 mixed and protected"),
    ("--rates", "RATES", "0.25", "real-time requests per second: 0.5, or 0.1,0.3, or 0.1:0.5:0.1"),
    ("--rt", "NAME", "lmsys", f"real-time requests: {', '.join(NAMES)}"),
    ("--be", "NAME", "synthetic", "best-effort requests: the same names"),
    ("--in-flight", "N", "16", "best-effort requests in flight"),
    ("--be-as", "NAME", "requests", "requests that are kept in flight, or batch: rows of a batch, "
     "of which the server runs as many at a time as it likes"),
    ("--duration", "SECONDS", "120", "of each run"),
    ("--warm-up", "SECONDS", "20", "at the beginning of each run that do not count"),
    ("--longest-prompt", "N", None, "cut prompts of real-time requests to N tokens"),
    ("--burstiness", "X", "1", "of arrivals: 1 is a Poisson process, less comes in bursts"),
    ("--zipf", "X", "0", "how unequally popular shared prefixes are; 0: all the same"),
    ("--speed", "X", "1", "play a trace X times as fast"),
    ("--scale", "X", "1", "multiply all lengths by X, at most 1"),
    ("--endpoint", "NAME", Endpoint.COMPLETIONS.value, " or ".join(Endpoint)),
    ("--context", "N", None, "most tokens of prompt and answer (default: the server says)"),
    ("--capacity", "SHARE", None, "also search the highest of --rates (a range) at which this "
     "share of real-time requests, e.g. 0.99, meets both objectives"),
    ("--out", "DIR", "bench", "folder for the report"),
    ("--report-only", "DIR", None, "run nothing: write the report in DIR anew from its "
     "result.json"),
)  # fmt: skip
_SWITCHES = (
    ("--natural", "let answers end by themselves instead of after the planned tokens"),
    ("--skip-overlong", "leave out requests that do not fit the context instead of cutting them"),
    (
        "--append",
        "add to the report that is in --out, e.g. of another server; a run of the "
        "same scenario, server, policy and rate takes the place of the old one",
    ),
)
FLAGS = (*(flag for flag, *_ in _OWN), *(flag for flag, _ in _SWITCHES))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bros bench`: its own, and those of the servers it starts."""
    own = parser.add_argument_group("what is measured")
    for flag, metavar, default, text in _OWN:
        shown = f"{text} (default: {default})" if default is not None else text
        own.add_argument(flag, metavar=metavar, default=default, help=shown, dest=_dest(flag))
    for flag, text in _SWITCHES:
        own.add_argument(flag, action="store_true", help=text, dest=_dest(flag))
    add_flags(parser)


def _dest(flag: str) -> str:
    return "bench_" + flag.removeprefix("--").replace("-", "_")
