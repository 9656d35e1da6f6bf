"""Cases, references and tolerances of the native engine's tests.

Tolerance. Let u be the unit roundoff of a type: 2^-24 for float32, 2^-8 for bfloat16. A value stored
in a type gets a relative error spread over [-u, u], of root mean square at most u / sqrt(3). The tests
feed independent random data, so the errors of the elements of a dot product are independent too, and
the dot product of rounded data has the same relative error, measured in the Euclidean norm over the
whole result, as its data. s such storings one after another therefore give sqrt(s) * u_storage /
sqrt(3); SiLU, with a derivative below 1.1, changes nothing of note. A float32 sum of n products adds a
random walk of n roundings of partial sums, sqrt(n) * u_float32. The tolerance is twice their sum (small cases
scatter around their expectation; a wrong mask, scale, row or pad is orders of magnitude larger):

    || engine - reference || <= 2 (sqrt(s / 3) u_storage + sqrt(n) u_float32) || reference ||

s counts the storings on the longest path. Forward: x (if it was float32), gate, up, act. Backward: those
of gate and up, then dy, act, and the gradients of gate and up. With float32 weights a storing is exact.

relu(up)^2 doubles the relative error of up, which therefore counts four times; without a gate that is
4 + 1 in forward and no more than 5 in backward. The other activations have derivatives below 1.2. Weights
in a quantised format are rounded to bfloat16 in panels (at most once): three products more in forward,
four in backward.

A clamp has a kink, where rounding could change a gradient by all of it. The tests' bound, CLAMP, lies in
the middle between two bfloat16 numbers: rounding to nearest never crosses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kt_ray.native import DropoutSpec, Engine, ExpertLora, ExpertWeights, available_isas
from kt_ray.native.reference import moe_reference

DTYPES = (torch.float32, torch.bfloat16)
ISAS = available_isas()
CLAMP = 1 + 2.0**-8
CAP = 429 / 512  # between two bfloat16, as is the g whose silu it is
# What the tests call an activation: the fields of ExpertWeights.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {},
    "silu-limit": {"limit": CLAMP},
    "capped_silu": {"activation": "capped_silu", "limit": CAP},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swiglu_oai": {"activation": "swiglu_oai", "limit": CLAMP},
    "swiglu_oai-free": {"activation": "swiglu_oai", "alpha": 1.25},
    "relu2": {"activation": "relu2"},
}
LAYOUTS = ("separate", "fused", "interleaved", "transposed", "transposed-interleaved")
EVERY = [(isa, dtype) for isa in ISAS for dtype in DTYPES]


def tolerance(dtype: torch.dtype, depth: int, storings: int) -> float:
    """Relative error allowed in the Euclidean norm; see the module's text.

    Args:
        dtype: storage type of the weights.
        depth: the longest chain of dot products, as the sum of their lengths.
        storings: roundings to storage type on the longest path.
    """
    u_storage = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    return 2 * (math.sqrt(storings / 3) * u_storage + math.sqrt(depth) * 2.0**-24)


@dataclass(frozen=True)
class Shape:
    """Sizes of one case; rank 0 = no adapter."""

    tokens: int = 23
    slots: int = 2
    experts: int = 5
    hidden: int = 72
    inter: int = 40
    rank: int = 3
    adapters: int = 1

    def __str__(self) -> str:
        return (
            f"T{self.tokens}-K{self.slots}-E{self.experts}-H{self.hidden}-I{self.inter}"
            f"-r{self.rank}x{self.adapters if self.rank else 0}"
        )


@dataclass
class Case:
    """Inputs of one call and, after `expect`, what it should give."""

    weights: ExpertWeights
    x: Tensor
    ids: Tensor
    weights_TK: Tensor
    lora: list[ExpertLora]
    adapter_of_token: Tensor | None
    dropout: DropoutSpec | None
    keys: Tensor
    dy: Tensor
    depth: int
    expected: dict[str, Tensor] = field(default_factory=dict)

    def expect(self) -> Case:
        """Run the float64 reference, forward and backward."""
        x = self.x.double().requires_grad_()
        w = self.weights_TK.double().requires_grad_()
        lora = [double(adapter) for adapter in self.lora]
        y = moe_reference(
            self.weights,
            x,
            self.ids,
            w,
            lora=lora or None,
            adapter_of_token=self.adapter_of_token,
            dropout=self.dropout,
            keys=self.keys,
        )
        leaves = [x, w, *(t for adapter in lora for t in adapter.tensors())]
        grads = [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(
                leaves,
                torch.autograd.grad((y * self.dy).sum(), leaves, allow_unused=True)
                if y.requires_grad
                else [None] * len(leaves),
                strict=True,
            )
        ]
        names = [f"{a}.{m}" for a, adapter in enumerate(lora) for m in adapter.named()]
        self.expected = {"y": y.detach(), **dict(zip(["dx", "dw", *names], grads, strict=True))}
        return self

    def forward(self, engine: Engine, save: bool | str = False) -> tuple[Tensor, Any]:
        """Forward on the engine: y, and what backward needs."""
        return engine.forward(
            self.weights,
            self.x,
            self.ids,
            self.weights_TK,
            lora=self.lora or None,
            adapter_of_token=self.adapter_of_token,
            dropout=self.dropout,
            keys=self.keys,
            save=save,
        )

    def run(self, engine: Engine, save: bool | str = True) -> dict[str, Tensor]:
        """Forward and backward on the engine, named as in `expected`."""
        lora = self.lora or None
        y, saved = self.forward(engine, save)
        grads = [adapter.zeros_like() for adapter in self.lora]
        dx, dw = engine.backward(self.weights, saved, self.dy, lora=lora, lora_grads=grads or None)
        named = {f"{a}.{m}": t for a, g in enumerate(grads) for m, t in g.named().items()}
        return {"y": y, "dx": dx, "dw": dw, **named}

    def check_each_adapter(self, engine: Engine, save: bool | str = True) -> None:
        """Tokens of each adapter, and of none, get the bits that they get in a call of their own."""
        assert self.adapter_of_token is not None
        together = self.run(engine, save)
        for adapter in range(-1, len(self.lora)):
            rows = self.adapter_of_token == adapter
            per_token = ("x", "ids", "weights_TK", "adapter_of_token", "keys", "dy")
            alone = replace(self, **{name: getattr(self, name)[rows] for name in per_token}).run(engine, save)
            for name, got in together.items():
                if name in ("y", "dx", "dw"):
                    assert torch.equal(got[rows], alone[name]), (adapter, name)
                elif name.startswith(f"{adapter}."):
                    assert torch.equal(got, alone[name]), name

    def check(self, got: dict[str, Tensor]) -> None:
        """Every result within its tolerance, zeros exactly zero; y alone is a forward's."""
        exact = self.weights.formats[-1] == "f32"
        dtype = torch.float32 if exact else torch.bfloat16
        rounded_x = int(not exact and self.x.dtype == torch.float32)
        forward, backward = (5, 6) if self.weights.gate is None else (3, 6)
        if any(name not in ("f32", "bf16") for name in self.weights.formats):
            forward, backward = forward + 3, backward + 4
        assert got.keys() in (self.expected.keys(), {"y"})
        for name in got:
            want = self.expected[name]
            limit = tolerance(dtype, self.depth, (forward if name == "y" else backward) + rounded_x)
            size = want.norm().item()
            error = (got[name].double() - want).norm().item()
            assert error <= limit * size, (
                f"{name}: relative error {error / max(size, 1e-300):.2e} > {limit:.2e}"
            )


