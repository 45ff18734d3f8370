"""The layers of a decoder in one native call: the same bits as kernel by kernel."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.executor.inputs import StepInputs
from bros.executor.models.build import build_decoder
from bros.executor.models.decoder import (
    Attention,
    Block,
    Blocks,
    Decoder,
    DecoderOutputs,
    Embedding,
    GatedMlp,
    Joining,
    State,
    Stopped,
)
from bros.executor.models.layers import (
    PanelEmbedding,
    PanelLinear,
    PlainLinear,
    RmsNorm,
    TokenEmbedding,
    vocabulary_panels,
)
from bros.executor.models.native import NativeLayers, native_layers
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import SINGLE_RANK
from bros.executor.target import CPU, Target
from bros.executor.weights import RandomWeights
from bros.kernels.interface import Kernels
from bros.kernels.panels import GROUP
from support.device_runners import OPT, family_plans, tiny_spec
from support.kernel_cases import (
    ATTENTION_CASES,
    BLOCK_SIZE,
    AttentionCase,
    compiled_levels,
    cpu_kernels,
    each_level,
    int32,
    make_case,
    torch_threads,
)
from support.packed_weights import packed
from support.same_bits import needs_one_order, runner_of
from support.tier import by_tier, examples

LAYERS, HIDDEN, INNER, VOCAB, EPS = 3, 64, 96, 75, 1e-5
FORMATS = ("fp32", "bf16", "int8", "int4")
BUILT = pytest.mark.skipif(not compiled_levels(), reason="the CPU kernels were not built")


class Model:
    """Layers with random weights, and a step with random inputs, for the shapes of a case.

    Weights are in `form`, but in bf16 where the inputs are no groups of it. mlp_bias: of the last
    product of the MLP, also without biases elsewhere.
    """

    def __init__(
        self,
        kernels: Kernels,
        case: AttentionCase,
        form: str,
        *,
        biases: bool,
        head_norms: bool,
        mlp_bias: bool = False,
    ) -> None:
        self.kernels, self.form, self.biases = kernels, form, biases
        self.generator = torch.Generator().manual_seed(len(case.qkv))
        self.case, layout = case, case.layout
        tokens, blocks = len(case.qkv), case.k_cache.shape[0]
        added = -(-tokens // BLOCK_SIZE)  # no token is written over what another reads
        slots = torch.randperm(added * BLOCK_SIZE, generator=self.generator)[:tokens]
        shape = (LAYERS, 2, blocks + added, *case.k_cache.shape[1:])
        self.kv = self.normal(*shape).to(case.k_cache.dtype)
        rotary = layout.head_dim // 2 * 2
        cos_sin = self.normal(tokens + 5, rotary) if rotary > 2 else None
        rows = random.Random(tokens)
        picked = [rows.randrange(tokens) for _ in range(rows.choice([0, 1, 3, tokens]))]
        self.inputs = StepInputs(
            token_ids=torch.randint(0, VOCAB, (tokens,), generator=self.generator).int(),
            positions=torch.randint(0, tokens + 5, (tokens,), generator=self.generator).int(),
            slots=(slots + blocks * BLOCK_SIZE).int(),
            attention=case.batch,
            sample_rows=torch.arange(tokens).int() if rows.random() < 0.3 else int32(picked),
            samples=(),
            read_rows=int32([rows.randrange(tokens) for _ in range(rows.choice([0, 0, 2]))]),
        )
        self.residual = self.normal(tokens, HIDDEN)
        norms = self.head_norm if head_norms else lambda: None
        self.blocks = [
            Block(
                Attention(
                    kernels,
                    layout,
                    self.linear(layout.qkv_size, HIDDEN),
                    cos_sin,
                    norms(),
                    norms(),
                    EPS,
                ),
                self.linear(HIDDEN, layout.q_size),
                GatedMlp(
                    kernels,
                    self.linear(2 * INNER, HIDDEN),
                    self.linear(HIDDEN, INNER, bias=biases or mlp_bias),
                ),
                RmsNorm(kernels, self.normal(HIDDEN), EPS),
                RmsNorm(kernels, self.normal(HIDDEN), EPS),
                pre_norm=True,
            )
            for _ in range(LAYERS)
        ]

        target = Target(CPU, form, packed=True)
        assert kernels.products is not None
        tokens, head = (
            vocabulary_panels(self.normal(VOCAB, HIDDEN), target, kernels.products)
            for _ in range(2)
        )
        self.tokens = PanelEmbedding(kernels.products, tokens)
        self.final_norm = RmsNorm(kernels, self.normal(HIDDEN), EPS)
        self.head = PanelLinear(kernels.products, head, self.normal(VOCAB) if biases else None)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def decoder(self, layers: NativeLayers | Blocks) -> Decoder:
        """A whole decoder of these layers."""
        return Decoder(Embedding(self.tokens), layers, self.final_norm, self.head)

    def native_decoder(self) -> Decoder:
        """One whose steps are one native call each."""
        ends = self.tokens, self.final_norm, self.head
        assert self.kernels.products is not None
        layers = native_layers(self.blocks, self.kernels.products, EPS, ends)
        assert layers is not None and layers.has_ends
        return self.decoder(layers)

    def head_norm(self) -> Tensor:
        return self.normal(self.case.layout.head_dim)

    def linear(self, outputs: int, inputs: int, bias: bool | None = None) -> PanelLinear:
        assert self.kernels.products is not None
        weight = self.normal(outputs, inputs) / inputs**0.5
        form = self.form if inputs % GROUP == 0 or self.form == "fp32" else "bf16"
        panels, _ = packed(form, weight, self.kernels.products.panel_layout)
        has_bias = self.biases if bias is None else bias
        return PanelLinear(
            self.kernels.products, panels, self.normal(outputs) if has_bias else None
        )

    def native(self) -> NativeLayers:
        assert self.kernels.products is not None
        layers = native_layers(self.blocks, self.kernels.products, EPS)
        assert layers is not None
        return layers

    def caches(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Fresh ones."""
        return tuple((k.clone(), v.clone()) for k, v in self.kv)

    def state(self) -> State:
        return self.residual.clone(), None


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def check_same(
    found: State | Stopped | DecoderOutputs,
    expected: State | Stopped | DecoderOutputs,
    caches: Sequence[Any],
) -> None:
    """caches: of both."""
    assert not isinstance(found, Stopped) and not isinstance(expected, Stopped)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    for ours, theirs in zip(*caches, strict=True):
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def check(model: Model, cuts: Sequence[int]) -> None:
    """cuts: layers where one call ends and the next one begins."""
    native, expected = model.native(), model.caches()
    whole = Blocks(model.blocks)(range(LAYERS), model.state(), model.inputs, expected, None)
    for borders in ([0, LAYERS], [0, *sorted(cuts), LAYERS]):
        caches, state = model.caches(), model.state()
        for first, end in zip(borders, borders[1:], strict=False):
            found = native(range(first, end), state, model.inputs, caches, None)
            assert not isinstance(found, Stopped)
            state = found
        check_same(state, whole, (caches, expected))


