"""`bros profile`: measures step times, fits the cost model, and stores both with a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from bros.core.clock import Clock
from bros.core.config import Config, EngineConfig
from bros.core.errors import ConfigError
from bros.core.files import check_folder, expand_user
from bros.core.rank_env import RankEnv
from bros.engine.group import Group
from bros.executor.model_store import ModelFiles, cache_dir_of, resolve_model
from bros.executor.target import choose_target, find_cuda
from bros.profiling.measuring import MAX_STORED_ERROR, Measured, full_profile
from bros.profiling.profiles import Profile, checkout_profiles
from bros.terminal import print_table, progress_bar

STEP_TOKENS = 1024
"""Largest measured step in tokens, or --max-batch-tokens if that is more."""


def run_profile(
    config: Config, out: str | None, repeats: int, clock: Clock, rank_env: RankEnv | None = None
) -> int:
    """Measure, store JSON and PNG, and print how well the model fits; returns the exit status.

    out: folder of profiles; None: that of the source tree bros runs from, or else the user's.
    rank_env: the rank of this process among several. All ranks call this; rank 0 measures.
    Raises ConfigError or ModelError if the engine cannot run or the folder cannot be written,
    RanksLostError.
    """
    cache_dir = cache_dir_of(config.server.data_dir)
    folder = expand_user(out) if out else checkout_profiles() or cache_dir / "profiles"
    try:
        check_folder(folder)
    except OSError as error:  # before minutes of measuring
        raise _not_storable(folder, error) from None
    device = choose_target(config.engine, find_cuda()).device.type
    tokens = max(config.engine.step_bounds(device).tokens, STEP_TOKENS)
    engine = dataclasses.replace(config.engine, max_batch_tokens=tokens)
    with Group.join(engine, rank_env) as group:
        files = resolve_model(engine.model, cache_dir, print)
        if group.rank > 0:
            group.log_to_stderr(config.server.log_level)
            group.follow(files)
            return 0
        print(f"Loading {files.name} ...")
        measured = _measure(engine, group, files, repeats, clock)
    _store(measured, folder, print)
    _show(measured)
    return 0


def _measure(
    engine: EngineConfig, group: Group, files: ModelFiles, repeats: int, clock: Clock
) -> Measured:
    executor, info = group.lead(files)
    with progress_bar("measuring", "steps") as advance:

        def progress(done: int, total: int) -> None:
            advance(done, total, "")

        measured = full_profile(engine, executor, info, clock, repeats=repeats, progress=progress)
    executor.close()
    return measured


def _not_storable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out: profiles cannot be stored in {folder}: {error.strerror}")


def _store(measured: Measured, folder: Path, report: Callable[[str], None]) -> None:
    try:
        path = measured.profile.save(folder)
        report(str(path))
        try:
            # matplotlib is optional: the engine needs only the profile.
            from bros.cli.profile_plot import plot
        except ImportError as error:
            report(f"No plot was drawn: {error}")
            return
        picture = path.with_suffix(".png")
        plot(measured, _title(measured.profile)).savefig(picture)
    except OSError as error:
        raise _not_storable(folder, error) from None
    report(str(picture))


def _show(measured: Measured) -> None:
    profile = measured.profile
    rows = []
    for name, samples, error in (
        ("fitted to", measured.fitted, profile.fitted),
        ("held out", measured.held_out or measured.fitted, profile.held_out),
    ):
        assert error is not None
        rows.append((name, str(len(samples)), f"{error.mape:.1%}", f"{error.max:.1%}"))
    print_table(_title(profile), ("", "steps", "mean error", "largest"), rows)
    if measured.copies:
        model = profile.model
        print(
            f"Copying KV to the host takes {model.swap_out_token_s * 1e6:.2f} µs per token and "
            f"{model.swap_out_constant_s * 1e3:.1f} ms per step with copies; copying back "
            f"{model.swap_token_s * 1e6:.2f} µs and {model.swap_constant_s * 1e3:.1f} ms."
        )
    if profile.held_out is not None and profile.held_out.mape > MAX_STORED_ERROR:
        print(
            "The times vary a lot. Measure again when the machine is not busy, or with more "
            "--repeats."
        )


def _title(profile: Profile) -> str:
    key = profile.key
    ranks = f", {key.tp} ranks" if key.tp > 1 else ""
    return f"{key.model}, {key.weights}, on {key.device} ({key.kernels}{ranks})"
