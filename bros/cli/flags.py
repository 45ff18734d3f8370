"""The command line as data: the commands, their own options, and the parser built from them.

The options of the engine and the server are the fields of core/config.py; several commands take
them. Each command's own options are a record here, with one field per option: the field `warm_up`
of BenchFlags is `bros bench --warm-up`. Values stay text until the command converts them with the
functions at the end of this file, whose errors name the flag.

This module imports little, so that --help is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from bros import __version__
from bros.bench.dialects import DIALECTS, Endpoint
from bros.bench.workloads.contents import NAMES
from bros.core.config import POLICIES, EngineConfig
from bros.core.config_sources import (
    FILE_FLAG,
    URL_VARIABLE,
    Option,
    add_flags,
    all_options,
    near_matches,
    options_of,
)
from bros.core.errors import ConfigError
from bros.simulator import REPLICA_ROWS, REPLICA_STEP_TOKENS

Record = TypeVar("Record")

_PREFIX = "own_"
"""Prefix of a command's own options in argparse's namespace; those of core/config.py have none."""


def flag(metavar: str, text: str, default: str | None = None, **more: Any) -> Any:
    """A field of a record: an option with a value. more: further arguments of add_argument."""
    return _option(default, text, metavar=metavar, **more)


def switch(text: str) -> Any:
    """A field of a record: an option without a value, False if it is not given."""
    return _option(False, text, action="store_true")


def argument(metavar: str, text: str) -> Any:
    """A field of a record: a value without a flag."""
    return _option("", text, metavar=metavar, positional=True)


def _option(default: Any, text: str, **arguments: Any) -> Any:
    metadata = {"help": text, **arguments}
    if isinstance(default, list):
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """`--warm-up`, from the name of a field."""
    return "--" + name.replace("_", "-")


def add_own(
    parser: argparse._ActionsContainer, record: type[Any], *names: str, **help_texts: str
) -> None:
    """Add the options of a record, or only `names`. help_texts: replace those of the fields."""
    for field in dataclasses.fields(record):
        if names and field.name not in names:
            continue
        arguments = dict(field.metadata)
        text: str = help_texts.get(field.name, field.metadata["help"])
        del arguments["help"]
        flags = [*arguments.pop("short", ()), flag_of(field.name)]
        if isinstance(field.default, str) and field.default:
            text += f" (default: {field.default})"
        if arguments.pop("positional", False):
            parser.add_argument(_PREFIX + field.name, help=text, **arguments)
            continue
        default = [] if field.default is dataclasses.MISSING else field.default
        parser.add_argument(
            *flags, dest=_PREFIX + field.name, default=default, help=text, **arguments
        )


def read_own(record: type[Record], args: argparse.Namespace) -> Record:
    """The parsed options as a record. Options that the action does not take keep their defaults."""
    return record(
        **{
            field.name: getattr(args, _PREFIX + field.name)
            for field in dataclasses.fields(record)  # type: ignore[arg-type]
            if hasattr(args, _PREFIX + field.name)
        }
    )


def changed_flags(record: Any) -> list[str]:
    """The options of a record that are not at their defaults."""
    return [
        flag_of(field.name)
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != field.default
    ]


RANGE_VALUES = 5
"""Number of rates that `low:high` stands for."""

# ---- The options of each command.

DEFAULT_URL = "http://127.0.0.1:8000"
_SERVER_URL = f"the server, with or without /v1 (default: {URL_VARIABLE}, else {DEFAULT_URL})"


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """`bros chat`."""

    url: str | None = flag(
        "URL", "talk to this OpenAI-compatible server (--api-key is sent if given)"
    )
    system: str | None = flag("TEXT", "system prompt")


@dataclass(frozen=True, slots=True)
class ProfileFlags:
    """`bros profile`."""

    out: str | None = flag(
        "DIR", "folder of profiles (default: profiles/ of the source tree, or of --data-dir)"
    )
    repeats: str = flag("N", "measurements of each step", "5")


@dataclass(frozen=True, slots=True)
class DoctorFlags:
    """`bros doctor`."""

    json: bool = switch("print it as JSON")


@dataclass(frozen=True, slots=True)
class AdminFlags:
    """The actions of `bros admin`."""

    number: str = argument("N", "number of the replica, as `bros admin replicas` shows it")
    move: bool = switch(
        "move its open requests to other replicas at once, which compute their prompts again"
    )
    restart: bool = switch("restart its engine once it is drained, and use it again")
    no_wait: bool = switch("return at once instead of waiting until it is drained")
    json: bool = switch("print the server's JSON")
    url: str | None = flag("URL", _SERVER_URL)


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """The actions of `bros batch`."""

    file: str = argument("FILE", "requests, one JSON object per line")
    id: str = argument("ID", "id of the batch, as submit printed it")
    endpoint: str | None = flag(
        "PATH", 'endpoint of the requests (default: the "url" of the first)'
    )
    window: str = flag(
        "TIME",
        "completion window in minutes, hours or days, such as 90m, 24h or 7d",
        "24h",
    )
    rt_slowdown: str | None = flag(
        "N", "target slowdown of real-time streams (default: that of the key or the server)"
    )
    metadata: list[str] = flag(
        "KEY=VALUE",
        "metadata to store with the batch; may be given several times",
        default=[],  # type: ignore[arg-type]
        action="append",
    )
    wait: bool = switch("show progress until the batch has ended")
    output: str | None = flag(
        "FILE", "write the responses to FILE (default: standard output)", short=("-o",)
    )
    errors: str | None = flag(
        "FILE",
        "write the errors of failed and unfinished rows to FILE (default: only count them)",
    )
    limit: str = flag("N", "maximum number of batches", "20")
    json: bool = switch("print the server's JSON")
    url: str | None = flag("URL", _SERVER_URL)


@dataclass(frozen=True, slots=True)
class RunBatchFlags:
    """`bros run-batch`."""

    input: str = argument("INPUT", "requests, one JSON object per line")
    target: str = argument("OUTPUT", "file for the responses")
    endpoint: str | None = flag(
        "PATH", 'endpoint of the requests (default: the "url" of the first)'
    )
    overwrite: bool = switch("process all requests again if OUTPUT exists, and replace it")


# ---- bros simulate

DEFAULT_POLICIES = "bros,priority,fcfs"
REPLICA_POLICY = "fcfs"
PROGRAM_POLICY = "bros"
DEFAULT_RT_RATE, PROGRAM_RT_RATE = "4", "1"
DEFAULT_PROFILE = "1x-h200/llama-3-8b-fp16"
REPLICA_PROFILE = "1x-a6000/mistral-7b-fp16"
RT_LENGTHS = ("lmsys", "sharegpt")
"""The keys of workload.RT_SIZES."""
MOONCAKE, AZURE = "mooncake", "azure"
RECORDED = (MOONCAKE, AZURE)
WORKLOADS = ("toolbench", "embodied", "programming", "video", "loogle", *RECORDED)
"""The keys of prefix_workloads.KINDS, and the recorded ones."""
POPULARITIES = ("even", "zipf", "dataset")
DEFAULT_ROUTERS = "e2,rr,least,oracle"
PROGRAM_NAMES = ("map-reduce", "chain", "coding", "copilot", "gpts")
"""The keys of simulator.programs.PROGRAMS."""
PROGRAM_WAYS = ("session", "calls")
"""simulator.program_simulation.WAYS."""
PROGRAM_ROUTERS = "e2"
MAX_REQUESTS = 64_000
MOONCAKE_RATE = 0.08
"""Requests per second and replica. It keeps an A6000 busy for two thirds of the time: prompts are
long, and its KV cache holds few of them. Even an unlimited cache would hit on only 37 % of the
prompt tokens of Mooncake's conversation trace, and on 17 % of those of its first 600 requests."""
AZURE_RATE = 1.5
"""Requests per second and replica."""