@pytest.mark.timeout(1200)  # 500 cases by emulated tiles take 330 s
@each_level
@given(
    case=ATTENTION_CASES,
    form=st.sampled_from(FORMATS),
    biases=st.booleans(),
    head_norms=st.booleans(),
    threads=st.sampled_from([1, 2]),
    cuts=st.lists(st.integers(0, LAYERS - 1), max_size=2),
)
@settings(max_examples=examples(25, long=500))
def test_one_call_has_the_bits_of_all_kernels(
    level: str,
    case: AttentionCase,
    form: str,
    biases: bool,
    head_norms: bool,
    threads: int,
    cuts: list[int],
) -> None:
    model = Model(cpu_kernels(level), case, form, biases=biases, head_norms=head_norms)
    with torch_threads(threads):
        check(model, cuts)


@each_level
@given(
    case=ATTENTION_CASES,
    form=st.sampled_from(FORMATS),
    biases=st.booleans(),
    threads=st.sampled_from([1, 2]),
    stop=st.integers(0, LAYERS),
)
@settings(max_examples=examples(25, long=500))
def test_a_whole_step_has_the_bits_of_all_kernels(
    level: str, case: AttentionCase, form: str, biases: bool, threads: int, stop: int
) -> None:
    """From tokens to logits, also if it stops before a layer and its rows join it again there."""
    model = Model(cpu_kernels(level), case, form, biases=biases, head_norms=False)
    expected, caches, inputs = model.caches(), model.caches(), model.inputs
    with torch_threads(threads):
        whole = model.decoder(Blocks(model.blocks)).run(inputs, expected)
        native = model.native_decoder()
        found = native.run(inputs, caches, lambda layer: layer == stop)
        if stop < LAYERS:
            assert isinstance(found, Stopped) and found.layer == stop
            found = native.run(None, caches, None, [Joining(stop, inputs, found.state)])
    assert isinstance(found, DecoderOutputs) and isinstance(whole, DecoderOutputs)
    assert len(found.logits) == len(inputs.sample_rows)
    check_same(found, whole, (caches, expected))


