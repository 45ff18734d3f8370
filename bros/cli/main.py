"""The command line: bros serve, admin, batch, chat, profile, doctor, simulate, bench, version."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import metadata
from typing import NoReturn

from bros import __version__
from bros.cli import admin_flags, batch_flags, bench_flags, simulate_flags
from bros.core.clock import SystemClock
from bros.core.config import Config
from bros.core.config_sources import (
    add_flags,
    all_options,
    given_flags,
    load_config,
    near_matches,
)
from bros.core.errors import BrosError, ConfigError
from bros.core.place import Place, torchrun_place, with_ranks
from bros.engine.parent import end_with_parent

DESCRIPTION = "LLM inference engine that serves real-time and best-effort requests together."
SOURCES = (
    "Every option can also be set as an environment variable (--max-num-seqs is "
    "BROS_MAX_NUM_SEQS) or in the TOML file given with --config (max_num_seqs = 64). "
    "Flags win over variables, variables over the file."
)
_SERVE = (  # help, usage, description
    "start the OpenAI-compatible server",
    "bros serve [MODEL] [options]",
    "Serve one model over an OpenAI-compatible HTTP API.",
)
_CHAT = (
    "talk to a model in the terminal",
    "bros chat [MODEL] [--url URL] [--system TEXT] [options]",
    "Talk to a model in the terminal: loaded here, or behind --url.",
)
_PROFILE = (
    "measure how long steps take on this machine, for some minutes",
    "bros profile [MODEL] [--out DIR] [--repeats N] [options]",
    "Measure how long steps of one model take on this machine and store a model "
    "of that with a picture of how well it fits. Have nothing else running.",
)
_DOCTOR = (
    "say what this machine has and test the kernels on it, for some seconds",
    "bros doctor [--json] [options]",
    "Say what this machine has to compute with, what bros would use of it with these options, and "
    "test that against the reference. The exit status is 0 if all of it works.",
)
_COMMAND_FLAGS = ("--url", "--system", "--out", "--repeats", "--json")
INTERRUPTED = 130
"""What shells expect from a program ended by Ctrl-C."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a wrong option, 1 for other errors."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _run(arguments, os.environ if environ is None else environ)
    except ConfigError as error:
        return _fail(error, status=2)
    except BrosError as error:
        return _fail(error, status=1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown_arguments(unknown, args.command))
    if args.command is None:
        parser.print_help()
        return 0
    if args.command == "version":
        print(_versions())
        return 0
    if args.command == "simulate":
        # Late: its imports take a moment, and --help must not.
        from bros.cli.simulate import run_simulate

        return run_simulate(args, environ, _warn, SystemClock())
    if args.command == "bench":
        # Late, for the same reason.
        from bros.cli.bench import run_bench

        return run_bench(args, environ, _warn, SystemClock())
    if args.command == "batch":
        # Late, for the same reason.
        from bros.cli.batch import run_batch

        return run_batch(args, environ, _warn, SystemClock())
    if args.command == "admin":
        # Late, for the same reason.
        from bros.cli.admin import run_admin

        return run_admin(args, environ, _warn)
    return _run_model(args, arguments, environ)


def _run_model(
    args: argparse.Namespace, arguments: Sequence[str], environ: Mapping[str, str]
) -> int:
    """The commands that take all options of an engine."""
    config = load_config(given_flags(args), environ, _warn)
    place = torchrun_place(environ)
    if place is not None:
        config = with_ranks(config, place)
    if args.command == "serve":
        return _serve(config, place)
    if args.command == "profile":
        return _profile(args, config, place, arguments)
    if place is not None:
        raise ConfigError(
            f"torchrun can start bros serve and bros profile, not bros {args.command}"
        )
    if args.command == "doctor":
        # Late, for the same reason.
        from bros.cli.doctor import run_doctor

        return run_doctor(config.engine, args.json, SystemClock())
    if args.command == "run-batch":
        # Late, for the same reason.
        from bros.cli.run_batch import run_batch_here

        return run_batch_here(args, config, SystemClock())
    return _chat(args, config)


def _serve(config: Config, place: Place | None) -> int:
    # Late: the server's imports take seconds, and --help must not.
    if place is None or place.rank == 0:
        from bros.server.build import serve

        if place is not None:
            end_with_parent(signal.SIGTERM)
        return serve(config, is_rank=place is not None)
    from bros.engine.group import run_follower
    from bros.executor.model_store import cache_dir_of

    cache_dir = cache_dir_of(config.server.data_dir)
    return run_follower(config.engine, place, cache_dir, config.server.log_level)