@dataclass(frozen=True, slots=True)
class SimulateFlags:
    """`bros simulate` with one replica; some options also apply to several."""

    policy: str | None = flag(
        "LIST",
        "comma-separated policies to compare (default: "
        f"{DEFAULT_POLICIES}; with --replicas {REPLICA_POLICY}; with --programs {PROGRAM_POLICY})",
    )
    rt_rate: str | None = flag(
        "RATES",
        "real-time requests per second: 4, or 1,2,4, or 1:15 for "
        f"{RANGE_VALUES} values from 1 to 15, or 1:15:2 in steps of 2 "
        f"(default: {DEFAULT_RT_RATE}; with --programs {PROGRAM_RT_RATE})",
    )
    rt_lengths: str = flag(
        "NAME", f"lengths of real-time requests: {', '.join(RT_LENGTHS)}", "lmsys"
    )
    trace: str | None = flag(
        "FILE",
        "real-time arrivals from a CSV file with the columns TIMESTAMP, "
        f"ContextTokens, GeneratedTokens, instead of --rt-rate; --workload {AZURE} takes two such "
        "files, CODE,CONVERSATIONS; "
        f"--workload {MOONCAKE} takes the JSON lines of a Mooncake trace",
    )
    trace_speed: str = flag("X", "play the trace X times as fast", "1")
    be: str = flag("N", "best-effort requests in flight", "16")
    duration: str = flag("SECONDS", "simulated time of each run", "600")
    warm_up: str = flag("SECONDS", "start of each run that is not measured", "0")
    noise: str = flag("X", "standard deviation of the logarithm of step times", "0")
    noise_correlation: str = flag(
        "X",
        "correlation of the noise of two steps in sequence; 0.8 on cores that others use, too",
        "0",
    )
    slowdown: str = flag("X", "actual step times are X times the predicted ones", "1")
    json: str | None = flag(
        "FILE", "write settings and results to FILE; after Ctrl-C those of the finished runs"
    )
    jobs: str | None = flag("N", "parallel runs (default: one per core)")
    be_batches: bool = switch(
        "submit best-effort requests in batches: the next N once all of the last N have finished"
    )


