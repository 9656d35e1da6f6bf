"""A stand-in for an attention stage: waits as long as a GPU would compute, and sends random tokens.

With it the experts' side of a step is measured on a machine without a GPU: every message, copy and
engine call is the real one, only the layers' arithmetic is replaced by `time.sleep`. Nothing is
learnt: losses are zeros, gradients random.

    seconds of a layer = its FLOPs / (the GPU's bf16 rate * use) + bytes to and from the host / PCIe

FLOPs: two per parameter and token (attention, shared experts or the dense MLP), and
`ModelDims.attention_flops` for scores and values; as much again for recomputation, and again for backward,
which has no weight gradients.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kt_ray.batch import PassSpec
from kt_ray.dims.model_dims import ModelDims
from kt_ray.model.layer_loop import StageExchange
from kt_ray.model.lora import AdapterSwitch
from kt_ray.model.stage_spec import StageSpec
from kt_ray.model.state import MicroState, RecomputedRoutes
from kt_ray.model.token_exchange import ExpertExchange
from kt_ray.optim.flat_parameters import FlatParameters
from kt_ray.placement.order import Op

RTX_4090 = {
    "gpu": "RTX 4090",
    "bf16_flops": 165.2e12,  # dense, float32 accumulation: NVIDIA Ada GPU architecture whitepaper, appendix A
    "use": 0.5,  # share of it that transformer layers of a few thousand tokens reach (assumed)
    "pcie_bytes": 25e9,  # per second and direction, PCIe 4.0 x16 as usually measured (assumed)
}
POOL = 8  # different sets of random tokens
Pool = dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]]  # by number of tokens


@dataclass(frozen=True)
class Pace:
    """Seconds per token of each layer and of loss and head; `before` is the part up to the experts' call.

    before, after: per layer of the model. loss: forward and backward of the head. width, top_k, experts:
    of the messages. moe: layers with experts.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    loss: float
    width: int
    top_k: int
    experts: int
    moe: tuple[int, ...]


def pace_of(dims: ModelDims, row_tokens: int, gpu: dict[str, Any] = RTX_4090) -> Pace:
    """How long a GPU takes per token, from the model's dimensions."""
    rate, pcie = gpu["bf16_flops"] * gpu["use"], gpu["pcie_bytes"]
    moe = set(dims.moe_layers)
    before, after = [], []
    for layer in range(dims.num_layers):
        scores = dims.attention_flops(layer, 1, row_tokens) / row_tokens
        attention = (2 * dims.attention_params[layer] + scores) / rate
        rest = 2 * dims.dense_params[layer] / rate
        # x in bf16 to the host, y in float32 back.
        carried = 6 * dims.expert_width / pcie if layer in moe else 0.0
        before.append(attention + carried)
        after.append(rest)
    head = 2 * 2 * dims.embedding_params / rate
    return Pace(
        tuple(before),
        tuple(after),
        head,
        dims.expert_width,
        dims.experts_per_token,
        dims.num_experts,
        dims.moe_layers,
    )


class PacedStage:
    """What an attention worker calls of `kt_ray.model.stage.Stage`, for a single stage on the CPU.

    Args:
        pace: seconds per token.
        spec: of the stage that this stands for.
    """

    def __init__(self, pace: Pace, spec: StageSpec) -> None:
        if not (spec.first and spec.last):
            raise ValueError("the paced stand-in is a whole model: one stage")
        self.pace = pace
        self.spec = spec
        self.padding_moves = ""
        self.first = self.last = True
        self.weight_bytes = 0
        self.streamed = None
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.flat = FlatParameters(self.parameters, torch.device("cpu"))
        self.adapters = AdapterSwitch({}, {})
        self.state_shape = (pace.width,)
        self.scales = dict.fromkeys(pace.moe, 1.0)
        self._pool: Pool = {}

    def begin(
        self, spec: PassSpec, replica: int, experts: ExpertExchange, stages: StageExchange | None = None
    ) -> PacedLoop:
        return PacedLoop(self.pace, spec, replica, experts, self._pool, self.spec.activations)

    def zero_grad(self) -> None:
        pass


