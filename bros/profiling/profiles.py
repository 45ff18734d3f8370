"""Profiles: stored cost models, their file format and their location.

    <folder>/<device>/<model>-<weights>.json     profiles/amd-epyc-2-threads/SmolLM2-135M-fp32.json

A profile holds for one device, model, precision, kernel back end and number of threads. The file
contains all of these (`ProfileKey`); its name is only for people.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bros import __version__
from bros.core.clock import Clock
from bros.core.errors import ConfigError
from bros.core.machine import cpu_name
from bros.profiling.fitting import FitError
from bros.scheduler.cost_model import CostModel

SCHEMA = 1
KINDS = MEASURED, QUICK, ANALYTIC = ("measured", "quick", "analytic")
"""Measured by `bros profile`; measured in the seconds before an engine starts; or derived from data
sheets."""

_ROUNDING = 1e-9
_PAIR = re.compile(r"\[\s+([-+.e\d]+),\s+([-+.e\d]+)\s+\]")  # as json.dumps indents it
_CHECKOUT_FILES = ("pyproject.toml", "profiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The configuration that a profile holds for.

    device: a slug, see `device_slug`.
    threads: CPU threads of each rank.
    tp: number of ranks.
    """

    device: str
    model: str
    weights: str
    kernels: str
    kv_dtype: str
    threads: int
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A cost model and its origin.

    kind: one of KINDS.
    versions: of the software that was measured, see `versions`.
    date: ISO 8601, UTC; empty for analytic profiles.
    steps: how many different steps were measured.
    max_step_tokens: tokens of the largest one.
    fitted, held_out: see Fit; None for analytic profiles, which were not compared to measurements.
    kv_capacity_tokens: KV tokens that the device's memory holds beside the weights, if known.
    assumptions: of analytic profiles, name -> value in words.
    """

    key: ProfileKey
    kind: str
    model: CostModel
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    steps: int = 0
    max_step_tokens: int = 0
    fitted: FitError | None = None
    held_out: FitError | None = None
    kv_capacity_tokens: int | None = None
    assumptions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Readable, with a newline at the end; `from_json` gives an equal profile."""
        coefficients = {f.name: getattr(self.model, f.name) for f in fields(CostModel) if f.init}
        errors = {
            name: dataclasses.asdict(error)
            for name, error in (("fitted", self.fitted), ("held_out", self.held_out))
            if error is not None
        }
        content = {
            "schema": SCHEMA,
            "kind": self.kind,
            **dataclasses.asdict(self.key),
            "versions": dict(self.versions),
            "date": self.date,
            "steps": self.steps,
            "max_step_tokens": self.max_step_tokens,
            "relative_errors": errors,
            "coefficients": coefficients,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "assumptions": dict(self.assumptions),
        }
        if self.key.tp == 1:
            del content["tp"]  # as in profiles that were written before tensor parallelism
        return _PAIR.sub(r"[\1, \2]", json.dumps(content, indent=2)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Raises ConfigError if `text` is not a valid profile."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"it is not valid JSON: {error}") from None
        if not isinstance(content, dict) or "schema" not in content:
            raise ConfigError("it is not a profile of step times")
        if content["schema"] != SCHEMA:
            raise ConfigError(
                f"it has schema {content['schema']!r}, this version of bros reads schema {SCHEMA}; "
                "measure again with `bros profile`"
            )
        return _profile(_Fields(content))

    @property
    def file_name(self) -> str:
        """Path relative to a folder of profiles."""
        key = self.key
        parts = [_file_part(key.model), key.weights]
        if key.kv_dtype not in ("fp32", key.weights):
            parts.append(f"kv-{key.kv_dtype}")
        if key.kernels in ("reference", "torch"):
            parts.append(key.kernels)
        if not key.device.endswith(f"-{key.threads}-threads") and key.threads:
            parts.append(f"on-{key.threads}")
        if key.tp > 1:
            parts.append(f"tp{key.tp}")
        return f"{key.device}/{'-'.join(parts)}.json"

    def save(self, folder: Path) -> Path:
        """Write the profile below `folder`, atomically; returns its path. Raises OSError."""
        path = folder / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(path)
        return path


class _Fields:
    """The fields of a JSON object, each read once and checked."""

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        self._content = dict(content)
        self._path = path

    def text(self, name: str) -> str:
        return str(self._take(name, "a text", lambda value: isinstance(value, str)))

    def whole(self, name: str) -> int:
        return int(self._take(name, "a whole number that is not negative", _is_whole))

    def flag(self, name: str) -> bool:
        return bool(self._take(name, "true or false", lambda value: isinstance(value, bool)))

    def number(self, name: str) -> float:
        what = "a number that is not negative"
        return float(self._take(name, what, lambda value: _is_number(value) and value >= 0))

    def whole_or(self, name: str, default: int) -> int:
        return self.whole(name) if name in self._content else default

    def number_or(self, name: str, default: float) -> float:
        return self.number(name) if name in self._content else default

    def texts(self, name: str) -> dict[str, str]:
        value = self._take(name, "an object of texts", _is_texts)
        return dict(value)

    def optional_whole(self, name: str) -> int | None:
        if self._content.get(name, 0) is None:
            return self._take(name, "", lambda value: True)  # type: ignore[no-any-return]
        return self.whole(name)

    def pairs(self, name: str) -> tuple[tuple[int, Any], ...]:
        """[[whole number, number], ...], the first of each rising."""
        value = self._take(name, "pairs of numbers, the first of each rising", _is_rising_pairs)
        return tuple((first, second) for first, second in value)

    def object(self, name: str) -> _Fields:
        value = self._take(name, "an object", lambda value: isinstance(value, dict))
        return _Fields(value, f"{self._path}{name}.")

    def optional_object(self, name: str) -> _Fields | None:
        return self.object(name) if name in self._content else None

    def end(self) -> None:
        for name in self._content:
            raise ConfigError(f"{self._path}{name} is not a field of a profile")

    def wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path}{name} is not {what}")

    def _take(self, name: str, what: str, is_right: Callable[[Any], bool]) -> Any:
        if name not in self._content:
            raise ConfigError(f"{self._path}{name} is missing")
        value = self._content.pop(name)
        if not is_right(value):
            raise self.wrong(name, what)
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_rising_pairs(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return False
    if not all(_is_whole(first) and _is_number(second) for first, second in value):
        return False
    return all(low[0] < high[0] for low, high in itertools.pairwise(value))


def _profile(fields: _Fields) -> Profile:
    fields.whole("schema")
    errors = fields.object("relative_errors")
    profile = Profile(
        key=ProfileKey(
            device=fields.text("device"),
            model=fields.text("model"),
            weights=fields.text("weights"),
            kernels=fields.text("kernels"),
            kv_dtype=fields.text("kv_dtype"),
            threads=fields.whole("threads"),
            tp=fields.whole_or("tp", 1),
        ),
        kind=fields.text("kind"),
        model=_cost_model(fields.object("coefficients")),
        versions=fields.texts("versions"),
        date=fields.text("date"),
        steps=fields.whole("steps"),
        max_step_tokens=fields.whole("max_step_tokens"),
        fitted=_fit_error(errors.optional_object("fitted")),
        held_out=_fit_error(errors.optional_object("held_out")),
        kv_capacity_tokens=fields.optional_whole("kv_capacity_tokens"),
        assumptions=fields.texts("assumptions"),
    )
    fields.end()
    errors.end()
    if profile.kind not in KINDS:
        raise fields.wrong("kind", f"one of {', '.join(KINDS)}")
    return profile


def _fit_error(fields: _Fields | None) -> FitError | None:
    if fields is None:
        return None
    error = FitError(mape=fields.number("mape"), max=fields.number("max"))
    fields.end()
    return error


def _cost_model(fields: _Fields) -> CostModel:
    hinges, padding = fields.pairs("hinges"), fields.pairs("padding")
    swap_constant_s, swap_token_s = fields.number("swap_constant_s"), fields.number("swap_token_s")
    model = CostModel(
        constant_s=fields.number("constant_s"),
        token_s=fields.number("token_s"),
        sample_s=fields.number("sample_s"),
        pair_s=fields.number("pair_s"),
        context_s=fields.number("context_s"),
        unique_context_s=fields.number_or("unique_context_s", 0.0),
        hinges=tuple((knot, float(slope)) for knot, slope in hinges),
        padding=padding,
        swap_constant_s=swap_constant_s,
        swap_token_s=swap_token_s,
        # Older profiles have one time for both directions.
        swap_out_constant_s=fields.number_or("swap_out_constant_s", swap_constant_s),
        swap_out_token_s=fields.number_or("swap_out_token_s", swap_token_s),
        overlap_swap=fields.flag("overlap_swap"),
    )
    fields.end()
    if not all(_is_whole(multiple) and multiple > 0 for _, multiple in padding):
        raise fields.wrong("padding", "pairs of (limit, multiple)")
    slopes = itertools.accumulate((slope for _, slope in hinges), initial=model.token_s)
    if any(slope < -_ROUNDING * model.token_s for slope in slopes):
        raise fields.wrong("hinges", "such that more tokens never take less time")
    return model


def load_profile(path: Path) -> Profile:
    """Raises ConfigError naming the file if it cannot be read or is not a valid profile."""
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the profile {path} cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"the profile {path} cannot be used: {error}") from None