@dataclass(frozen=True, slots=True)
class ReplicasFlags:
    """Additional options of `bros simulate --replicas`."""

    replicas: str | None = flag(
        "LIST",
        "simulate several replicas behind a router: 4, or 1,2,8, or 1:1024 for 1, 2, 4, ... 1024",
    )
    router: str | None = flag(
        "LIST",
        f"routing policies to compare (default: {DEFAULT_ROUTERS}; "
        f"with --programs {PROGRAM_ROUTERS})",
    )
    workload: str = flag("NAME", f"{', '.join(WORKLOADS)} (the last two need --trace)", "toolbench")
    rate: str | None = flag(
        "X",
        "requests, or programs, per second over all replicas (default per replica: half the "
        f"paper's rate, which is for two; {MOONCAKE}: {MOONCAKE_RATE:g}; {AZURE}: {AZURE_RATE:g})",
    )
    requests: str | None = flag(
        "N",
        "requests, or programs, of each run (default: half the paper's number per replica, "
        f"at most {MAX_REQUESTS}; {MOONCAKE} and {AZURE}: the whole trace)",
    )
    families: str | None = flag(
        "N",
        "number of tools, environments, problems, videos or documents "
        "(default: as many per request as in the paper)",
    )
    popularity: str = flag("NAME", f"popularity of these: {', '.join(POPULARITIES)}", "even")
    be_requests: str = flag("X", "share of requests that are best-effort", "0")
    notice_delay: str = flag("MS", "delay of the reports of a replica to the router", "50")
    decision_time: str = flag("MS", "time that the router takes for one request", "0")


