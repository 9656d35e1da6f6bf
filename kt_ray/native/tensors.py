"""What an engine computes with: tensors grouped by meaning, nothing copied.

Shapes: E local experts, H hidden size, I intermediate size, r LoRA rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from kt_ray.native.matrix import FORMATS as QUANTISED
from kt_ray.native.matrix import ExpertMatrix

if TYPE_CHECKING:
    from kt_ray.native._native import MatrixArg

Activation = Literal["silu", "capped_silu", "gelu_tanh", "swiglu_oai", "relu2"]
Projection = Tensor | ExpertMatrix

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
CLAMPED = ("silu", "capped_silu", "swiglu_oai")
PLAIN = {torch.float32: "f32", torch.bfloat16: "bf16"}
FORMATS: tuple[str, ...] = (*PLAIN.values(), *QUANTISED)


def plain_arg(name: str, tensor: Tensor) -> MatrixArg:
    """What the binding needs of all experts' weights of one projection, as they lie in memory.

    Args:
        name: the argument's name in messages.
        tensor: [E, N, K] float32 or bfloat16 on the CPU. One of the two inner dimensions runs through
            memory with stride 1, or with stride 2 (one half of an interleaved tensor); the other
            strides are free. So row-major tensors, transposed ones (`t.transpose(1, 2)`), the halves
            of fused ones (`t[:, :n]`, `t[:, 0::2]`, `t[..., 0::2].transpose(1, 2)`) all go uncopied.

    Raises:
        ValueError: another dtype, device or layout; what was seen, what is required, what to do.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in PLAIN:
        raise ValueError(
            f"{name}: dtype {dtype}, required float32 or bfloat16; "
            f"convert it with .bfloat16(), or wrap quantised weights in an ExpertMatrix"
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"{name}: a {tensor.layout} tensor on {tensor.device}, required a strided CPU tensor; "
            f"convert it with .to('cpu')"
        )
    if tensor.dim() != 3:
        raise ValueError(
            f"{name}: shape {list(tensor.shape)}, required three dimensions: experts, outputs, inputs"
        )
    e, n, k = tensor.shape
    expert_stride, row_stride, col_stride = tensor.stride()
    # The stride of a dimension with at most one element means nothing: read it as the plain one.
    if k <= 1:
        col_stride = 1
    if n <= 1:
        row_stride = k if col_stride == 1 else 1
    if min(row_stride, col_stride) not in (1, 2):
        inner = "one is 0 (an expanded tensor)" if min(row_stride, col_stride) == 0 else "neither is 1 or 2"
        raise ValueError(
            f"{name}: strides {list(tensor.stride())}: of the two inner ones {inner}, required 1 along the "
            f"inputs or the outputs (2 for half of an interleaved tensor); convert it with .contiguous()"
        )
    size = tensor.element_size()
    strides = expert_stride * size, row_stride * size, col_stride * size
    return name, PLAIN[tensor.dtype], e, n, k, tensor.data_ptr(), *strides, "none", 0, 0, 0, 1, k


def projection_arg(name: str, projection: Projection) -> MatrixArg:
    """`plain_arg` or the matrix's own."""
    if isinstance(projection, Tensor):
        return plain_arg(name, projection)
    if isinstance(projection, ExpertMatrix):
        return projection.binding_arg(name)
    raise ValueError(f"{name}: must be a tensor or an ExpertMatrix, got {type(projection).__name__}")


