"""What is kept of the options that a command was given."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bros.cli.bench import BenchSettings, read_settings
from bros.cli.flags import add_arguments
from bros.core.clock import ManualClock
from bros.core.errors import ConfigError
from bros.core.request import Slo


def settings(arguments: list[str], environ: dict[str, str] | None = None) -> BenchSettings:
    parser = argparse.ArgumentParser()
    add_arguments("bench", parser)
    return read_settings(parser.parse_args(arguments), environ or {}, pytest.fail, ManualClock())


def test_options_are_kept_wherever_they_were_set(tmp_path: Path) -> None:
    config = tmp_path / "bros.toml"
    config.write_text("max_num_seqs = 8\nbe_share = 0.1\n")
    environ = {"BROS_SLO_TTFT": "300", "BROS_KV_BLOCKS": "70", "BROS_SEED": "5"}
    arguments = ["--config", str(config), "--kv-blocks", "90", "--be-share", "0.02", "--rates", "1"]
    command = settings(arguments, environ).run_options.command
    kept = command.settings
    assert (kept["--kv-blocks"], kept["--max-num-seqs"], kept["--slo-ttft"]) == (90, 8, 300.0)
    assert (kept["--rates"], kept["--in-flight"], kept["--capacity"]) == ("1", "16", None)
    assert (command.seed, command.slo) == (5, Slo(0.3, 0.2))
    assert "--be-share" not in kept, "a default is not worth a line"


def test_no_keys_and_no_folders_are_kept(tmp_path: Path) -> None:
    trace = tmp_path / "chat.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,374,44\n")
    arguments = [
        *("--rt", f"azure:{trace}", "--api-key", "hidden", "--model", str(tmp_path / "model")),
        *("--target", "http://127.0.0.1:8000", "--out", str(tmp_path), "--append"),
    ]
    kept = settings(arguments).run_options.command.settings
    assert kept["--rt"] == "azure:chat.csv" and kept["--model"] == "model"
    assert kept["--target"] == "http://127.0.0.1:8000"
    assert not any("hidden" in str(value) or str(tmp_path) in str(value) for value in kept.values())
    assert {"--out", "--append", "--report-only", "--api-key", "--policy"}.isdisjoint(kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rt", "sharegpt:gone.json"), "--rt: gone.json cannot be read"),
        (("--be", "sharegpt:gone.json"), "--be: gone.json cannot be read"),
        (("--dialect", "vllm"), "--dialect: it is of a --target"),
        (("--target-name", "other"), "--target-name: it is of a --target"),
        (("--target", "host:8000"), "--target: 'host:8000' must start with http"),
        (("--policies", "fcfs", "--scenarios", "S3"), "--scenarios: there is nothing to measure"),
        (("--policies", "bros", "--scenarios", "S1"), "--scenarios: there is nothing to measure"),
        (("--scenarios", "S2", "--in-flight", "0"), "--scenarios: there is nothing to measure"),
        (
            ("--target", "http://x", "--dialect", "plain", "--scenarios", "S3"),
            "--scenarios: there is nothing to measure",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_starts(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(list(arguments))


def test_tenants_share_the_load_with_keys_of_the_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key\nbob bob-key weight=2\ncid cid-key\n")
    arguments = ["--api-keys", str(keys), "--tenants", "bob=3,ann=1"]
    tenants = settings(arguments).tenants
    assert tenants is not None and tenants.shares == {"bob": 3.0, "ann": 1.0}
    assert tenants.keys["bob"] == "bob-key"
    target = settings([*arguments, "--target", "http://127.0.0.1:8000"]).target
    assert target is not None and target.tenants == tenants
    assert target.api_key == "ann-key", "to ask for models and metrics"
    for more, message in (
        (["--tenants", "eve=1"], "--tenants: eve has no key in --api-keys"),
        (["--tenants", "ann"], "--tenants: 'ann' is not NAME=N, with a share"),
        (["--tenants", ""], "--tenants: nobody has no key"),
        (["--be-as", "batch"], "--tenants: a batch is of one tenant"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings([*arguments, *more])
