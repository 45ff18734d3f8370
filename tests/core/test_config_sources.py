from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import Config, EngineConfig, ServerConfig
from bros.core.config_sources import Option, add_flags, all_options, load_config, options_of
from bros.core.errors import ConfigError

OPTIONS = {option.name: option for option in all_options()}


def load(
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    warnings: list[str] | None = None,
) -> Config:
    said: list[str] = []
    config = load_config(flags or {}, environ or {}, said.append)
    if warnings is None:
        assert said == []
    else:
        warnings += said
    return config


def write(folder: Path, text: str) -> Path:
    path = folder / "bros.toml"
    path.write_text(text, encoding="utf-8")
    return path


def value_of(config: Config, name: str) -> Any:
    part = config.engine if hasattr(config.engine, name) else config.server
    return getattr(part, name)


def some_value(option: Option) -> st.SearchStrategy[Any]:
    """Any allowed value of an option."""
    limits = option.field.metadata
    if "choices" in limits:
        return st.sampled_from(limits["choices"])
    if limits.get("size"):
        return st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["", "MB", "GiB"]))
    if option.kind is int:
        return st.integers(limits.get("low", 0), limits.get("high", 10**9))
    if option.kind is float:
        return st.floats(limits["low"], limits.get("high", 1e9))
    if number := limits.get("tenants"):
        return st.sampled_from(["ann=3", f"ann={number.low},bob={number.high}", "a.b-c_d=1e1"])
    if limits.get("address"):
        hosts = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}|\[[0-9a-f:]{2,20}\]", fullmatch=True)
        return st.just("auto") | st.builds("{}:{}".format, hosts, st.integers(1, 65535))
    # argparse takes "--" for the end of the flags, also where it is a value, until Python 3.13.
    return st.from_regex(r"[a-z0-9/._-]{1,20}", fullmatch=True).filter(lambda text: text != "--")


def test_nothing_given_is_the_defaults() -> None:
    assert load() == Config()


def test_no_name_is_used_twice() -> None:
    names = [field.name for part in (EngineConfig, ServerConfig) for field in _fields(part)]
    assert len(names) == len(set(names)) == len(OPTIONS)


def _fields(part: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(part)


@given(st.sampled_from(sorted(OPTIONS)), st.data())
def test_every_option_is_understood_by_every_source(name: str, data: st.DataObject) -> None:
    option = OPTIONS[name]
    value = data.draw(some_value(option))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = vars(parser.parse_args([f"{option.flag}={value}"]))
    assert value_of(load(flags), name) == value
    assert value_of(load(environ={option.variable: str(value)}), name) == value
    assert option.from_toml("file", value) == value


@given(st.sets(st.sampled_from(["flag", "variable", "file"])))
def test_flag_wins_over_variable_over_file_over_default(
    tmp_path_factory: pytest.TempPathFactory, given_in: set[str]
) -> None:
    flags, environ = {}, {}
    if "flag" in given_in:
        flags["port"] = "1"
    if "variable" in given_in:
        environ["BROS_PORT"] = "2"
    if "file" in given_in:
        flags["config"] = str(write(tmp_path_factory.mktemp("config"), "port = 3"))
    expected = {"flag": 1, "variable": 2, "file": 3}
    ranked = [port for source, port in expected.items() if source in given_in]
    assert load(flags, environ).server.port == (ranked or [8000])[0]


def test_sources_add_up_per_option(tmp_path: Path) -> None:
    path = write(tmp_path, 'port = 1\nhost = "0.0.0.0"\nmax-num-seqs = 3')
    config = load({"port": "5"}, {"BROS_CONFIG": str(path), "BROS_MAX_NUM_SEQS": "7"})
    assert config.server.port == 5
    assert config.server.host == "0.0.0.0"
    assert config.engine.max_num_seqs == 7


def test_config_flag_wins_over_config_variable(tmp_path: Path) -> None:
    path = write(tmp_path, "port = 9")
    assert load({"config": str(path)}, {"BROS_CONFIG": "/nowhere"}).server.port == 9


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"port": "70000"}, {}, "--port: 70000 must be at most 65535"),
        ({}, {"BROS_PORT": "70000"}, "BROS_PORT: 70000 must be at most 65535"),
        ({"port": "http"}, {}, "--port: 'http' is not a whole number"),
        ({}, {"BROS_PORT": "1.5"}, "BROS_PORT: '1.5' is not a whole number"),
        ({"policy": "lifo"}, {}, "--policy: 'lifo' is not one of bros, fcfs, priority, rr, edf"),
        ({}, {"BROS_MAX_NUM_SEQS": "0"}, "BROS_MAX_NUM_SEQS: 0 must be at least 1"),
        (
            {},
            {"BROS_KV_MEMORY": "lots"},
            "BROS_KV_MEMORY: 'lots' is not a size; write for example 512MiB or 2GiB",
        ),
    ],
)
def test_wrong_value_names_source_and_what_is_allowed(
    flags: dict[str, str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, environ)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 70000", ":port: 70000 must be at most 65535"),
        ('port = "8000"', ":port: '8000' is not a whole number"),
        ("port = true", ":port: True is not a whole number"),
        ("port = 8000.0", ":port: 8000.0 is not a whole number"),
        ("host = 1", ":host: 1 is not a text in quotes"),
        ('policy = "lifo"', ":policy: 'lifo' is not one of bros, fcfs, priority, rr, edf"),
        ("prot = 1", ":prot: there is no such option; did you mean port or router?"),
        ("zzz = 1", ":zzz: there is no such option"),
        ("[server]\nport = 1", ":server: options are written at the top level, not in tables"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", ":max_num_seqs: given twice, with - and with _"),
    ],
)
def test_wrong_file_entry_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load({"config": str(path)})
    assert str(caught.value) == f"{path}{message}"