@dataclass(frozen=True)
class ExpertWeights:
    """The frozen weights of one layer's local experts, as they are stored: nothing is copied.

    Each projection is a float32 or bfloat16 tensor in any of the layouts of `plain_arg`, or an
    `ExpertMatrix`. Formats may differ from projection to projection, but float32 ones, which compute
    in float32, stand only among themselves.

    `activation` says what happens between up and down (c = clamp; bounds only with `limit`):

    | name         | act                                                            | transformers |
    |--------------|----------------------------------------------------------------|--------------|
    | "silu"       | silu(gate) · up                                                | hidden_act "silu": DeepSeek-V2/V3, Qwen3-MoE, Mixtral, GLM-4-MoE, Aria, Beam, ... |
    | "silu", limit| silu(c(gate, max=limit)) · c(up, -limit, limit)                | DeepSeek-V4, HY-V4, GLM-5-next |
    | "capped_silu"| c(silu(gate), max=limit) · c(up, -limit, limit)                | Step-3.7 |
    | "gelu_tanh"  | gelu(gate, tanh) · up                                          | hidden_activation "gelu_pytorch_tanh": Gemma 4, Diffusion-Gemma |
    | "swiglu_oai" | (c(up, -limit, limit) + 1) · g · σ(alpha g), g = c(gate, max=limit) | gpt-oss (gate and up interleaved, biases), MiniMax-M3, OpenAI privacy filter (biases) |
    | "relu2"      | relu(up)², no gate                                             | mlp_hidden_act "relu2": Nemotron-H |

    The gradient passes a clamp where the value is within or on its bound, as torch's does. Not among
    these: Inkling 2's soft cap, Muse-Spark's norm after each expert.

    Attributes:
        gate: [E, I, H]; None exactly with "relu2".
        up: [E, I, H].
        down: [E, H, I].
        layer: index of the layer in the model; part of the dropout stream and of messages.
        expert_ids: global number of each local expert, as long as E; default 0 .. E-1.
        activation: see above.
        alpha: of "swiglu_oai".
        limit: of "silu", "capped_silu" and "swiglu_oai"; None or infinity = no clamping.
        gate_bias: [E, I] float32 contiguous, frozen, or None. Added to the projection's output beside
            its LoRA part, before the activation.
        up_bias: [E, I], likewise.
        down_bias: [E, H], likewise; the router weight multiplies it too.

    Raises:
        ValueError: begins with the name of the argument and says what was seen, what is required and
            what to do.
    """  # noqa: E501

    gate: Projection | None
    up: Projection
    down: Projection
    layer: int = 0
    expert_ids: tuple[int, ...] = ()
    activation: Activation = "silu"
    alpha: float = 1.702
    limit: float | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_activation()
        self._check_projections()
        for name, size in (("gate_bias", self.I), ("up_bias", self.I), ("down_bias", self.H)):
            self._check_bias(name, size)
        ids: Sequence[int] = self.expert_ids or range(self.E)
        if len(ids) != self.E:
            raise ValueError(
                f"expert_ids: {len(ids)} numbers for {self.E} experts, required one for each; "
                f"leave it out for 0 .. {self.E - 1}"
            )
        object.__setattr__(self, "expert_ids", tuple(int(i) for i in ids))

    def _check_activation(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: {self.activation!r}, required one of {', '.join(ACTIVATIONS)}")
        if self.gate is None and self.activation != "relu2":
            raise ValueError(
                f"gate: None with activation {self.activation!r}, required a gate projection; "
                f"experts without one have activation 'relu2'"
            )
        if self.gate is not None and self.activation == "relu2":
            raise ValueError("gate: given with activation 'relu2', required None: relu2 has no gate")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha: {self.alpha}, required a finite number; gpt-oss has 1.702")
        if self.limit == math.inf:
            object.__setattr__(self, "limit", None)
        if self.limit is None:
            return
        if self.activation not in CLAMPED:
            raise ValueError(
                f"limit: {self.limit} with activation {self.activation!r}, required None; "
                f"only {', '.join(CLAMPED)} clamp"
            )
        if not self.limit > 0:
            raise ValueError(f"limit: {self.limit}, required a number above 0, or None for no clamping")

    def _check_projections(self) -> None:
        """Formats that go together, and shapes that agree with the first projection's."""
        args = [projection_arg(name, projection) for name, projection in self.projections().items()]
        first, kind, e, i, h = args[0][:5]
        if i < 1 or h < 1:
            raise ValueError(f"{first}: shape {[e, i, h]} has no elements per expert, required at least one")
        for name, observed, *shape in (arg[:5] for arg in args):
            if (observed == "f32") != (kind == "f32"):
                named = {"f32": "dtype float32", "bf16": "dtype bfloat16"}
                raise ValueError(
                    f"{name}: {named.get(observed, f'format {observed}')} beside {first} with "
                    f"{named.get(kind, f'format {kind}')}, required float32 for all projections or for "
                    f"none; convert float32 ones with .bfloat16()"
                )
            required = [e, h, i] if name == "down" else [e, i, h]
            if shape != required:
                raise ValueError(
                    f"{name}: shape {shape}, required {required} to go with {first}; "
                    f"gate and up are [experts, intermediate, hidden], down [experts, hidden, intermediate]"
                )

    def _check_bias(self, name: str, size: int) -> None:
        bias = getattr(self, name)
        if bias is None:
            return
        if name == "gate_bias" and self.gate is None:
            raise ValueError("gate_bias: given without a gate, required None")
        if not isinstance(bias, Tensor):
            raise ValueError(f"{name}: must be a tensor or None, got {type(bias).__name__}")
        if bias.dtype != torch.float32 or bias.device.type != "cpu" or not bias.is_contiguous():
            dtype = str(bias.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name}: dtype {dtype} on {bias.device}, strides {list(bias.stride())}, "
                f"required contiguous float32 on the CPU; convert it with .cpu().float().contiguous()"
            )
        if bias.shape != (self.E, size):
            raise ValueError(f"{name}: shape {list(bias.shape)}, required {[self.E, size]}")

    def projections(self) -> dict[str, Projection]:
        """gate (if there is one), up and down by name."""
        named = {"gate": self.gate, "up": self.up, "down": self.down}
        return {name: projection for name, projection in named.items() if projection is not None}

    @property
    def E(self) -> int:
        """Number of local experts."""
        return int(self.up.shape[0])

    @property
    def H(self) -> int:
        """Hidden size."""
        return int(self.up.shape[2])

    @property
    def I(self) -> int:  # noqa: E743
        """Intermediate size."""
        return int(self.up.shape[1])

    @property
    def formats(self) -> tuple[str, ...]:
        """Storage formats of gate (if there is one), up and down."""
        return tuple(
            PLAIN[p.dtype] if isinstance(p, Tensor) else p.format for p in self.projections().values()
        )

    @property
    def bytes(self) -> int:
        """Memory of the weights, their scales and the biases; views count what they show."""
        biases = [bias for bias in (self.gate_bias, self.up_bias, self.down_bias) if bias is not None]
        stored = [*self.projections().values(), *biases]
        return sum(s.nbytes if isinstance(s, Tensor) else s.bytes for s in stored)


