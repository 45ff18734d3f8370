"""Which device is simulated: finds a stored profile by path or name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bros.core.config_sources import near_matches
from bros.core.errors import ConfigError
from bros.scheduler.profiles import Profile, load_profile
from bros.simulator.build import BLOCK_SIZE, Device


def read_profile(text: str, folders: Sequence[Path]) -> Profile:
    """The profile in the file `text`, or of that name: `<device>/<model>-<weights>`.

    folders: where named ones lie, first come first served.
    Raises ConfigError, with names that are near, if there is none or it cannot be used.
    """
    path = Path(text).expanduser()
    if path.is_file():
        return load_profile(path)
    stored = stored_profiles(folders)
    name = text.removesuffix(".json")
    if name in stored:
        return load_profile(stored[name])
    near = near_matches(name, stored)
    if not near and stored:
        near = f"; there are {', '.join(stored)}" if len(stored) <= 8 else ""
    raise ConfigError(f"--profile: {text} is neither a file nor the name of a profile{near}")


def stored_profiles(folders: Sequence[Path]) -> dict[str, Path]:
    """name -> file of all profiles in the folders, sorted by name."""
    found: dict[str, Path] = {}
    for folder in reversed(folders):
        for path in folder.glob("*/*.json"):
            found[path.relative_to(folder).as_posix().removesuffix(".json")] = path
    return dict(sorted(found.items()))


def device_of(profile: Profile, kv_blocks: int | None) -> Device:
    """What the profile describes, with `kv_blocks` blocks of KV memory or all that it has.

    Raises ConfigError if neither says how many blocks there are.
    """
    if kv_blocks is None:
        if profile.kv_capacity_tokens is None:
            raise ConfigError(
                f"--kv-blocks: the profile of {profile.key.model} on {profile.key.device} does "
                f"not say how much KV memory there is; give the number of blocks of {BLOCK_SIZE} "
                "tokens"
            )
        kv_blocks = max(1, profile.kv_capacity_tokens // BLOCK_SIZE)
    key = profile.key
    return Device(
        name=key.device if key.tp == 1 else f"{key.device}, {key.tp} ranks",
        model=key.model,
        weights=key.weights,
        steps=profile.model,
        kv_blocks=kv_blocks,
    )