@dataclass(frozen=True, slots=True)
class ProgramsFlags:
    """Additional options of `bros simulate --programs`."""

    programs: str | None = flag(
        "LIST",
        "simulate programs of many calls beside chats, each of the list in runs of its own: "
        f"{', '.join(PROGRAM_NAMES)}",
    )
    run_as: str = flag(
        "LIST",
        "how programs are run: submitted to a session, or call by call by the client",
        ",".join(PROGRAM_WAYS),
    )
    network_delay: str = flag("MS", "network latency before each request of a client", "250")


_FROM_ENGINE = {
    "profile": "device and model: a file made by `bros profile`, or a name such as "
    f"{DEFAULT_PROFILE} (default; with --replicas {REPLICA_PROFILE}, unless with --programs)",
    "kv_blocks": "KV cache in blocks of 16 tokens (default: what the profile's device holds)",
    "max_model_len": "maximum prompt + output in tokens (default: what the KV cache holds)",
    "host_kv_blocks": "host pool for checkpointed KV in blocks of 16 tokens (default: as many as "
    "--kv-blocks; with --replicas or --programs 0)",
    "max_num_seqs": "maximum requests per step (default: 64; with --replicas or --programs "
    f"{REPLICA_ROWS})",
    "max_batch_tokens": "maximum tokens per step, longer prompts are chunked (default: 256; "
    f"with --replicas or --programs {REPLICA_STEP_TOKENS})",
    "max_queue": "maximum waiting requests per class before 429 (default: 512; with --replicas "
    "or --programs unlimited)",
    "seed": "seed of arrivals, lengths and noise (default: 0)",
}
_NOT_SIMULATED = (
    *("model", "weights", "kernels", "kv_dtype", "kv_memory", "host_kv_memory", "threads"),
    *("tp", "tp_timeout", "load_timeout", "hang_timeout"),
    *("policy", "prefix_cache", "rt_cache_share"),
    *("pooling", "tenant_weights", "tenant_rt_slowdowns"),
    *("device", "gpu_memory_utilization"),
    *("self_attention", "shared_attention", "cuda_graphs", "async_scheduling"),
)
ONE_ENGINE = (
    *("--rt-rate", "--rt-lengths", "--trace-speed", "--be", "--be-batches"),
    *("--duration", "--warm-up", "--noise", "--noise-correlation", "--slowdown"),
)
"""Options without effect on several replicas."""
NOT_FOR_PROGRAMS = (
    *("--be", "--be-batches", "--duration", "--warm-up"),
    *("--noise", "--noise-correlation", "--slowdown"),
    *("--workload", "--families", "--popularity", "--be-requests"),
    *("--notice-delay", "--decision-time"),
)
"""Options without effect on programs."""


# ---- bros bench

