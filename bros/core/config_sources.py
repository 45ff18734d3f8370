"""Builds a Config from flags, BROS_* variables and a TOML file: flag > variable > file > default.

All three are generated from the fields of EngineConfig and ServerConfig, whose names are unique
across both: the field `max_num_seqs` is --max-num-seqs, BROS_MAX_NUM_SEQS and the top-level
TOML key `max_num_seqs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bros.core.config import Config, EngineConfig, ServerConfig, check_value
from bros.core.errors import ConfigError
from bros.core.files import expand_user

PREFIX = "BROS_"
FILE_VARIABLE = PREFIX + "CONFIG"
FILE_FLAG = "--config"
URL_VARIABLE = PREFIX + "URL"
"""Address of the server for client commands. It is no option, so load_config skips it."""

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text in quotes"}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of EngineConfig or ServerConfig, as the three sources know it."""

    field: dataclasses.Field[Any]
    kind: type[int] | type[float] | type[str]

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def from_text(self, source: str, text: str) -> Any:
        """Convert the text of a flag or variable. Raises ConfigError naming the source."""
        try:
            value = self.kind(text)
        except ValueError:
            raise ConfigError(f"{source}: {text!r} is not {_TYPE_NAMES[self.kind]}") from None
        return self._checked(source, value)

    def from_toml(self, source: str, value: object) -> Any:
        """Convert the value of a file entry. Raises ConfigError naming the source."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        if self.kind is float and whole:
            value = float(typing.cast(int, value))
        if not isinstance(value, self.kind) or isinstance(value, bool):
            raise ConfigError(f"{source}: {value!r} is not {_TYPE_NAMES[self.kind]}")
        return self._checked(source, value)

    def _checked(self, source: str, value: Any) -> Any:
        try:
            check_value(self.field, value)
        except ConfigError as error:  # it names the flag, but the value may be from elsewhere
            reason = str(error).removeprefix(f"{self.flag}: ")
            raise ConfigError(f"{source}: {reason}") from None
        return value

    def help(self) -> str:
        text: str = self.field.metadata["help"]
        if self.field.default is not None:
            text += f" (default: {self.field.default})"
        return text.replace("%", "%%")  # argparse formats help texts


def options_of(config: type[EngineConfig] | type[ServerConfig]) -> tuple[Option, ...]:
    """The options a config class declares, in order."""
    hints = typing.get_type_hints(config)
    return tuple(
        Option(field, _scalar(field.name, hints[field.name]))
        for field in dataclasses.fields(config)
    )


def all_options() -> tuple[Option, ...]:
    return options_of(EngineConfig) + options_of(ServerConfig)


def _scalar(name: str, hint: Any) -> type[int] | type[float] | type[str]:
    kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
    kind = kinds.pop()
    if kinds or kind not in _TYPE_NAMES:
        raise TypeError(f"{name}: {hint} cannot be an option; use int, float or str (or None)")
    return typing.cast("type[int] | type[float] | type[str]", kind)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config and every option, grouped. Flags that are not given are not in the namespace.

    Values stay text, so that one place (Option) converts and checks them for all sources.
    """
    parser.add_argument(
        FILE_FLAG,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"TOML file with options ({FILE_VARIABLE})",
    )
    for title, config in (("engine", EngineConfig), ("server", ServerConfig)):
        group = parser.add_argument_group(f"{title} options")
        for option in options_of(config):
            choices = option.field.metadata.get("choices")
            group.add_argument(
                option.flag,
                dest=option.name,
                default=argparse.SUPPRESS,
                metavar="{" + ",".join(choices) + "}" if choices else _metavar(option),
                help=option.help(),
            )


def _metavar(option: Option) -> str:
    if option.field.metadata.get("size"):
        return "SIZE"
    return "TEXT" if option.kind is str else "N"


def given_flags(args: argparse.Namespace) -> dict[str, str]:
    """The `flags` of load_config from parsed arguments; a MODEL argument counts as --model.

    Raises ConfigError if the model is given twice.
    """
    names = ("config", *(option.name for option in all_options()))
    flags: dict[str, str] = {name: getattr(args, name) for name in names if hasattr(args, name)}
    model = getattr(args, "model_argument", None)
    if model is not None:
        if "model" in flags:
            raise ConfigError(
                f"--model: the model is given twice, as {model!r} and as {flags['model']!r}; "
                "give it once"
            )
        flags["model"] = model
    return flags


def load_config(
    flags: Mapping[str, str], environ: Mapping[str, str], warn: Callable[[str], None]
) -> Config:
    """The configuration that flags, variables and file describe together.

    flags: option name -> text, only the given ones, and "config" for the file.
    warn: called with one line for each BROS_ variable that is no option. They are no error:
        other programs share the environment, and Kubernetes sets BROS_SERVICE_HOST and the like
        for a service called bros. An empty variable counts as not set.
    Raises ConfigError naming the source of a wrong value and what is allowed.
    """
    options = {option.name: option for option in all_options()}
    values: dict[str, Any] = {}
    path = flags.get("config") or environ.get(FILE_VARIABLE)
    if path:
        source = FILE_FLAG if flags.get("config") else FILE_VARIABLE
        values |= _from_file(expand_user(path), source, options)
    values |= _from_environ(environ, options, warn)
    for name, text in flags.items():
        if name != "config":
            values[name] = options[name].from_text(options[name].flag, text)
    return Config(
        engine=EngineConfig(**_only(EngineConfig, values)),
        server=ServerConfig(**_only(ServerConfig, values)),
    )


def _only(config: type[EngineConfig] | type[ServerConfig], values: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if name in names}


_GUARDS = ("BROS_API_KEY", "BROS_API_KEYS")


def _from_environ(
    environ: Mapping[str, str], options: Mapping[str, Option], warn: Callable[[str], None]
) -> dict[str, Any]:
    by_variable = {option.variable: option for option in options.values()}
    values = {}
    for variable in sorted(environ):
        text = environ[variable]
        known = variable in (FILE_VARIABLE, URL_VARIABLE)
        if not variable.startswith(PREFIX) or known:
            continue
        # An empty variable is one that is not given. But a secret that is missing, as in a
        # container, must not open the server to everybody.
        if not text and variable not in _GUARDS:
            continue
        if variable in by_variable:
            option = by_variable[variable]
            values[option.name] = option.from_text(variable, text)
        else:
            near = near_matches(variable, [*by_variable, FILE_VARIABLE, URL_VARIABLE])
            warn(f"{variable} is not an option and has no effect{near}")
    return values


def _from_file(path: Path, source: str, options: Mapping[str, Option]) -> dict[str, Any]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{source}: {path} cannot be read: {error}") from None
    values = {}
    for key, value in entries.items():
        where = f"{path}:{key}"
        name = key.replace("-", "_")
        if isinstance(value, dict):
            raise ConfigError(f"{where}: options are written at the top level, not in tables")
        if name not in options:
            raise ConfigError(f"{where}: there is no such option{near_matches(name, options)}")
        if name in values:
            raise ConfigError(f"{where}: given twice, with - and with _")
        values[name] = options[name].from_toml(where, value)
    return values


def near_matches(name: str, known: Iterable[str]) -> str:
    """`; did you mean port or host?`, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
