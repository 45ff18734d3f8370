"""Writes the profiles that are derived from data sheets or published formulas.

    python benchmarks/analytic_profiles.py [FOLDER | --quick]      (default: profiles)

--quick writes to a temporary folder. The step times of an analytic profile are:

    T(step) = overhead + all-reduces
            + max(reading the weights, multiplying them with all tokens)
            + attention of prompt chunks, from FLOPs, and of decode rows, from bytes

The maximum becomes the constant (reading) and a hinge: from the knot, where multiplying takes as
long as reading, every token costs its FLOPs. These figures are not measured. They are for
simulations of published set-ups; every profile lists its assumptions.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bros.profiling.profiles import ANALYTIC, Profile, ProfileKey
from bros.scheduler.cost_model import CostModel

_BYTES = 2
"""Size of a weight, an activation and a KV value: all fp16."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder.

    gated: the MLP has three matrices instead of two.
    tied: the head is the embedding.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    gated: bool = True
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """In the matrices of all layers, without biases and norms."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.hidden * self.intermediate * (3 if self.gated else 2)
        return self.layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """In the whole model."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """KV size of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """`count` equal GPUs with tensor parallelism. Figures are per GPU.

    memory: bytes.
    bandwidth: bytes/s.
    flops: FLOP/s.
    link_bandwidth: bytes/s of an all-reduce ("bus bandwidth" of common benchmarks).
    host_bandwidth: bytes/s between host and device.
    overhead_s: host time per step, for scheduling and launching kernels.
    """

    name: str
    count: int
    memory: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    host_bandwidth: float
    overhead_s: float = 10e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Achieved fractions of the data sheet's figures, and the minimum time of an all-reduce."""

    products: float = 0.55
    weights: float = 0.80
    prompt_attention: float = 0.40
    decode_attention: float = 0.60
    memory: float = 0.90
    all_reduce_s: float = 20e-6


OPT_13B = Architecture(
    name="opt-13b",
    layers=40,
    hidden=5120,
    intermediate=20480,
    heads=40,
    kv_heads=40,
    vocab=50272,
    gated=False,
    tied=True,
)
OPT_30B = Architecture(
    name="opt-30b",
    layers=48,
    hidden=7168,
    intermediate=28672,
    heads=56,
    kv_heads=56,
    vocab=50272,
    gated=False,
    tied=True,
)
LLAMA_7B = Architecture(
    name="llama-7b",
    layers=32,
    hidden=4096,
    intermediate=11008,
    heads=32,
    kv_heads=32,
    vocab=32000,
)
LLAMA_13B = Architecture(
    name="llama-13b",
    layers=40,
    hidden=5120,
    intermediate=13824,
    heads=40,
    kv_heads=40,
    vocab=32000,
)
LLAMA_3_8B = Architecture(
    name="llama-3-8b",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    vocab=128256,
)
LLAMA_3_70B = Architecture(
    name="llama-3-70b",
    layers=80,
    hidden=8192,
    intermediate=28672,
    heads=64,
    kv_heads=8,
    vocab=128256,
)


def a100s(count: int, gib: int) -> Gpus:
    """A100 SXM with 40 or 80 GiB, linked by NVLink."""
    return Gpus(
        name=f"{count}x-a100-{gib}g",
        count=count,
        memory=gib * _GIB,
        bandwidth=1555e9 if gib == 40 else 2039e9,
        flops=312e12,
        link_bandwidth=230e9,
        host_bandwidth=20e9,
    )


def h200s(count: int) -> Gpus:
    """H200 SXM, linked by NVLink."""
    return Gpus(
        name=f"{count}x-h200",
        count=count,
        memory=141e9,
        bandwidth=4800e9,
        flops=989e12,
        link_bandwidth=350e9,
        host_bandwidth=40e9,
    )


def a6000s(count: int) -> Gpus:
    """RTX A6000 with 48 GiB, over PCIe."""
    return Gpus(
        name=f"{count}x-a6000",
        count=count,
        memory=48 * _GIB,
        bandwidth=768e9,
        flops=154.8e12,
        link_bandwidth=20e9,
        host_bandwidth=20e9,
    )


def analytic_profiles() -> tuple[Profile, ...]:
    """The set-ups of the BROS paper, those of the Parrot paper, and one of today."""
    return (
        analytic_profile(LLAMA_7B, a6000s(1)),
        analytic_profile(LLAMA_7B, a100s(1, 80)),
        analytic_profile(LLAMA_13B, a100s(1, 80)),
        analytic_profile(OPT_13B, a100s(2, 40)),
        analytic_profile(OPT_30B, a100s(4, 40)),
        analytic_profile(LLAMA_3_70B, a100s(8, 80)),
        analytic_profile(LLAMA_3_8B, h200s(1)),
    )