SCENARIOS = "S0,S1,S2,S3"


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """`bros bench`, besides the options of the servers that it starts."""

    policies: str = flag(
        "LIST", f"scheduling policies to compare: {', '.join(POLICIES)}", "fcfs,bros"
    )
    target: str | None = flag("URL", "measure this OpenAI-compatible server instead of bros")
    dialect: str = flag("NAME", f"API dialect of the target: {', '.join(DIALECTS)}", "bros")
    target_name: str | None = flag(
        "NAME", "name of the target in the report (default: the dialect)"
    )
    target_policy: str | None = flag("NAME", "scheduling policy of the target, for the report")
    target_model: str | None = flag("NAME", "model name in requests (default: the first it serves)")
    scenarios: str = flag(
        "LIST",
        "S0 real-time alone, S1 mixed and unprotected, "
        "S2 best-effort alone, S3 mixed and protected",
        SCENARIOS,
    )
    rates: str = flag(
        "RATES", "real-time requests per second: 0.5, or 0.1,0.3, or 0.1:0.5:0.1", "0.25"
    )
    rt: str = flag("NAME", f"real-time requests: {', '.join(NAMES)}", "lmsys")
    be: str = flag("NAME", "best-effort requests: the same names", "synthetic")
    in_flight: str = flag("N", "best-effort requests in flight", "16")
    be_as: str = flag(
        "NAME",
        "send best-effort load as requests (kept in flight) or as a batch, "
        "whose concurrency the server decides",
        "requests",
    )
    tenants: str | None = flag(
        "LIST",
        "tenants of --api-keys that share the load, e.g. ann=10,bob=1; the report says what "
        "each one got",
    )
    duration: str = flag("SECONDS", "duration of each run", "120")
    warm_up: str = flag("SECONDS", "start of each run that is not measured", "20")
    drain: str = flag(
        "SECONDS",
        "how long open requests may go on after each run, so that the last ones are judged too",
        "0",
    )
    longest_prompt: str | None = flag("N", "cut prompts of real-time requests to N tokens")
    burstiness: str = flag("X", "shape of arrivals: 1 is a Poisson process, less is burstier", "1")
    zipf: str = flag("X", "Zipf exponent of the popularity of shared prefixes; 0: uniform", "0")
    speed: str = flag("X", "play a trace X times as fast", "1")
    scale: str = flag("X", "multiply all lengths by X, at most 1", "1")
    endpoint: str = flag("NAME", " or ".join(Endpoint), Endpoint.COMPLETIONS.value)
    context: str | None = flag("N", "maximum tokens of prompt and output (default: ask the server)")
    capacity: str | None = flag(
        "SHARE",
        "search the highest of --rates (a range) at which this share of real-time "
        "requests, e.g. 0.99, meets both objectives",
    )
    out: str = flag("DIR", "folder for the report", "bench")
    report_only: str | None = flag(
        "DIR", "run nothing, only rewrite the report in DIR from its result.json"
    )
    natural: bool = switch("let responses end by themselves instead of forcing the planned length")
    skip_overlong: bool = switch(
        "leave out requests that do not fit the context instead of cutting them"
    )
    append: bool = switch(
        "add to the report in --out, e.g. another server; a run of the same scenario, "
        "server, policy and rate replaces the old one"
    )


# ---- The parser.

_SOURCES = (
    "Options of engine and server can also be set as environment variables (--max-num-seqs is "
    "BROS_MAX_NUM_SEQS) or in the TOML file given with --config (max_num_seqs = 64). "
    "Flags take precedence over variables, variables over the file."
)


@dataclass(frozen=True, slots=True)
class _Command:
    """The help texts of a command in `bros --help` and `bros NAME --help`."""

    name: str
    help: str
    usage: str
    description: str
    epilog: str = _SOURCES


