"""What --device, --weights, --kernels and --kv-dtype come to, on machines this one is not."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.executor.diagnosis import SMALL_MODEL
from bros.executor.loader import random_executor
from bros.executor.models.spec import ModelSpec
from bros.executor.target import (
    CPU,
    Cuda,
    Target,
    choose_target,
    device_name,
    find_cuda,
    kernels_for,
    kv_dtype_for,
    xformers_for,
)
from bros.kernels.interface import HeadLayout

NO_GPU = Cuda("torch finds no GPU", triton=False)
HOPPER = Cuda(None, triton=True, capability=(9, 0))
TURING = Cuda(None, triton=True, capability=(7, 5))
GPU = torch.device("cuda", 0)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "cuda", "target"),
    [
        ({"device": "cpu", "weights": "int4"}, HOPPER, Target(CPU, "int4", packed=True)),
        ({}, HOPPER, Target(GPU, "bf16", packed=False)),
        ({}, TURING, Target(GPU, "fp16", packed=False)),
        ({"device": "cuda", "weights": "fp32"}, HOPPER, Target(GPU, "fp32", packed=False)),
        ({"weights": "bf16"}, TURING, Target(GPU, "bf16", packed=False)),
    ],
)
def test_device_and_precision(options: dict[str, Any], cuda: Cuda, target: Target) -> None:
    assert choose_target(config(**options), cuda) == target


@pytest.mark.parametrize(
    ("compiled", "weights"),
    [
        ("cpu-avx512-amx", "bf16"),
        ("cpu-avx512-bf16", "bf16"),
        ("cpu-avx512-vnni", "fp32"),
        ("cpu-generic", "fp32"),
        (None, "fp32"),
    ],
)
def test_a_cpu_whose_kernels_multiply_bf16_gets_it(
    compiled: str | None, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = compiled and SimpleNamespace(name=compiled)
    monkeypatch.setattr("bros.executor.target.compiled_kernels", lambda: kernels)
    for options, cuda in (({}, NO_GPU), ({"device": "cpu", "kernels": "cpu"}, HOPPER)):
        assert choose_target(config(**options), cuda) == Target(CPU, weights, packed=True)
    fp32 = Target(CPU, "fp32", packed=True)
    assert choose_target(config(device="cpu", weights="fp32"), HOPPER) == fp32
    assert choose_target(config(kernels="reference"), NO_GPU) == fp32, "torch would multiply"


def test_activations_have_the_precision_of_weights_on_a_gpu_only() -> None:
    assert Target(GPU, "bf16", packed=False).dtype is torch.bfloat16
    assert Target(CPU, "bf16", packed=True).dtype is torch.float32
    assert Target(CPU, "int4", packed=True).dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "cuda", "message"),
    [
        ({"device": "cuda"}, NO_GPU, "^--device cuda: torch finds no GPU"),
        ({"weights": "fp16"}, NO_GPU, "^--weights fp16: only on a GPU"),
        ({"device": "cpu", "weights": "fp16"}, HOPPER, "^--weights fp16: only on a GPU"),
        ({"weights": "int4"}, HOPPER, "^--weights int4: only on a CPU"),
        ({"weights": "int8"}, HOPPER, "^--weights int8: only on a CPU"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, Any], cuda: Cuda, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_target(config(**options), cuda)


@pytest.mark.parametrize("name", ["auto", "reference", "cpu", "triton"])
def test_kernels_on_a_cpu_are_those_asked_for(name: str) -> None:
    options = config(kernels=name)
    assert kernels_for(options, choose_target(options, NO_GPU), NO_GPU) == name


def test_every_rank_has_a_gpu_of_its_own_or_they_share_the_cpu() -> None:
    two = Cuda(None, triton=True, capability=(9, 0), num_devices=2)
    devices = [choose_target(config(), two, rank, 2).device for rank in range(2)]
    assert devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    for rank in range(3):
        with pytest.raises(ConfigError, match="--tp: 3 ranks need a GPU each, but torch finds 2"):
            choose_target(config(), two, rank, 3)
        assert choose_target(config(device="cpu"), two, rank, 3).device == CPU
        assert choose_target(config(), NO_GPU, rank, 3).device == CPU


def test_kernels_on_a_gpu() -> None:
    target = choose_target(config(), HOPPER)
    assert kernels_for(config(), target, HOPPER) == "triton"
    assert kernels_for(config(kernels="reference"), target, HOPPER) == "reference"
    with pytest.raises(ConfigError, match="^--kernels cpu: these run on a CPU only"):
        kernels_for(config(kernels="cpu"), target, HOPPER)
    without = Cuda(None, triton=False, capability=(9, 0))
    assert kernels_for(config(kernels="reference"), target, without) == "reference"
    for name in ("auto", "triton"):
        with pytest.raises(ConfigError, match=r"triton.*not installed; install bros\[cuda\]"):
            kernels_for(config(kernels=name), target, without)


@pytest.mark.parametrize(
    ("options", "cuda", "kernels", "dtype"),
    [
        ({"weights": "fp32"}, NO_GPU, "cpu-avx512-bf16", "fp32"),
        ({"weights": "int4"}, NO_GPU, "cpu-avx512-bf16", "bf16"),
        ({"weights": "int8"}, NO_GPU, "cpu-avx512-bf16", "bf16"),
        ({"weights": "bf16"}, NO_GPU, "cpu-avx512-bf16", "bf16"),
        ({"weights": "bf16"}, NO_GPU, "cpu-avx512-amx", "bf16"),
        ({"weights": "bf16"}, NO_GPU, "cpu-avx2", "fp16"),
        ({"weights": "int4"}, NO_GPU, "cpu-avx512-vnni", "fp16"),
        ({"weights": "fp32"}, NO_GPU, "cpu-avx2", "fp32"),
        ({"weights": "int4"}, NO_GPU, "cpu-generic", "fp32"),
        ({"weights": "int4"}, NO_GPU, "reference", "fp32"),
        ({"weights": "bf16", "kv_dtype": "fp32"}, NO_GPU, "cpu-avx512-bf16", "fp32"),
        ({}, HOPPER, "triton", "bf16"),
        ({"weights": "fp32"}, HOPPER, "triton", "fp32"),
        ({"kv_dtype": "fp16"}, HOPPER, "triton", "fp16"),
    ],
)
def test_the_type_of_the_cache(
    options: dict[str, Any], cuda: Cuda, kernels: str, dtype: str
) -> None:
    target = choose_target(config(**options), cuda)
    assert kv_dtype_for(config(**options), target, kernels) == dtype


def test_a_torch_without_cuda_is_told_apart_from_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA" in str(find_cuda().problem)

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert "Found no NVIDIA driver on your system; is the driver" in str(find_cuda().problem)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "CUDA_VISIBLE_DEVICES" in str(find_cuda().problem)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = find_cuda()
    assert found.problem is None and found.capability == (9, 0)


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_name(CPU) == "cpu"
    assert device_name(GPU) == "NVIDIA H200"


LAYOUT = HeadLayout(4, 2, 64)


@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_the_own_part_of_prompts_is_left_to_triton(choice: str) -> None:
    options = config(self_attention=choice)
    for cuda, kernels in ((HOPPER, "triton"), (HOPPER, "reference"), (NO_GPU, "cpu")):
        target = choose_target(options, cuda)
        assert xformers_for(options, target, kernels, LAYOUT) is None


@pytest.mark.parametrize(
    ("cuda", "kernels", "weights", "message"),
    [
        (NO_GPU, "triton", "auto", "only on a GPU, beside --kernels triton"),
        (HOPPER, "reference", "auto", "only on a GPU, beside --kernels triton"),
        (HOPPER, "triton", "fp32", "for bf16 and fp16 only; choose one of them by --weights"),
        (HOPPER, "triton", "auto", r"install bros\[xformers\]"),
    ],
)
def test_xformers_that_cannot_be_used_is_refused(
    cuda: Cuda, kernels: str, weights: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    options = config(self_attention="xformers", weights=weights)
    target = choose_target(options, cuda)
    with pytest.raises(ConfigError, match=f"^--self-attention xformers: {message}"):
        xformers_for(options, target, kernels, LAYOUT)


def test_a_model_is_not_loaded_with_xformers_where_that_cannot_run() -> None:
    options = config(device="cpu", self_attention="xformers", threads=1)
    with pytest.raises(ConfigError, match="^--self-attention xformers: only on a GPU"):
        random_executor(ModelSpec.from_config(SMALL_MODEL), options)
