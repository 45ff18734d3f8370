"""bros serve, admin, batch, run-batch, chat, profile, doctor, simulate, bench and version."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING

from bros import __version__
from bros.cli.flags import (
    ChatFlags,
    DoctorFlags,
    ProfileFlags,
    build_parser,
    read_own,
    unknown_argument,
    whole,
)
from bros.core.clock import SystemClock
from bros.core.config import Config
from bros.core.config_sources import (
    given_flags,
    load_config,
)
from bros.core.errors import BrosError, ConfigError
from bros.core.rank_env import RankEnv, torchrun_rank_env, with_ranks
from bros.core.stop_signals import exit_on_stop_signals, stop_signals_handled
from bros.engine.parent import end_with_parent

if TYPE_CHECKING:
    from bros.transport.engine_start import EngineProcess

INTERRUPTED = 130
"""The exit status that shells expect after Ctrl-C."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for an invalid option, 1 for other errors."""
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
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise unknown_argument(unknown[0], args.command)
    if args.command is None:
        parser.print_help()
        return 0
    if args.command == "version":
        print(_versions())
        return 0
    if args.command == "simulate":
        # Lazy: the imports are slow, and --help must not wait for them. The same holds below.
        from bros.cli.simulate import run_simulate

        return run_simulate(args, environ, _warn, SystemClock())
    if args.command == "bench":
        from bros.cli.bench import run_bench

        return run_bench(args, environ, _warn, SystemClock())
    if args.command == "batch":
        from bros.cli.batch import run_batch

        return run_batch(args, environ, _warn, SystemClock())
    if args.command == "admin":
        from bros.cli.admin import run_admin

        return run_admin(args, environ, _warn)
    return _run_model(args, arguments, environ)


def _run_model(
    args: argparse.Namespace, arguments: Sequence[str], environ: Mapping[str, str]
) -> int:
    """Run one of the commands that take all options of an engine."""
    config = load_config(given_flags(args), environ, _warn)
    rank_env = torchrun_rank_env(environ)
    if rank_env is not None:
        config = with_ranks(config, rank_env)
    if args.command == "serve":
        return _serve(config, rank_env)
    if args.command == "profile":
        return _profile(args, config, rank_env, arguments)
    if rank_env is not None:
        raise ConfigError(
            f"torchrun can start bros serve and bros profile, not bros {args.command}"
        )
    if args.command == "doctor":
        from bros.cli.doctor import run_doctor

        return run_doctor(config.engine, read_own(DoctorFlags, args).json, SystemClock())
    if args.command == "run-batch":
        from bros.cli.run_batch import run_batch_here

        return run_batch_here(args, config, SystemClock())
    return _chat(args, config)


def _serve(config: Config, rank_env: RankEnv | None) -> int:
    if rank_env is None or rank_env.rank == 0:
        with exit_on_stop_signals(), _first_process(config, rank_env) as first:
            from bros.server.build import serve

            if rank_env is not None:
                end_with_parent(signal.SIGTERM)
            return serve(config, is_rank=rank_env is not None, first=first)
    from bros.engine.group import run_follower
    from bros.executor.model_store import cache_dir_of

    cache_dir = cache_dir_of(config.server.data_dir)
    return run_follower(config.engine, rank_env, cache_dir, config.server.log_level)


@contextmanager
def _first_process(config: Config, rank_env: RankEnv | None) -> Iterator[EngineProcess | None]:
    """The process of the engine, started before the server is imported.

    None if there may be several or if it has ranks, and if the process cannot be started: then the
    server tries again, and reports why.
    """
    server = config.server
    bounds = (server.min_replicas, server.max_replicas, server.cluster)
    several = server.replicas > 1 or any(bound is not None for bound in bounds)
    if several or config.engine.tp > 1 or rank_env is not None:
        yield None
        return
    from bros.transport.engine_start import EngineProcess

    with ExitStack() as stack:
        process = None
        # It is not to see the signals that stop this process group, not even while it imports what
        # would handle them.
        with suppress(OSError), stop_signals_handled(signal.SIG_IGN):
            made = EngineProcess()
            stack.callback(made.discard)
            made.start()
            process = made
        yield process


def _profile(
    args: argparse.Namespace, config: Config, rank_env: RankEnv | None, arguments: Sequence[str]
) -> int:
    if rank_env is None and config.engine.tp > 1:
        from bros.executor.parallel.launch import launch_ranks

        launch_ranks(config.engine.tp, "bros", arguments)
        return 0
    from bros.cli.profile import run_profile

    if rank_env is not None:
        end_with_parent()
    own = read_own(ProfileFlags, args)
    repeats = whole("--repeats", own.repeats, low=1)
    return run_profile(config, own.out, repeats, SystemClock(), rank_env)


def _chat(args: argparse.Namespace, config: Config) -> int:
    from bros.cli.chat import ChatBackend, remote_chat, run_chat

    own = read_own(ChatFlags, args)
    opening: AbstractAsyncContextManager[ChatBackend]
    if own.url is not None:
        opening = remote_chat(own.url, config.engine.model, config.server.api_key)
    else:
        from bros.server.build import local_chat

        opening = local_chat(config)
    return run_chat(opening, system=own.system)


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