def find_profile(
    folders: Sequence[Path],
    key: ProfileKey,
    report: Callable[[str], None],
    step_tokens: int = 0,
    versions: Mapping[str, str] | None = None,
) -> Profile | None:
    """The best profile for `key`: a measured one before a quick one, then the first folder's.

    step_tokens: a quick profile counts only if it was measured with steps of so many tokens.
    versions: a quick profile counts only if it was measured with this software, a measured one of
        compiled kernels only if with these; None: with any.
    report: called with a message for each file that cannot be used.
    """
    found: list[Profile] = []
    for folder in folders:
        for path in sorted((folder / key.device).glob("*.json")):
            try:
                profile = load_profile(path)
            except ConfigError as error:
                report(str(error))
                continue
            if profile.key != key:
                continue
            if profile.kind == QUICK:
                is_current = versions in (None, profile.versions)
                found += [profile] if profile.max_step_tokens >= step_tokens and is_current else []
            elif _is_of_other_kernels(profile, versions):
                report(
                    f"the profile {path} ({profile.date[:10]}) is not used: it was measured with "
                    "other kernels; `bros profile` measures again"
                )
            else:
                found.append(profile)
    return min(found, key=lambda profile: KINDS.index(profile.kind), default=None)


def _is_of_other_kernels(profile: Profile, versions: Mapping[str, str] | None) -> bool:
    if versions is None or not profile.key.kernels.startswith("cpu-"):
        return False
    return profile.versions.get("compiled") != versions["compiled"]