def double(adapter: ExpertLora) -> ExpertLora:
    """A float64 copy that wants gradients."""
    return adapter.map(lambda t: t.double().requires_grad_())


def random_adapter(shape: Shape, rank: int, generator: torch.Generator) -> ExpertLora:
    """An adapter whose branch is about as large as the frozen path, so that an error in it shows."""

    def matrix(out: int, features: int) -> Tensor:
        return torch.randn(shape.experts, out, features, generator=generator) / math.sqrt(features)

    h, i = shape.hidden, shape.inter
    return ExpertLora(
        matrix(rank, h),
        matrix(i, rank),
        matrix(rank, h),
        matrix(i, rank),
        matrix(rank, i),
        matrix(h, rank),
        0.7,
    )


def make_case(
    shape: Shape,
    dtype: torch.dtype,
    *,
    routing: str = "random",
    dropout: float = 0.0,
    x_dtype: torch.dtype | None = None,
    seed: int = 0,
    activation: str = "silu",
    bias: bool = False,
) -> Case:
    """A random case.

    Args:
        shape: sizes.
        dtype: of the weights, and of x unless `x_dtype` says otherwise.
        routing: "random" (E, meaning no expert, included), "one" (all on one expert), "none" (all on E),
            "twice" (one expert twice in every row), "sparse" (odd experts stay empty).
        dropout: probability.
        x_dtype: dtype of x.
        seed: of everything.
        activation: a name of ACTIVATIONS.
        bias: whether the projections have biases.
    """
    g = torch.Generator().manual_seed(seed)
    t, k, e, h, i = shape.tokens, shape.slots, shape.experts, shape.hidden, shape.inter

    def weight(*size: int) -> Tensor:
        return (torch.randn(*size, generator=g) / math.sqrt(size[-1])).to(dtype)

    ids = {
        "random": lambda: torch.randint(0, e + 1, (t, k), generator=g),
        "one": lambda: torch.full((t, k), e - 1),
        "none": lambda: torch.full((t, k), e),
        "twice": lambda: torch.randint(0, e, (t, 1), generator=g).expand(t, k).contiguous(),
        "sparse": lambda: 2 * torch.randint(0, (e + 1) // 2, (t, k), generator=g),
    }[routing]()
    adapters = shape.adapters if shape.rank else 0
    # Adapters of different ranks, the first the largest.
    lora = [random_adapter(shape, max(1, shape.rank // (a + 1)), g) for a in range(adapters)]
    weights = ExpertWeights(
        weight(e, i, h),
        weight(e, i, h),
        weight(e, h, i),
        layer=7,
        expert_ids=tuple(range(3, 3 + 2 * e, 2)),
    )
    case = Case(
        weights=weights,
        x=torch.randn(t, h, generator=g).to(x_dtype or dtype),
        ids=ids,
        weights_TK=torch.rand(t, k, generator=g) + 0.1,
        lora=lora,
        adapter_of_token=torch.randint(-1, adapters, (t,), generator=g) if adapters > 1 else None,
        dropout=DropoutSpec(dropout, seed=2**40 + 5, step=11) if dropout else None,
        keys=torch.arange(t) // 8 * 2**32 + torch.arange(t) % 8,
        dy=torch.randn(t, h, generator=g),
        depth=max(1, 2 * h + 3 * i + 4 * shape.rank + t * k),
    )
    fields = dict(ACTIVATIONS[activation])
    if bias:
        sizes = {"gate_bias": i, "up_bias": i, "down_bias": h}
        fields |= {name: torch.randn(e, size, generator=g) for name, size in sizes.items()}
    if activation == "relu2":
        fields |= {"gate": None, "gate_bias": None}
        case.lora = [replace(adapter, gate_a=None, gate_b=None) for adapter in lora]
    case.weights = replace(weights, **fields)
    return case


def lay_out(weights: ExpertWeights, layout: str) -> ExpertWeights:
    """The same plain weights as views of tensors laid out otherwise, one of LAYOUTS.

    In place of a gate that is not there stand NaNs: a wrong stride would spread them.
    """
    gate, up, down = weights.gate, weights.up, weights.down
    if gate is None:
        gate = torch.full_like(up, float("nan"))
    if layout in ("fused", "transposed"):  # [E, 2I, H]
        both = torch.cat([gate, up], 1)
    else:
        both = torch.stack([gate, up], 2).flatten(1, 2)
    if layout.startswith("transposed"):  # stored as [E, H, 2I] and [E, I, H]
        both = both.mT.contiguous().mT
        down = down.mT.contiguous().mT
    if layout == "separate":
        gate, up = gate.clone(), up.clone()
    elif layout in ("fused", "transposed"):
        gate, up = both.chunk(2, 1)
    else:
        gate, up = both[:, 0::2], both[:, 1::2]
    return replace(weights, gate=None if weights.gate is None else gate, up=up, down=down)
