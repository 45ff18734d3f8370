"""`bros doctor`: what it finds, what it says, and that it notices what is wrong."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bros.cli.doctor import _machine
from bros.cli.main import main
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.plan import KvCopies
from bros.engine.self_test import MIN_MARGIN, TOKENS, Generated, first_difference, generate
from bros.executor.kv_storage import KvStorage
from bros.kernels.interface import AttentionBatch, HeadLayout
from bros.kernels.reference import ReferenceKernels
from bros.kernels.self_test import Check, check_kernels
from support.kernel_cases import KV_DTYPES, cpu_kernels, each_level

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = {
    *("rms_norm", "add_rms_norm_", "silu_and_mul", "attention", "attention, shared"),
    *("rope_and_cache_", "rope_and_cache_, norms"),
}
FORMATS = ("fp32", "bf16", "int8", "int4")
PRODUCTS = (
    {f"linear, {form}, {rows} rows" for form in FORMATS for rows in (1, 9, 40)}
    | {f"embedding, {form}" for form in FORMATS[:3]}
    | {f"layer, {form}, {rows} rows" for form in FORMATS for rows in (1, 40)}
)
"""Of kernels that have products (Kernels.products)."""

FP32 = [(torch.float32, torch.float32)]
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def triton_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have it interpreted, which takes seconds."""
    if importlib.util.find_spec("triton") is not None:
        # Kernels are interpreted or not as it is when they are defined: for other tests they are.
        importlib.import_module("bros.kernels.triton.ops")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def checked(kernels: ReferenceKernels) -> dict[str, Check]:
    found = check_kernels(kernels, torch.device("cpu"), FP32, seed=0)
    return {check.operation: check for check in found}


@each_level
def test_kernels_pass_with_every_type_of_cache(level: str) -> None:
    types = [(torch.float32, cache) for cache in KV_DTYPES]
    for check in check_kernels(cpu_kernels(level), torch.device("cpu"), types, seed=0):
        assert check.passed, check


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", "--threads", "1", "--weights", "fp32", *arguments], {})
    return status, json.loads(capsys.readouterr().out)


def test_everything_that_is_in_use_is_tested(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, "--device", "cpu")
    assert (status, found["ok"], found["problems"]) == (0, True, [])
    [used] = [each for each in found["kernels"] if each["in_use"]]
    [test] = [each for each in found["tests"] if each["kernels"] == used["name"]]
    tested = OPERATIONS | (PRODUCTS if used["name"].startswith("cpu-") else set())
    assert {check["operation"] for check in test["checks"]} == tested
    assert all(check["passed"] for check in test["checks"])
    assert [each["what"] for each in found["tried"]] == [
        f"greedy, fp32, {used['name']}, cpu",
        "KV to the host and back, cpu",
    ]
    assert set(found["versions"]) >= {"bros", "python", "torch", "triton", "cupy", "transformers"}
    assert found["versions"]["torch"] and found["machine"]["CPU"]


def test_memory_that_files_take_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal: 24684376 kB\nMemFree: 512000 kB\nMemAvailable:   20480000 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert dict(_machine())["memory"].startswith("20,000 MiB available of ")


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_other_weights_are_tried_as_well(capsys: pytest.CaptureFixture[str], weights: str) -> None:
    status, found = doctor(capsys, "--device", "cpu", "--weights", weights)
    assert status == 0
    tried = [each["what"].split(", ")[1] for each in found["tried"][:2]]
    assert tried == ["fp32", weights]


def test_it_says_in_words_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--device", "cpu", "--kernels", "reference"], {}) == 0
    out = capsys.readouterr().out
    for part in ("NVIDIA driver", "attention, shared", "128 tokens for 8 prompts"):
        assert part in out
    assert "A small model, greedy, fp32, reference, cpu: 128 tokens" in out
    assert out.endswith("Everything that is in use works.\n")