@pytest.mark.parametrize("source", ["--config", "BROS_CONFIG"])
def test_the_error_for_an_unreadable_file_names_its_option(tmp_path: Path, source: str) -> None:
    broken = str(write(tmp_path, "port = "))
    for path in (broken, str(tmp_path / "missing.toml"), str(tmp_path)):
        with pytest.raises(ConfigError, match=f"^{source}: .*cannot be read") as caught:
            load({"config": path} if source == "--config" else {}, {"BROS_CONFIG": path})
        assert path in str(caught.value)


def test_unknown_variable_is_warned_about_not_refused() -> None:
    warnings: list[str] = []
    environ = {"BROS_PROT": "1", "BROS_SERVICE_HOST": "10.0.0.1", "PORT": "2", "HOME": "/"}
    assert load(environ=environ, warnings=warnings) == Config()
    assert len(warnings) == 2
    assert warnings[0].startswith("BROS_PROT is not an option and has no effect; did you mean")
    assert "BROS_PORT" in warnings[0]
    assert warnings[1].startswith("BROS_SERVICE_HOST is not an option")


def test_variable_of_other_commands_is_no_option_and_not_unknown() -> None:
    assert load(environ={"BROS_URL": "http://host:8000"}) == Config()


@pytest.mark.parametrize("text", ["", " ", "secret\n"])
def test_a_key_that_is_missing_opens_no_server(text: str) -> None:
    with pytest.raises(ConfigError, match="^BROS_API_KEY: must not"):
        load(environ={"BROS_API_KEY": text})
    assert load(environ={"BROS_API_KEYS": ""}).server.api_keys == "", "no file has this name"


def test_empty_variable_counts_as_not_set() -> None:
    assert load(environ={"BROS_PORT": "", "BROS_HOST": "", "BROS_CONFIG": ""}) == Config()


def test_help_shows_every_option_with_text_default_and_choices() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for option in OPTIONS.values():
        assert option.flag in text
        for choice in option.field.metadata.get("choices", ()):
            assert choice in text
    assert "port to listen on; 0 picks a free one (default: 8000)" in text


def test_floats_and_optional_floats_can_be_options() -> None:
    """None is declared yet; the next one shall work at once."""

    @dataclasses.dataclass
    class Sample:
        ratio: float = dataclasses.field(default=1.0, metadata={"help": "a ratio", "low": 0.0})
        limit: float | None = dataclasses.field(default=None, metadata={"help": "a limit"})

    ratio, limit = _sample_options(Sample)
    assert ratio.from_text("--ratio", "0.25") == 0.25
    assert ratio.from_toml("f:ratio", 2) == 2.0
    assert limit.from_text("--limit", "1e3") == 1000.0
    with pytest.raises(ConfigError, match="^f:ratio: -1.0 must be at least 0.0$"):
        ratio.from_toml("f:ratio", -1)
    with pytest.raises(ConfigError, match="^--limit: 'x' is not a number$"):
        limit.from_text("--limit", "x")


def test_types_that_cannot_be_options_are_refused() -> None:
    @dataclasses.dataclass
    class Sample:
        names: list = dataclasses.field(default_factory=list)  # type: ignore[type-arg]

    with pytest.raises(TypeError, match="names: .* cannot be an option"):
        _sample_options(Sample)


def _sample_options(sample: Any) -> tuple[Option, ...]:
    return options_of(sample)
