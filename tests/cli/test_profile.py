"""`bros profile` on a tiny model: what it writes and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bros.cli.main import main
from bros.cli.profile_plot import plot
from bros.profiling.fitting import ChunkShape, FitError, Sample
from bros.profiling.measuring import Measured
from bros.profiling.profiles import MEASURED, Profile, ProfileKey, load_profile
from support.scenarios import STEPS
from support.tiny_models import save_tiny_llama

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_llama(folder)
    return folder


def profile(*arguments: str | Path) -> int:
    small = ("--max-model-len", "128", "--kv-blocks", "40", "--max-num-seqs", "8", "--repeats", "1")
    return main(["profile", *map(str, arguments), *small], {"COLUMNS": "200"})


def test_a_model_of_step_times_and_a_picture_are_stored(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(model, "--weights", "fp32", "--out", tmp_path) == 0
    [stored] = tmp_path.rglob("*.json")
    assert stored.name.startswith("tiny-fp32")
    assert stored.with_suffix(".png").read_bytes().startswith(PNG)
    found = load_profile(stored)
    assert found.kind == MEASURED and found.key.model == "tiny"
    assert found.fitted is not None and found.held_out is not None
    assert found.model.prefill_seconds(100) > 0.0
    assert str(tmp_path) not in stored.read_text()
    output = capsys.readouterr().out
    for part in ("fitted to", "held out", f"{found.held_out.mape:.1%}", stored.name):
        assert part in output


def test_a_long_name_fits_the_picture() -> None:
    samples = tuple(Sample((ChunkShape(1, cached, True),), 0.01) for cached in (16, 32))
    key = ProfileKey(
        device="toy", model="tiny", weights="fp32", kernels="cpu", kv_dtype="fp32", threads=0
    )
    error = FitError(mape=0.034, max=0.179)
    measured = Profile(key=key, kind=MEASURED, model=STEPS, fitted=error, held_out=error)
    name = "Meta-Llama-3-8B-Instruct, bf16, on nvidia-h100-80gb-hbm3 (triton, 2 ranks)"
    figure = plot(Measured(measured, samples, samples, ()), name)
    figure.draw_without_rendering()
    [title] = [text for text in figure.texts if name in text.get_text()]
    extent = title.get_window_extent()
    assert 0 < extent.x0 and extent.x1 < figure.bbox.width
    assert "mean error 3.4%, largest 17.9%" in title.get_text()


def test_without_out_it_goes_where_engines_look_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bros.cli.profile.checkout_profiles", lambda: None)
    assert profile(model, "--data-dir", tmp_path) == 0
    [stored] = (tmp_path / "profiles").rglob("*.json")
    assert load_profile(stored).key.model == "tiny"


def test_a_folder_that_cannot_be_written_to_is_an_error(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert profile(model, "--out", file) == 2
    assert "--out: profiles cannot be stored in" in capsys.readouterr().err


@pytest.mark.parametrize("repeats", ["0", "-1", "many"])
def test_wrong_repeats_are_refused(repeats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--repeats", repeats], {}) == 2
    assert "--repeats" in capsys.readouterr().err