def test_it_says_at_once_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a report that is cut short has what was known by then."""

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> Generated:
        raise Killed

    monkeypatch.setattr("bros.cli.doctor.generate", killed)
    with pytest.raises(Killed):
        main(["doctor", "--device", "cpu", "--kernels", "reference"], {})
    out = capsys.readouterr().out
    for part in ("NVIDIA driver", "what it is, or why", "attention, shared"):
        assert part in out
    assert "A small model" not in out


@without_cuda
def test_a_device_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, "--device", "cuda")
    assert status == 1
    [problem] = found["problems"]
    assert problem.startswith("--device cuda: ")
    assert found["tried"] == []
    assert main(["doctor", "--device", "cuda"], {}) == 1
    assert "Problem: --device cuda: " in capsys.readouterr().out


class Wrong(ReferenceKernels):
    """Attention that forgets the last token."""

    def attention(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        out = super().attention(qkv, layout, k_cache, v_cache, batch, scale)
        out[-1] = 0.0
        return out


def test_kernels_that_are_wrong_are_a_problem_if_they_are_in_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bros.executor.diagnosis.ReferenceKernels", Wrong)
    status, found = doctor(capsys, "--device", "cpu", "--kernels", "reference")
    assert status == 1
    assert found["problems"][0].startswith("kernels reference: attention is wrong: error ")
    [test] = [each for each in found["tests"] if each["kernels"] == "reference"]
    wrong = {check["operation"] for check in test["checks"] if not check["passed"]}
    assert wrong == {"attention", "attention, shared"}


def test_kernels_that_fail_do_not_end_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> ReferenceKernels:
        raise OSError("out of order\nmore of it")

    monkeypatch.setattr("bros.executor.diagnosis.ReferenceKernels", broken)
    status, found = doctor(capsys, "--device", "cpu", "--kernels", "reference")
    assert status == 1
    assert found["problems"] == ["kernels reference: OSError: out of order"]


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda copies: None, "KV that was copied to the host and back has changed"),
        (lambda copies: 1 // 0, "KV cannot be copied to the host: ZeroDivisionError: "),
    ],
)
def test_copies_that_go_wrong_are_a_problem(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[KvCopies], object],
    problem: str,
) -> None:
    monkeypatch.setattr(KvStorage, "copy", lambda storage, copies: broken(copies))
    status, found = doctor(capsys, "--device", "cpu")
    assert status == 1
    assert found["problems"][0].startswith(problem)
    assert doctor(capsys, "--device", "cpu", "--on-pressure", "recompute")[0] == 0


class Scaled(ReferenceKernels):
    """Off by a little in one operation."""

    def __init__(self, operation: str, factor: float) -> None:
        self._operation = operation
        self._factor = factor

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._off("rms_norm", super().rms_norm(x, weight, eps))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._off("silu_and_mul", super().silu_and_mul(gate_up))

    def attention(self, *arguments: Any) -> Tensor:
        return self._off("attention", super().attention(*arguments))

    def rope_and_cache_(self, *arguments: Any) -> None:
        super().rope_and_cache_(*arguments)
        k_cache, v_cache = arguments[5:7]
        self._off("k_cache", k_cache)
        self._off("v_cache", v_cache)

    def _off(self, operation: str, out: Tensor) -> Tensor:
        return out.mul_(self._factor) if operation == self._operation else out


@pytest.mark.parametrize(
    ("operation", "wrong"),
    [
        ("rms_norm", {"rms_norm", "add_rms_norm_", "rope_and_cache_, norms"}),
        ("silu_and_mul", {"silu_and_mul"}),
        ("attention", {"attention", "attention, shared"}),
        ("k_cache", {"rope_and_cache_", "rope_and_cache_, norms"}),
        ("v_cache", {"rope_and_cache_", "rope_and_cache_, norms"}),
        ("nothing", set()),
    ],
)
@pytest.mark.parametrize("factor", [1.0003, float("nan")])
def test_errors_of_the_size_of_tf32_and_nan_are_seen(
    operation: str, wrong: set[str], factor: float
) -> None:
    found = checked(Scaled(operation, factor))
    assert set(found) == OPERATIONS
    assert {name for name, check in found.items() if not check.passed} == wrong


class ForgetsShared(ReferenceKernels):
    def attention(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        plain = AttentionBatch(batch.query_start, batch.segment_start, batch.segments)
        return super().attention(qkv, layout, k_cache, v_cache, plain, scale)


def test_shared_parts_matter() -> None:
    found = checked(ForgetsShared())
    assert [name for name, check in found.items() if not check.passed] == ["attention, shared"]


def generated(tokens: list[int], margins: list[float]) -> Generated:
    return Generated({"a": tokens}, {"a": margins}, "cpu", "fp32", "reference")


@pytest.mark.parametrize(
    ("margins", "got", "difference"),
    [
        ([1.0, 1.0, 1.0], [4, 5, 6], None),
        ([1.0, 1.0, 1.0], [4, 7, 6], "token 2 of prompt 'a' is 7 instead of 5"),
        ([1.0, 1e-5, 1.0], [4, 7, 8], None),
        ([1e-2, 1e-5, 1.0], [9, 7, 8], "token 1 of prompt 'a' is 9 instead of 4"),
        ([1.0, 1.0, 1.0], [4, 5], "2 tokens for prompt 'a' instead of 3"),
    ],
)
def test_tokens_are_compared_until_two_are_about_as_good(
    margins: list[float], got: list[int], difference: str | None
) -> None:
    assert first_difference(generated([4, 5, 6], margins), {"a": got}) == difference


def test_all_tokens_of_the_small_model_are_clear() -> None:
    config = EngineConfig(device="cpu", kernels="reference", weights="fp32", threads=1)
    found = generate(config, SystemClock(), margins=True)
    assert {len(tokens) for tokens in found.tokens.values()} == {TOKENS}
    margins = [margin for each in found.margins.values() for margin in each]
    assert min(margins) > 2 * MIN_MARGIN
    assert len(margins) == TOKENS * len(found.tokens)


@without_cuda
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.long
def test_triton_is_tested_where_it_is_interpreted() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "bros", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    found = json.loads(done.stdout)
    [test] = [each for each in found["tests"] if each["kernels"] == "triton"]
    assert test["failure"] is None
    assert {check["operation"] for check in test["checks"]} == OPERATIONS
    assert not any(each["in_use"] for each in found["kernels"] if each["name"] == "triton")


@pytest.mark.gpu
def test_the_gpu_works(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys)
    assert (status, found["problems"]) == (0, [])
    assert [each["name"] for each in found["kernels"] if each["in_use"]] == ["triton"]
    greedy, copies = (each["what"] for each in found["tried"])
    assert greedy.startswith("greedy, fp32, triton, ")
    assert copies == "KV to the host and back, cuda:0"