def analytic_profile(
    shape: Architecture, gpus: Gpus, reached: Efficiency = Efficiency()
) -> Profile:
    """Raises ValueError if the weights do not fit the GPUs."""
    room = reached.memory * gpus.memory * gpus.count - shape.parameters * _BYTES
    if room < shape.kv_bytes:
        raise ValueError(f"{shape.name} does not fit {gpus.name}")
    return Profile(
        key=ProfileKey(
            device=gpus.name,
            model=shape.name,
            weights="fp16",
            kernels=ANALYTIC,
            kv_dtype="fp16",
            threads=0,
        ),
        kind=ANALYTIC,
        model=_cost_model(shape, gpus, reached),
        kv_capacity_tokens=int(room // shape.kv_bytes),
        assumptions=_assumptions(shape, gpus, reached),
    )


def _cost_model(shape: Architecture, gpus: Gpus, reached: Efficiency) -> CostModel:
    bandwidth = gpus.bandwidth * gpus.count
    flops = gpus.flops * gpus.count
    read = shape.layer_parameters + shape.head_parameters
    reading_s = read * _BYTES / (bandwidth * reached.weights)
    product_s = 2 * shape.layer_parameters / (flops * reached.products)
    # Attention and MLP of a layer each end in an all-reduce of the hidden state of every token.
    reduces = 2 * shape.layers if gpus.count > 1 else 0
    sent = 2 * (gpus.count - 1) / gpus.count * shape.hidden * _BYTES
    head_size = shape.heads * shape.head_dim
    swap_token_s = _rounded(shape.kv_bytes / (gpus.host_bandwidth * gpus.count))
    return CostModel(
        constant_s=_rounded(gpus.overhead_s + reading_s + reduces * reached.all_reduce_s),
        token_s=_rounded(reduces * sent / gpus.link_bandwidth),
        sample_s=_rounded(2 * shape.head_parameters / (flops * reached.products)),
        # Scores and values are two products of head_size multiplications and additions each.
        pair_s=_rounded(4 * shape.layers * head_size / (flops * reached.prompt_attention)),
        context_s=_rounded(shape.kv_bytes / (bandwidth * reached.decode_attention)),
        hinges=((round(reading_s / product_s), _rounded(product_s)),),
        swap_token_s=swap_token_s,
        swap_out_token_s=swap_token_s,
    )


def _assumptions(shape: Architecture, gpus: Gpus, reached: Efficiency) -> dict[str, str]:
    stated = {
        "gpu": f"{gpus.flops / 1e12:.0f} TFLOP/s dense fp16, {gpus.bandwidth / 1e9:.0f} GB/s, "
        f"{gpus.memory / 1e9:.1f} GB each, {gpus.count} with tensor parallelism",
        "parameters": f"{shape.parameters / 1e9:.2f} billion, fp16",
        "matrix products": f"{reached.products:.0%} of the FLOP/s",
        "reading weights": f"{reached.weights:.0%} of the bandwidth, beside the products",
        "attention of prompts": f"{reached.prompt_attention:.0%} of the FLOP/s",
        "attention of decode rows": f"{reached.decode_attention:.0%} of the bandwidth",
        "overhead": f"{gpus.overhead_s * 1e3:.0f} ms per step on the host, "
        "typical of systems of 2023 and 2024",
        "swapping": f"{gpus.host_bandwidth / 1e9:.0f} GB/s per GPU, not hidden",
        "memory": f"{reached.memory:.0%} of it holds weights and the KV cache",
    }
    if gpus.count > 1:
        stated["communication"] = (
            f"two all-reduces per layer over NVLink, {reached.all_reduce_s * 1e6:.0f} us each and "
            f"{gpus.link_bandwidth / 1e9:.0f} GB/s bus bandwidth, not hidden"
        )
    return stated


def _rounded(seconds: float) -> float:
    """Four significant digits, more than the assumptions justify."""
    return float(f"{seconds:.4g}")


# ---- Published formulas of step times.
#
#     T(step) = constant + cost per token            interpolated between the published ranges
#             + attention of prompt chunks           the formula at one chunk size
#             + attention of decode rows             per token of context
#
# Preble (spec: Preble 2.2) fitted its simulator's formulas to two set-ups. The cost model has other
# terms; each profile's assumptions describe the conversion.


PUBLISHED = "published"
_HOST_BYTES_PER_S = 20e9
_MISTRAL_KV_BYTES = 131_072
_MISTRAL_KV_TOKENS = 198_516
_H100_BYTES = 85.9e9
_H100_BYTES_PER_S = 3350e9


def published_profiles() -> tuple[Profile, ...]:
    """The two set-ups of the Preble paper, one replica each."""
    return _mistral_on_a6000(), _llama_on_h100s()


def _mistral_on_a6000() -> Profile:
    """t = products(n) + 1.86e-4 ctx + 0.159 and, from n * ctx > 2**20 on, 1.13e-3 n + 1.75e-3 ctx
    + 2.19e-6 n ctx more, in ms and all divided by 0.9.

    products(n) is 22 below 192 tokens and 4.21 + 0.1084 n from 384 on.
    """
    flat, rising_to, used = 192, 384, 0.9
    least_ms, at_end_ms, token_ms = 22.0, 4.21 + 0.1084 * 384, 0.1084
    rise_ms = (at_end_ms - least_ms) / (rising_to - flat)
    chunk = 512
    # Per pair of a chunk of 512 tokens; other chunk sizes use the same cost per pair.
    pair_ms = (1.86e-4 + 1.75e-3 + 2.19e-6 * chunk) / chunk
    swap_s = _MISTRAL_KV_BYTES / _HOST_BYTES_PER_S
    return Profile(
        key=_key("1x-a6000", "mistral-7b"),
        kind=ANALYTIC,
        model=CostModel(
            constant_s=_seconds((least_ms + 0.159) / used),
            token_s=0.0,
            sample_s=0.0,
            pair_s=_seconds(pair_ms / used),
            context_s=_seconds(1.86e-4 / used),
            hinges=(
                (flat, _seconds(rise_ms / used)),
                (rising_to, _seconds((token_ms - rise_ms) / used)),
            ),
            swap_token_s=_rounded(swap_s),
            swap_out_token_s=_rounded(swap_s),
        ),
        kv_capacity_tokens=_MISTRAL_KV_TOKENS,
        assumptions={
            "source": "formulas of Preble's simulator, divided by 0.9 as there",
            "products": "22 ms up to 192 tokens and 4.21 + 0.1084 n ms from 384 on as published; "
            "a straight line between them",
            "attention of prompts": "the formula of long contexts for chunks of 512 tokens",
            "attention of decode rows": "0.000186 ms per token of context",
            "memory": "198,516 tokens of 131,072 bytes",
            "swapping": "20 GB/s, not hidden",
        },
    )


def _llama_on_h100s() -> Profile:
    """t = 28.9 + 0.182 n + 4.0e-3 ctx + 2.55e-6 n ctx in ms."""
    shape, gpus, chunk = LLAMA_3_70B, 4, 1024
    room = 0.9 * gpus * _H100_BYTES - 2 * shape.parameters
    swap_s = shape.kv_bytes / (gpus * _HOST_BYTES_PER_S)
    return Profile(
        key=_key(f"{gpus}x-h100", shape.name),
        kind=ANALYTIC,
        model=CostModel(
            constant_s=_seconds(28.9),
            token_s=_seconds(0.182),
            sample_s=0.0,
            pair_s=_seconds(4.0e-3 / chunk + 2.55e-6),
            context_s=_rounded(shape.kv_bytes / (0.6 * gpus * _H100_BYTES_PER_S)),
            swap_token_s=_rounded(swap_s),
            swap_out_token_s=_rounded(swap_s),
        ),
        kv_capacity_tokens=int(room // shape.kv_bytes),
        assumptions={
            "source": "formula of Preble's simulator for Llama-70B",
            "products": "28.9 + 0.182 n ms as published",
            "attention of prompts": "the formula for chunks of 1,024 tokens",
            "attention of decode rows": "reading the KV cache at 60% of 3,350 GB/s per GPU; the "
            "published term is of prompts, and 160 times as much",
            "gpu": "4 H100 of 85.9 GB with tensor parallelism",
            "memory": "90% of it holds weights and the KV cache",
            "swapping": "20 GB/s per GPU, not hidden",
        },
    )


def _key(device: str, model: str) -> ProfileKey:
    return ProfileKey(
        device=device, model=model, weights="fp16", kernels=PUBLISHED, kv_dtype="fp16", threads=0
    )


def _seconds(milliseconds: float) -> float:
    return _rounded(milliseconds / 1e3)


def save(folder: Path) -> None:
    for profile in (*analytic_profiles(), *published_profiles()):
        print(profile.save(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("profiles"), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="write to a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) if args.quick else args.folder)


if __name__ == "__main__":
    main()