def _profile(
    args: argparse.Namespace, config: Config, place: Place | None, arguments: Sequence[str]
) -> int:
    # Late, for the same reason: it loads torch and matplotlib.
    if place is None and config.engine.tp > 1:
        from bros.executor.parallel.launch import launch_ranks

        launch_ranks(config.engine.tp, "bros", arguments)
        return 0
    from bros.cli.profile import run_profile

    if place is not None:
        end_with_parent()
    return run_profile(config, args.out, args.repeats, SystemClock(), place)


def _chat(args: argparse.Namespace, config: Config) -> int:
    # Late, for the same reason.
    from bros.cli.chat import ChatBackend, remote_chat, run_chat

    opening: AbstractAsyncContextManager[ChatBackend]
    if args.url is not None:
        opening = remote_chat(args.url, config.engine.model, config.server.api_key)
    else:
        from bros.server.build import local_chat

        opening = local_chat(config)
    return run_chat(opening, system=args.system)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes the way all other errors are reported."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser() -> _Parser:
    parser = _Parser(prog="bros", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"bros {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, texts: tuple[str, str, str], epilog: str = SOURCES) -> _Parser:
        help_line, usage, description = texts
        return commands.add_parser(
            name,
            help=help_line,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
        )

    serve, chat = add("serve", _SERVE), add("chat", _CHAT)
    admin = add("admin", admin_flags.TEXTS, admin_flags.EPILOG)
    batch = add("batch", batch_flags.TEXTS, batch_flags.EPILOG)
    run_batch = add("run-batch", batch_flags.RUN_TEXTS)
    profile, doctor = add("profile", _PROFILE), add("doctor", _DOCTOR)
    bench = add("bench", (bench_flags.HELP, bench_flags.USAGE, bench_flags.DESCRIPTION))
    simulate = add(
        "simulate", (simulate_flags.HELP, simulate_flags.USAGE, simulate_flags.DESCRIPTION)
    )
    for command in (serve, chat, profile, bench):
        command.add_argument(
            "model_argument", metavar="MODEL", nargs="?", help="the same as --model"
        )
    chat.add_argument(
        "--url", help="talk to this OpenAI-compatible server (--api-key is sent if given)"
    )
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_profile_arguments(profile)
    doctor.add_argument("--json", action="store_true", help="print it as JSON")
    for command in (serve, chat, profile, doctor, run_batch):
        add_flags(command)
    bench_flags.add_arguments(bench)
    simulate_flags.add_arguments(simulate)
    admin_flags.add_arguments(admin)
    batch_flags.add_arguments(batch)
    batch_flags.add_run_arguments(run_batch)
    commands.add_parser("version", help="print the versions of bros and what it runs on")
    return parser


def _add_profile_arguments(profile: _Parser) -> None:
    profile.add_argument(
        "--out",
        metavar="DIR",
        help="folder of profiles (default: profiles/ of the source tree, or of --data-dir)",
    )
    profile.add_argument(
        "--repeats", type=_positive, default=5, metavar="N", help="measurements of each step"
    )


def _positive(text: str) -> int:
    """A number for argparse, which names the option in its message."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _unknown_arguments(unknown: Sequence[str], command: str | None) -> str:
    first = unknown[0].split("=")[0]
    if not first.startswith("-"):
        return f"{first!r} is one argument too many"
    known = [*(option.flag for option in all_options()), "--config", *_COMMAND_FLAGS]
    if command == "simulate":
        known = list(simulate_flags.FLAGS)
    if command == "bench":
        known += bench_flags.FLAGS
    if command == "batch":
        known = list(batch_flags.FLAGS)
    if command == "admin":
        known = list(admin_flags.FLAGS)
    return f"{first}: there is no such option{near_matches(first, known)}"


def _versions() -> str:
    lines = [f"bros {__version__}", f"python {platform.python_version()}"]
    for package in ("torch", "transformers", "starlette", "uvicorn"):
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)


def _fail(error: BrosError, status: int) -> int:
    _say(f"bros: error: {error}")
    return status


def _warn(line: str) -> None:
    _say(f"bros: warning: {line}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