_COMMANDS = (
    _Command(
        "serve",
        "start the OpenAI-compatible server",
        "bros serve [MODEL] [options]",
        "Serve one model over an OpenAI-compatible HTTP API.",
    ),
    _Command(
        "chat",
        "talk to a model in the terminal",
        "bros chat [MODEL] [--url URL] [--system TEXT] [options]",
        "Talk to a model in the terminal. It is loaded in this process, or served at --url.",
    ),
    _Command(
        "admin",
        "show the tenants and replicas of a running server, drain and resume replicas",
        "bros admin {tenants,replicas,drain,resume} ...",
        "Show what a server holds for each tenant. Show the replicas of a server that was started "
        "with --replicas, drain them and resume them. A server with tenants (--api-keys) requires "
        "the key of --api-key.",
        "Each action has its own --help.",
    ),
    _Command(
        "batch",
        "submit batches of requests to a running server and fetch their results",
        "bros batch {submit,status,list,cancel,results} ...",
        "Submit a file of requests to a running server, which processes them beside its real-time "
        "requests within a completion window. Works with any server that has OpenAI's batch API.",
        "Each action has its own --help, which also lists the exit statuses.",
    ),
    _Command(
        "run-batch",
        "process a file of requests without a server",
        "bros run-batch INPUT OUTPUT [--endpoint PATH] [options]",
        "Process the requests in INPUT, one JSON object per line as for `bros batch submit`, and "
        "write the response or the error of each to OUTPUT, in the same order. If the command is "
        "interrupted, running it again continues; until it has finished, the responses so far are "
        "in OUTPUT.partial. Exit status 3: some requests failed; 4: the input is invalid.",
    ),
    _Command(
        "profile",
        "measure step times on this machine (takes some minutes)",
        "bros profile [MODEL] [--out DIR] [--repeats N] [options]",
        "Measure the step times of one model on this machine, fit a cost model to them and store "
        "it as a profile, with a plot of the fit. Nothing else should be running.",
    ),
    _Command(
        "doctor",
        "show the hardware and test the kernels (takes some seconds)",
        "bros doctor [--json] [options]",
        "Show the hardware and software of this machine and what bros would use of it with these "
        "options, and test the kernels against the reference. The exit status is 0 if all works.",
    ),
    _Command(
        "bench",
        "measure a server under hybrid load",
        "bros bench [MODEL] [--policies LIST | --target URL] [--rates RATES] [options]",
        "Send real-time requests at random or recorded times and keep best-effort requests in "
        "flight beside them. Report the share of real-time requests that met their objectives and "
        "the best-effort throughput. Without --target, a bros server is started for each policy.",
    ),
    _Command(
        "simulate",
        "compare scheduling policies on a virtual clock",
        "bros simulate [--policy LIST] [--rt-rate RATES | --trace FILE] [--be N] [options]\n"
        "       bros simulate --replicas LIST [--router LIST] [--workload NAME] [--rate X] "
        "[options]\n"
        "       bros simulate --programs LIST [--replicas LIST] [--run-as LIST] [options]",
        "Run the scheduler on a virtual clock: a profile determines the step times, and nothing is "
        "computed. The same seed gives the same results on every machine.",
    ),
)
_TAKE_A_MODEL = ("serve", "chat", "profile", "bench")
_TAKE_ALL_OPTIONS = ("serve", "chat", "profile", "doctor", "run-batch", "bench")
_OWN: dict[str, tuple[type[Any], ...]] = {
    "chat": (ChatFlags,),
    "profile": (ProfileFlags,),
    "doctor": (DoctorFlags,),
    "admin": (AdminFlags,),
    "batch": (BatchFlags,),
    "run-batch": (RunBatchFlags,),
    "bench": (BenchFlags,),
    "simulate": (SimulateFlags, ReplicasFlags, ProgramsFlags),
}