@each_level
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [33, 65, 129, 257, 2049])
def test_blocks_of_rows_have_the_bits_of_all_rows(level: str, form: str, tokens: int) -> None:
    """Also a last one that has one row: blocks have 64 rows where AMX is emulated, else 256."""
    case = make_case([(tokens, 0)], kv_heads=1, group=1, head_dim=16)
    kernels = cpu_kernels(level)
    for mlp_bias in (False, True):
        model = Model(kernels, case, form, biases=False, head_norms=False, mlp_bias=mlp_bias)
        with torch_threads(2):
            check(model, [])


@each_level
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("tokens", "kept"), [(120, 0), (170, 150), (260, 250), (770, 760)])
def test_rows_that_a_thread_computes_alone_have_the_bits_of_all_rows(
    level: str, form: str, tokens: int, kept: int, threads: int
) -> None:
    """With two threads the last layer keeps fewer rows, in larger parts, than those before it have:
    of 170 rows where AMX is emulated, of 260 with vectors, and of 770 with AMX."""
    case = make_case([(tokens - 20, 0), (20, 40)], kv_heads=1, group=1, head_dim=16)
    model = Model(cpu_kernels(level), case, form, biases=True, head_norms=True)
    kept_rows = torch.randperm(tokens, generator=model.generator)[:kept].int()
    model.inputs = dataclasses.replace(model.inputs, sample_rows=kept_rows, read_rows=int32([]))
    with torch_threads(threads):
        check(model, [1])


def small(level: str) -> Model:
    rows = [(1, 20), (7, 0), (3, 40)]
    case = make_case(rows, parts=[([0, 2], 32)])
    return Model(cpu_kernels(level), case, "fp32", biases=False, head_norms=False)


@each_level
@pytest.mark.parametrize("stop", range(LAYERS))
def test_a_step_stops_before_any_layer_and_goes_on(level: str, stop: int) -> None:
    model, asked = small(level), list[int]()

    def before_layer(layer: int) -> bool:
        asked.append(layer)
        return layer == stop

    native, expected, caches = model.native(), model.caches(), model.caches()
    reference = Blocks(model.blocks)
    whole = reference(range(LAYERS), model.state(), model.inputs, expected, None)
    halted = native(range(LAYERS), model.state(), model.inputs, caches, before_layer)
    assert isinstance(halted, Stopped) and halted.layer == stop == asked[-1]
    assert asked == [*range(stop + 1)]
    part = reference(range(stop), model.state(), model.inputs, model.caches(), None)
    assert not isinstance(part, Stopped)
    assert all(same(a, b) for a, b in zip(halted.state, part, strict=True))
    rest = native(range(stop, LAYERS), halted.state, model.inputs, caches, lambda _: False)
    check_same(rest, whole, (caches, expected))


@BUILT
def test_what_the_question_raises_is_passed_on() -> None:
    model = small(compiled_levels()[0])
    native, caches, expected = model.native(), model.caches(), model.caches()
    whole = Blocks(model.blocks)(range(LAYERS), model.state(), model.inputs, expected, None)

    def fail(layer: int) -> bool:
        if layer == 1:
            raise TimeoutError("too late")
        return False

    with pytest.raises(TimeoutError, match="too late"):
        native(range(LAYERS), model.state(), model.inputs, caches, fail)
    again = native(range(LAYERS), model.state(), model.inputs, caches, None)
    check_same(again, whole, (caches, expected))


