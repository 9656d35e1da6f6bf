"""One expert layer's inputs, made from a seed: every process that measures makes the same ones itself.

Shapes: T tokens, K experts per token, E experts, H hidden, I intermediate, r rank. Only torch is needed,
so that a peer's own environment can use this file.

Weights have random bytes in the layout of their format; speed does not depend on values, as long as they
are finite. Up to four experts are random, the others repeat them (in memory of their own).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHAPES = {  # hidden, intermediate, experts, experts per token
    "deepseek_v2_lite": (2048, 1408, 64, 6),
    "deepseek_v3": (7168, 2048, 256, 8),
    "qwen3_30b": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "tiny": (256, 128, 8, 2),
}
FORMATS = (
    *("bf16", "f32", "fp8", "fp8_channel", "mxfp4", "nvfp4", "int8", "int4", "uint4"),
    *("q8_0", "q6_k", "q5_k", "q4_k", "q5_0", "q5_1", "q4_0"),
)
GGUF = {  # elements and bytes of a block, offsets of its fp16 scales, deviation of random bytes at scale 1
    "q8_0": (32, 34, (0,), 74),
    "q4_0": (32, 18, (0,), 4.6),
    "q5_0": (32, 22, (0,), 9.2),
    "q5_1": (32, 24, (0, 2), 9.2),
    "q4_k": (256, 144, (0, 2), 220),
    "q5_k": (256, 176, (0, 2), 443),
    "q6_k": (256, 210, (208,), 1362),
}
BLOCKS = {"mxfp4": 32, "nvfp4": 32, "int4": 32, "uint4": 128}
# What llama.cpp stores where a row is no multiple of 256.
FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
FEW_TOKENS = 32  # up to here a call touches few weights: several routings in turn, none of them cached


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        shape: one of SHAPES.
        experts: E, at most the model's.
        tokens: T.
        rank: of the LoRA on every expert; 0: none.
        format: of the weights, one of FORMATS.
        threads: that may compute.
    """

    shape: str
    experts: int
    tokens: int
    rank: int
    format: str
    threads: int

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """(H, I, E, K)."""
        h, i, _, k = SHAPES[self.shape]
        return h, i, self.experts, min(k, self.experts)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations: what the products are computed in."""
        return torch.float32 if self.format == "f32" else torch.bfloat16

    @property
    def flops(self) -> int:
        """Of one direction: the frozen matrices' products, without LoRA."""
        h, i, _, k = self.dims
        return 6 * k * self.tokens * h * i

    @property
    def calls(self) -> int:
        """Calls per round, each with its own routing; a round's time is their mean."""
        return 8 if self.tokens <= FEW_TOKENS else 1


@dataclass(frozen=True)
class Stored:
    """One projection of all experts, as kt_ray.native.ExpertMatrix has it; f32 and bf16 without scales."""

    format: str
    data: Tensor
    shape: tuple[int, int, int]  # E, N, K
    scales: Tensor | None = None
    block: tuple[int, int] | None = None  # rows and columns that one scale covers; None: the format's own


@dataclass(frozen=True)
class Inputs:
    """Activations, routings and adapters: x [T, H], ids and router [T, K] for each call, dy [T, H] float32,
    A and B of gate, up, down float32."""

    x: Tensor
    routings: list[tuple[Tensor, Tensor]]
    dy: Tensor
    lora: list[Tensor] | None


def stored_format(name: str, k: int) -> str:
    """The format that a matrix with rows of `k` elements has in a checkpoint of this format."""
    block = GGUF[name][0] if name in GGUF else 1
    return name if k % block == 0 else FALLBACK.get(name, name)


def in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory as the product's loader allocates it, for the torch peers as well; KT copies to its own."""
    try:
        from kt_ray.native import allocate
    except ImportError:  # in the peer's environment
        return torch.empty(shape, dtype=dtype)
    return allocate(shape, dtype)