def versions(compiled: str) -> dict[str, str]:
    """Versions of the software that step times depend on.

    compiled: which build of the compiled kernels, "" without them.
    """
    return {
        "bros": __version__,
        "compiled": compiled,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
    }


def iso_date(clock: Clock) -> str:
    """The time now, ISO 8601 in UTC to the second."""
    return datetime.fromtimestamp(int(clock.unix_time()), UTC).isoformat()


def device_slug(device: str, cores: int) -> str:
    """A folder name for a device, such as amd-epyc-9r14-2-threads.

    device: as in EngineInfo, "cpu" or the name of an accelerator.
    """
    if device != "cpu":
        return _slug(device)
    return _slug(f"{cpu_name()} {cores} threads")


def _slug(text: str) -> str:
    """Lower-case letters, digits and single hyphens, without the parts common to all CPU names."""
    text = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*?ghz", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _file_part(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "model"


def checkout_profiles() -> Path | None:
    """profiles/ of the source tree that bros runs from; None if bros is installed elsewhere."""
    root = _package().parent
    is_checkout = all((root / name).exists() for name in _CHECKOUT_FILES)
    return root / "profiles" if is_checkout else None


def profile_folders(data_dir: Path) -> tuple[Path, ...]:
    """The folders that are searched for profiles: the user's, then the one shipped with bros."""
    return data_dir / "profiles", checkout_profiles() or _package() / "_profiles"


def _package() -> Path:
    spec = importlib.util.find_spec("bros")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