@BUILT
def test_a_question_may_run_another_step() -> None:
    model = small(compiled_levels()[0])
    native, caches, expected = model.native(), model.caches(), model.caches()
    whole = Blocks(model.blocks)(range(LAYERS), model.state(), model.inputs, expected, None)

    def other(layer: int) -> bool:
        native(range(LAYERS), model.state(), model.inputs, model.caches(), None)
        return False

    found = native(range(LAYERS), model.state(), model.inputs, caches, other)
    check_same(found, whole, (caches, expected))


def replaced(values: Tensor, at: int, value: int) -> Tensor:
    changed = values.clone()
    changed.view(-1)[at] = value
    return changed


def with_batch(inputs: StepInputs, **changes: Any) -> StepInputs:
    return dataclasses.replace(inputs, attention=dataclasses.replace(inputs.attention, **changes))


def with_part(inputs: StepInputs, **changes: Any) -> StepInputs:
    assert inputs.attention.shared is not None
    return with_batch(inputs, shared=dataclasses.replace(inputs.attention.shared, **changes))


WRONG: dict[str, Callable[[StepInputs], StepInputs]] = {
    "slot": lambda i: dataclasses.replace(i, slots=replaced(i.slots, -1, 10**6)),
    "negative slot": lambda i: dataclasses.replace(i, slots=replaced(i.slots, 0, -1)),
    "position": lambda i: dataclasses.replace(i, positions=replaced(i.positions, 3, 10**6)),
    "block": lambda i: with_batch(i, segments=replaced(i.attention.segments, 0, 10**6)),
    "segment": lambda i: with_batch(i, segments=replaced(i.attention.segments, 2, BLOCK_SIZE + 1)),
    "reader": lambda i: with_part(i, rows=int32([0, 3])),
    "row": lambda i: dataclasses.replace(i, sample_rows=int32([0, 11])),
    "negative row": lambda i: dataclasses.replace(i, read_rows=int32([-1])),
    "token": lambda i: dataclasses.replace(i, token_ids=replaced(i.token_ids, -1, VOCAB)),
    "negative token": lambda i: dataclasses.replace(i, token_ids=replaced(i.token_ids, 0, -1)),
}


@each_level
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_is_out_of_range_is_refused_before_anything_is_written(
    level: str, wrong: Callable[[StepInputs], StepInputs]
) -> None:
    model, asked = small(level), list[int]()
    caches, state, inputs = model.caches(), model.state(), wrong(model.inputs)

    def before_layer(layer: int) -> bool:
        return bool(asked.append(layer))

    with pytest.raises(IndexError):
        model.native_decoder().run(inputs, caches, before_layer)
    if inputs.token_ids is model.inputs.token_ids:
        with pytest.raises(IndexError):
            model.native()(range(LAYERS), state, inputs, caches, before_layer)
    assert not asked and same(state[0], model.residual)
    for pair, before in zip(caches, model.kv, strict=True):
        assert all(same(a, b) for a, b in zip(pair, before, strict=True))


@BUILT
@pytest.mark.parametrize("kept", [[], [0, 3]])
def test_rows_that_are_not_kept_have_no_logits(kept: list[int]) -> None:
    model = small(compiled_levels()[0])
    call, inputs, caches = model.native_decoder().layers, model.inputs, model.caches()
    assert isinstance(call, NativeLayers)
    with pytest.raises(IndexError, match="logits"):
        call.call(
            range(LAYERS),
            inputs.token_ids,
            None,
            None,
            inputs.positions,
            inputs.slots,
            caches,
            inputs.attention,
            int32(kept),
            len(kept) + 1,
            None,
        )