class PacedLoop:
    """What an attention worker calls of `kt_ray.model.layer_loop.LayerLoop`."""

    def __init__(
        self,
        pace: Pace,
        spec: PassSpec,
        replica: int,
        experts: ExpertExchange,
        pool: Pool,
        held: str,
    ) -> None:
        self.pace = pace
        self.recomputed = RecomputedRoutes()  # of which there are none
        # Micro-batches that `recompute`, and `backward`, compute again.
        self._ahead = {"group": slice(None), "retain": slice(0)}.get(held, slice(1))
        self._later = slice(0) if held in ("group", "retain") else slice(1, None)
        self.loss_sum = 0.0
        self._experts, self._train = experts, spec.kind == "train"
        self._seconds = {"attention": 0.0, "experts_wait": 0.0, "loss": 0.0}
        self._pool = pool
        device = torch.device("cpu")
        self._groups = [[MicroState.create(mb, device) for mb in group] for group in spec.wave[replica]]

    def run(self, op: Op) -> None:
        getattr(self, op.kind)(op.layer, op.group)

    def embed(self, layer: int, group: int) -> None:
        pass

    def forward(self, layer: int, group: int) -> None:
        self._compute(self.pace.before[layer], group)
        if layer in self.pace.moe:
            x, ids, weights, _ = self._tokens(layer, group)
            keys = torch.cat([m.keys_T for m in self._groups[group]])
            self._experts.submit_forward(layer, group, x, ids, weights, keys, self._train)
        self._compute(self.pace.after[layer], group)

    def join(self, layer: int, group: int) -> None:
        begun = time.monotonic()
        y = self._experts.join_forward(layer, group)
        self._seconds["experts_wait"] += time.monotonic() - begun
        assert y.shape == (self._count(group), self.pace.width)

    def loss(self, layer: int, group: int) -> None:
        self._compute(self.pace.loss, group, "loss")

    def recompute(self, layer: int, group: int) -> None:
        if layer in self.pace.moe:
            self._experts.submit_backward(layer, group, self._tokens(layer, group)[3])
        self._compute(self.pace.before[layer] + self.pace.after[layer], group, part=self._ahead)

    def backward(self, layer: int, group: int) -> None:
        if layer in self.pace.moe:
            begun = time.monotonic()
            self._experts.join_backward(layer, group)
            self._seconds["experts_wait"] += time.monotonic() - begun
        self._compute(self.pace.before[layer] + self.pace.after[layer], group, part=self._later)
        self._compute(self.pace.before[layer] + self.pace.after[layer], group)

    def losses(self) -> list[list[float]]:
        return [[] for _ in self._groups]

    logps = losses

    def logits(self) -> list[list[Tensor]]:
        raise RuntimeError("the paced stand-in has no logits")

    def routing(self) -> None:
        return None

    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    # -- helpers -----------------------------------------------------------------------------

    def _count(self, group: int, part: slice = slice(None)) -> int:
        """Tokens of a part of a group's micro-batches."""
        chosen = self._groups[group][part]
        return sum(m.samples_N.numel() if m.rows is None else m.rows.numel() for m in chosen)

    def _compute(
        self,
        seconds_per_token: float,
        group: int,
        term: str = "attention",
        part: slice = slice(None),
    ) -> None:
        seconds = seconds_per_token * self._count(group, part)
        time.sleep(seconds)
        self._seconds[term] += seconds

    def _tokens(self, layer: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, H] bf16, ids [T, K], weights [T, K], dy [T, H]: drawn once per number of tokens."""
        count, pace = self._count(group), self.pace
        if count not in self._pool:
            generator = torch.Generator().manual_seed(count)
            sets = []
            for _ in range(POOL):
                x = torch.randn(count, pace.width, generator=generator).bfloat16()
                ids = torch.rand(count, pace.experts, generator=generator).topk(pace.top_k).indices
                weights = torch.rand(count, pace.top_k, generator=generator).softmax(-1)
                sets.append((x, ids, weights, torch.randn(count, pace.width, generator=generator) * 1e-3))
            self._pool[count] = sets
        return self._pool[count][layer % POOL]