_BATCH_EXIT_STATUSES = """\
exit status:
  0    success; when waiting for a batch or fetching its results: every row
       succeeded
  1    an error: the server cannot be reached, refuses, or has no such batch
  2    wrong usage
  3    the batch has ended, but some of its rows failed
  4    the batch failed validation, expired or was cancelled
  130  Ctrl-C; a submitted batch continues
"""
_SUBMIT = """\
Upload a file of requests, one JSON object per line, and start a batch:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Only the id of the batch is written to standard output; messages go to standard
error.
"""
_RESULTS = """\
Fetch the responses of a batch that is completed, expired or cancelled. They are
not in the order of the input: match them by custom_id.
"""
_DRAIN = (
    "Stop routing requests to a replica, and wait until it has no open requests. Ctrl-C only stops "
    "waiting. `bros admin resume` puts the replica back into use."
)


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for invalid arguments."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `bros`; it raises ConfigError for invalid arguments."""
    parser = _Parser(
        prog="bros",
        description="LLM inference engine that serves real-time and best-effort requests together.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"bros {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        added = commands.add_parser(
            command.name,
            help=command.help,
            usage=command.usage,
            description=command.description,
            epilog=command.epilog,
            allow_abbrev=False,
        )
        add_arguments(command.name, added)
    commands.add_parser("version", help="print the versions of bros and what it runs on")
    return parser


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Add all arguments of a command."""
    if command in _TAKE_A_MODEL:
        parser.add_argument(
            "model_argument", metavar="MODEL", nargs="?", help="the same as --model"
        )
    if command == "admin":
        _add_admin_actions(parser)
    elif command == "batch":
        _add_batch_actions(parser)
    elif command == "simulate":
        _add_simulate_options(parser)
    elif command == "bench":
        add_own(parser.add_argument_group("measurement"), BenchFlags)
    else:
        for record in _OWN.get(command, ()):
            add_own(parser, record)
    if command in _TAKE_ALL_OPTIONS:
        add_flags(parser)


def unknown_argument(argument: str, command: str | None) -> ConfigError:
    """The error for an unknown argument, with similar options."""
    name = argument.split("=")[0]
    if not name.startswith("-"):
        return ConfigError(f"unexpected argument {name!r}")
    records = _OWN.get(command or "", ())
    known = [flag_of(field.name) for record in records for field in dataclasses.fields(record)]
    if command is None or command in _TAKE_ALL_OPTIONS:
        known += [*(option.flag for option in all_options()), FILE_FLAG]
    elif command == "simulate":
        known += [*(option.flag for option in _simulated_options()), FILE_FLAG]
    else:
        known += ["--api-key"]
    return ConfigError(f"{name}: there is no such option{near_matches(name, known)}")


def _add_admin_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="admin_action", metavar="ACTION", prog="bros admin", required=True
    )

    def add(name: str, help_line: str, description: str, *own: str) -> None:
        action = actions.add_parser(
            name, help=help_line, description=description, allow_abbrev=False
        )
        add_own(action, AdminFlags, *own, "url")
        _add_api_key(action)

    add(
        "tenants",
        "show what is held for each tenant",
        "Show what the server holds for each tenant, its limits, and how often they refused more.",
        "json",
    )
    add("replicas", "show the replicas", "Show the state and load of each replica.", "json")
    add(
        "drain",
        "stop routing requests to a replica",
        _DRAIN,
        *("number", "move", "restart", "no_wait"),
    )
    add("resume", "put a replica back into use", "Route requests to a replica again.", "number")


def _add_batch_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="batch_action", metavar="ACTION", prog="bros batch", required=True
    )

    def add(name: str, help_line: str, description: str, *own: str, **help_texts: str) -> None:
        action = actions.add_parser(
            name,
            help=help_line,
            description=description,
            epilog=_BATCH_EXIT_STATUSES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_own(action, BatchFlags, *own, "url", **help_texts)
        _add_api_key(action)

    add(
        "submit",
        "upload a file of requests and start a batch",
        _SUBMIT,
        *("file", "endpoint", "window", "rt_slowdown", "metadata", "wait", "output"),
        output="write the responses to FILE; requires --wait",
    )
    add(
        "status",
        "show the progress of a batch",
        "Show the progress of a batch and when it is expected to end.",
        *("id", "wait", "json"),
    )
    add(
        "list",
        "list the server's batches",
        "List batches, newest first.",
        *("limit", "json"),
        json="print the server's JSON, an array of batches",
    )
    add(
        "cancel",
        "cancel the unfinished rows of a batch",
        "Cancel a batch. Results of finished rows are kept and can be fetched.\n",
        *("id", "wait"),
        wait="show progress until it is cancelled",
    )
    add(
        "results",
        "fetch the results of a batch that has ended",
        _RESULTS,
        *("id", "output", "errors"),
    )


def _add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        dest="api_key",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="API key, sent as a bearer token (BROS_API_KEY)",
    )


def _add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bros simulate`, and those of the engine that a simulation supports."""
    parser.add_argument(FILE_FLAG, metavar="FILE", default=argparse.SUPPRESS, help="TOML file")
    add_own(parser, SimulateFlags)
    add_own(parser.add_argument_group("several replicas"), ReplicasFlags)
    add_own(parser.add_argument_group("programs"), ProgramsFlags)
    group = parser.add_argument_group("engine options")
    for option in _simulated_options():
        choices = option.field.metadata.get("choices")
        metavar = "FILE|NAME" if option.name == "profile" else "N"
        group.add_argument(
            option.flag,
            dest=option.name,
            default=argparse.SUPPRESS,
            metavar="{" + ",".join(choices) + "}" if choices else metavar,
            help=_FROM_ENGINE.get(option.name) or option.help(),
        )


def _simulated_options() -> Sequence[Option]:
    return [o for o in options_of(EngineConfig) if o.name not in _NOT_SIMULATED]


# ---- Parsing the values of options.

_MAX_RATES = 1000
_TOO_FAST = 1e6  # requests per second, which no run can send


def rates(flag: str, text: str) -> list[float]:
    """`4`, `1,2,4`, `1:15` (5 values, evenly spaced) or `1:15:2` (in steps of 2, ends included).

    Raises ConfigError.
    """
    if ":" not in text:
        return [number(flag, part, low=0, below=_TOO_FAST) for part in text.split(",")]
    parts = [number(flag, part, low=0, below=_TOO_FAST) for part in text.split(":")]
    if len(parts) > 3 or parts[0] >= parts[1] or (len(parts) == 3 and parts[2] == 0):
        raise ConfigError(f"{flag}: {text!r} is not a range; write 1:15 or 1:15:2")
    low, high = parts[:2]
    step = parts[2] if len(parts) == 3 else (high - low) / (RANGE_VALUES - 1)
    steps = (high - low) / step if step else math.inf
    if steps >= _MAX_RATES:
        raise ConfigError(f"{flag}: {text!r} are more than {_MAX_RATES} rates")
    return [round(low + i * step, 9) for i in range(int(steps + 1e-9) + 1)]


def doublings(flag: str, text: str, most: int) -> list[int]:
    """`4`, `1,2,8` or `1:1024` (doubling from the first one).

    Raises ConfigError for anything but whole numbers from 1 to `most`.
    """
    parts = [whole(flag, part, low=1) for part in text.replace(":", ",").split(",")]
    if max(parts) > most:
        raise ConfigError(f"{flag}: {max(parts)} must be at most {most}")
    if ":" not in text:
        return list(dict.fromkeys(parts))
    if len(parts) != 2 or parts[0] > parts[1]:
        raise ConfigError(f"{flag}: {text!r} is not a range; write 1:1024")
    found = [parts[0]]
    while 2 * found[-1] <= parts[1]:
        found.append(2 * found[-1])
    return found


def optional_whole(flag: str, text: str | None) -> int | None:
    """A whole number of at least 1, or None. Raises ConfigError."""
    return None if text is None else whole(flag, text, low=1)


def names(flag: str, text: str, known: Sequence[str], most: int | None = None) -> tuple[str, ...]:
    """`fcfs,bros` without repetitions, at most `most`. Raises ConfigError for unknown names."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in found:
        if name not in known:
            near = near_matches(name, known)
            raise ConfigError(f"{flag}: {name!r} is not one of {', '.join(known)}{near}")
    if most is not None and len(found) > most:
        raise ConfigError(f"{flag}: takes one of {', '.join(known)}, not {len(found)}")
    return found


def number(
    flag: str,
    text: str,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """A finite number: at least `low`, above `above`, below `below`. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a number") from None
    if not value < float("inf"):
        raise ConfigError(f"{flag}: {text!r} is not a finite number")
    if low is not None and value < low:
        raise ConfigError(f"{flag}: {text} must be at least {low:g}")
    if above is not None and value <= above:
        raise ConfigError(f"{flag}: {text} must be more than {above:g}")
    if below is not None and value >= below:
        raise ConfigError(f"{flag}: {text} must be less than {below:g}")
    return value


def whole(flag: str, text: str, low: int) -> int:
    """A whole number of at least `low`. Raises ConfigError."""
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a whole number") from None
    if value < low:
        raise ConfigError(f"{flag}: {value} must be at least {low}")
    return value