@BUILT
def test_a_step_without_tokens_has_no_rows() -> None:
    model = small(compiled_levels()[0])
    none = torch.empty(0, dtype=torch.int32)
    batch = dataclasses.replace(
        model.inputs.attention,
        query_start=int32([0]),
        segment_start=int32([0]),
        segments=torch.empty(0, 3, dtype=torch.int32),
        shared=None,
    )
    inputs = StepInputs(none, none, none, batch, none, ())
    state = torch.empty(0, HIDDEN), None
    found = model.native()(range(LAYERS), state, inputs, model.caches(), None)
    assert not isinstance(found, Stopped)
    assert all(x is not None and x.shape == (0, HIDDEN) for x in found)


# ---- Which layers are native.


@BUILT
def test_blocks_of_another_form_stay_kernel_by_kernel() -> None:
    model = small(compiled_levels()[0])
    products, block = model.kernels.products, model.blocks[0]
    assert products is not None
    attention, mlp = block.attention, block.mlp
    assert isinstance(mlp, GatedMlp)
    plain: Any = PlainLinear(torch.zeros(HIDDEN, HIDDEN))
    others: list[dict[str, Any]] = [
        {"pre_norm": False},
        {"attention_out": plain},
        {"attention_norm": plain},
        {"mlp_norm": plain},
        {"mlp": plain},
        {"mlp": dataclasses.replace(mlp, down=plain)},
        {"mlp": dataclasses.replace(mlp, gate_up=plain)},
        {"attention": dataclasses.replace(attention, qkv=plain)},
    ]
    for changes in others:
        other = dataclasses.replace(block, **changes)
        assert native_layers([block, other], products, EPS) is None
    assert native_layers([block, block], products, EPS) is not None
    assert native_layers([], products, EPS) is None


@BUILT
def test_ends_of_another_form_are_computed_kernel_by_kernel() -> None:
    model = small(compiled_levels()[0])
    tokens, norm, head = model.tokens, model.final_norm, model.head
    plain = torch.zeros(VOCAB, HIDDEN)
    assert model.kernels.products is not None
    for ends in (
        (TokenEmbedding(plain), norm, head),
        (tokens, None, head),
        (tokens, norm, PlainLinear(plain)),
    ):
        layers = native_layers(model.blocks, model.kernels.products, EPS, ends)
        assert layers is not None and not layers.has_ends
        decoder = Decoder(Embedding(ends[0]), layers, ends[1], ends[2])
        reference = dataclasses.replace(decoder, layers=Blocks(model.blocks))
        found, expected = (each.run(model.inputs, model.caches()) for each in (decoder, reference))
        assert isinstance(found, DecoderOutputs) and isinstance(expected, DecoderOutputs)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))


class Ranks:
    """The first of two, which never run."""

    rank, size = 0, 2


@needs_one_order
def test_decoders_of_the_usual_form_are_native() -> None:
    kernels = cpu_kernels(compiled_levels()[0])

    def layers(spec: ModelSpec, ranks: Any = SINGLE_RANK) -> object:
        target = Target(CPU, "fp32", packed=True)
        return build_decoder(spec, RandomWeights(), kernels, target, 8, ranks).layers

    for spec in (tiny_spec(), tiny_spec(architectures=["Qwen3ForCausalLM"])):
        found = layers(spec)
        assert isinstance(found, NativeLayers) and found.has_ends
    assert isinstance(layers(OPT), Blocks)
    assert isinstance(layers(tiny_spec(), Ranks()), Blocks)


# ---- Whole steps.


def kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from bros.kernels.cpu_ops import CpuKernels

    monkeypatch.setattr(CpuKernels, "layers", lambda *_: None)


@needs_one_order
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "spec",
    [tiny_spec(attention_bias=True), tiny_spec(architectures=["Qwen3ForCausalLM"], head_dim=32)],
    ids=["llama", "qwen3"],
)
def test_logits_have_the_same_bits(
    spec: ModelSpec, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_blocks": 64, "threads": 2}
    native = runner_of(spec, weights, **options)
    kernel_by_kernel(monkeypatch)
    reference = runner_of(spec, weights, **options)
    decoders = native._decoder, reference._decoder
    assert [type(d.layers) for d in decoders if d is not None] == [NativeLayers, Blocks]
    for seed in range(by_tier(fast=2, long=30)):
        for plan in family_plans(random.Random(seed), 6, kv_blocks=64):
            assert torch.equal(native.logits(plan), reference.logits(plan))