@dataclass(frozen=True)
class ExpertFormula:
    """What lies between an expert's first projections and its last: the fields of `ExpertWeights` that are
    not tensors."""

    activation: Activation = "silu"
    alpha: float = 1.702
    limit: float | None = None

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" clamped at {self.limit:g}"
        return self.activation + bound


def gate_limit(formula: ExpertWeights | ExpertFormula) -> float:
    """The bound of gate before its activation; infinity = none.

    Where silu's result is bounded ("capped_silu"), it is the g with g σ(g) = limit: silu rises there, so
    that both give the same values and gradients.
    """
    limit = math.inf if formula.limit is None else formula.limit
    if formula.activation != "capped_silu" or limit == math.inf:
        return limit
    # g = limit + limit e^-g, and the last term is below 0.37; halving reaches float64's last bit.
    below, above = limit, limit + 0.37
    for _ in range(60):
        middle = (below + above) / 2
        below, above = (middle, above) if middle / (1 + math.exp(-middle)) < limit else (below, middle)
    return below


@dataclass(frozen=True)
class ExpertLora:
    """One adapter on gate, up and down of every local expert, float32 contiguous: W + scale B A.

    The same class holds gradients (`zeros_like`), accumulated in float32.
    """

    gate_a: Tensor | None  # [E, r, H]; None exactly where the experts have no gate
    gate_b: Tensor | None  # [E, I, r]; likewise
    up_a: Tensor  # [E, r, H]
    up_b: Tensor  # [E, I, r]
    down_a: Tensor  # [E, r, I]
    down_b: Tensor  # [E, H, r]
    scale: float  # alpha / r, or alpha / sqrt(r) with rsLoRA

    def named(self) -> dict[str, Tensor]:
        """The matrices by name, in the order of the fields: six, or four without a gate."""
        matrices = {name: getattr(self, name) for name in LORA_FIELDS}
        return {name: matrix for name, matrix in matrices.items() if matrix is not None}

    def tensors(self) -> tuple[Tensor, ...]:
        """The matrices in the order of the fields: six, or four without a gate."""
        return tuple(self.named().values())

    def pair(self, projection: int) -> tuple[Tensor, Tensor]:
        """A and B of gate (0), up (1) or down (2).

        Raises:
            ValueError: gate of an adapter without one.
        """
        a, b = (getattr(self, name) for name in LORA_FIELDS[2 * projection : 2 * projection + 2])
        if a is None or b is None:
            raise ValueError("lora: has no gate matrices, required for experts with a gate")
        return a, b

    def map(self, function: Callable[[Tensor], Tensor]) -> ExpertLora:
        """The adapter with `function` applied to every matrix."""
        results: dict[str, Any] = {name: function(matrix) for name, matrix in self.named().items()}
        return replace(self, **results)

    def zeros_like(self) -> ExpertLora:
        """An adapter of zeros of the same shape: where gradients are gathered."""
        return self.map(torch.zeros_like)


LORA_FIELDS = tuple(f.name for f in fields(ExpertLora) if f.name != "scale")


@dataclass(frozen=True)
class DropoutSpec:
    """LoRA dropout, a pure function of these and of layer, expert, projection, sample, position."""

    p: float  # probability of dropping an element, 0 <= p < 1
    seed: int  # 64-bit seed of the run
    step: int  # optimizer step