def store(name: str, experts: int, n: int, k: int, seed: int) -> Stored:
    """Random weights [E, N, K] of magnitude about 1 / sqrt(K), in a format.

    Raises:
        ValueError: K is no multiple of the format's block.
    """
    name = stored_format(name, k)
    block = GGUF[name][0] if name in GGUF else BLOCKS.get(name, 1)
    if k % block:
        raise ValueError(f"format {name}: blocks of {block}, rows of {k}")
    rng = torch.Generator().manual_seed(seed)
    few, size = min(experts, 4), k**-0.5

    def fill(t: Tensor) -> Tensor:
        whole = in_huge_pages((experts, *t.shape[1:]), t.dtype)
        for first in range(0, experts, few):
            whole[first : first + few] = t[: experts - first]
        return whole

    def octets(*shape: int) -> Tensor:
        return torch.randint(0, 256, (few, *shape), dtype=torch.uint8, generator=rng)

    def whole(data: Tensor, scales: Tensor | None = None, block: tuple[int, int] | None = None) -> Stored:
        return Stored(name, fill(data), (experts, n, k), None if scales is None else fill(scales), block)

    def constant(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((few, *shape), value, dtype=dtype)

    if name in ("f32", "bf16"):
        dtype = torch.float32 if name == "f32" else torch.bfloat16
        return whole(torch.empty((few, n, k), dtype=dtype).uniform_(-size, size, generator=rng))
    if name in ("fp8", "fp8_channel"):  # without the highest exponent bit: below 2, no NaN
        data = (octets(n, k) & 0xBF).view(torch.float8_e4m3fn)
        if name == "fp8":
            return whole(data, constant(2 * size, torch.float32, -(-n // 128), -(-k // 128)), (128, 128))
        return replace(whole(data, constant(2 * size, torch.bfloat16, n, 1), (1, k)), format="fp8")
    if name == "mxfp4":  # 2^(scale - 127)
        return whole(octets(n, k // 2), constant(127 + round(math.log2(size / 3)), torch.uint8, n, k // 32))
    if name == "int8":  # one scale per row
        return whole(octets(n, k).view(torch.int8), constant(size / 64, torch.float32, n, 1))
    if name == "int4":  # groups of 32
        data = octets(n, k // 2).view(torch.int32)
        return whole(data, constant(size / 4, torch.bfloat16, n, k // 32))
    if name == "uint4":  # groups of 128, zero points of 8
        scales = constant(size / 4, torch.float16, n, 2 * k // 128)
        scales[..., k // 128 :] = 8
        return whole(octets(n, k // 2).view(torch.int32), scales)
    if name == "nvfp4":  # scales of 1 in E4M3
        blocks = octets(n, k // 32, 18)
        blocks[..., :2] = 0x38
        return whole(blocks, constant(size / 3, torch.float32, 1, 1))
    _, width, offsets, deviation = GGUF[name]
    blocks = octets(n, k // block, width)
    # At least the smallest normal fp16: decoding must not meet subnormal numbers that no checkpoint has.
    scale = torch.tensor([max(size / deviation, 2**-14)], dtype=torch.float16).view(torch.uint8)
    for at in offsets:
        blocks[..., at : at + 2] = scale
    return whole(blocks.view(few, n, k // block * width))


def make_weights(case: Case) -> tuple[Stored, Stored, Stored]:
    """Gate and up [E, I, H], down [E, H, I]."""
    h, i, e, _ = case.dims
    shapes = ((i, h), (i, h), (h, i))
    gate, up, down = (store(case.format, e, n, k, seed) for seed, (n, k) in enumerate(shapes, 1))
    return gate, up, down


def make_routings(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Even random (ids [T, K] int64, router weights [T, K] float32), one for each call."""
    _, _, e, k = case.dims
    rng = torch.Generator().manual_seed(1)

    def uniform(columns: int) -> Tensor:
        return torch.rand((case.tokens, columns), generator=rng)

    return [(uniform(e).topk(k, dim=1).indices, uniform(k)) for _ in range(case.calls)]


def make_inputs(case: Case) -> Inputs:
    """Routings, normal activations and adapters."""
    h, i, e, _ = case.dims
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    lora = None
    if r := case.rank:
        sizes = ((r, h), (i, r), (r, h), (i, r), (r, i), (h, r))
        lora = [normal(e, out, features) * features**-0.5 for out, features in sizes]
    x, dy = normal(case.tokens, h).to(case.dtype), normal(case.tokens, h)
    return Inputs(x, make_routings(case), dy, lora)


def matrix_bytes(name: str, n: int, k: int) -> int:
    """Bytes of one expert's matrix [N, K] with its scales, as `store` makes it."""
    name = stored_format(name, k)
    if name in GGUF:
        block, width, *_ = GGUF[name]
        return n * k // block * width
    return {
        "f32": 4 * n * k,
        "bf16": 2 * n * k,
        "fp8": n * k + 4 * -(-n // 128) * -(-k // 128),
        "fp8_channel": n * k + 2 * n,
        "int8": n * k + 4 * n,
        "mxfp4": n * k // 2 + n * k // 32,
        "int4": n * k // 2 + 2 * n * k // 32,
        "nvfp4": n * k // 32 * 18 + 4,
        "uint4": n * k // 2 + 4 * n * k // 128,
    }[name]


def expert_bytes(case: Case) -> int:
    """Bytes of one expert's three matrices."""
    h, i, _, _ = case.dims
    return 2 * matrix_bytes(case.format, i, h) + matrix_bytes(case.format, h, i)


def touched_bytes(case: Case) -> float:
    """Bytes of the experts that have tokens, mean over the calls of a round."""
    touched = (
        sum(torch.bincount(ids.flatten()).count_nonzero().item() for ids, _ in make_routings(case))
        / case.calls
    )
    return touched * expert_bytes(case)
