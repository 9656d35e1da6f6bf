"""Run a pass through stages in one process, with the experts in torch: what the actors do, without them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kt_ray.batch import PassSpec
from kt_ray.config.schema import LoraConfig
from kt_ray.model.layer_loop import LayerLoop
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.placement.order import Op
from tests.helpers.hf_reference import Reference, Row, loss_tokens, micro_batch


@dataclass
class TorchExchange:
    """An ExpertExchange that computes on the reference's experts. Their LoRA gradients gather on its
    parameters.

    calls counts (direction, layer, group); lazy work: nothing runs before its join.
    """

    reference: Reference
    calls: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    expert_ids: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    _inbox: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    _graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    _dy: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def after(self, ready: Any) -> None:
        ready.synchronize()

    def submit_forward(
        self,
        layer: int,
        group: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        keys_T: Tensor,
        keep: bool,
    ) -> None:
        tokens = x_TH.shape[0]
        assert ids_TK.dtype == torch.int32 and keys_T.dtype == torch.int64
        assert weights_TK.dtype == torch.float32
        ids_TK = ids_TK.long()
        assert ids_TK.shape == weights_TK.shape and ids_TK.shape[0] == keys_T.shape[0] == tokens
        for t in (x_TH, ids_TK, weights_TK, keys_T):
            assert t.device.type == "cpu" and t.is_contiguous() and not t.requires_grad
        self.calls["forward", layer, group] += 1
        self._inbox[layer, group] = (x_TH, ids_TK, weights_TK, keys_T)
        for sample in (keys_T >> 32).unique().tolist():
            self.expert_ids.setdefault(layer, {})[sample] = ids_TK[(keys_T >> 32) == sample]

    def join_forward(self, layer: int, group: int) -> Tensor:
        x_TH, ids_TK, weights_TK, keys_T = self._inbox.pop((layer, group))
        x = x_TH.float().requires_grad_()
        w = weights_TK.clone().requires_grad_()
        with torch.enable_grad():
            y = self.reference.experts_output(layer, x, ids_TK, w, keys_T >> 32, keys_T & 0xFFFFFFFF)
        self._graphs[layer, group] = (x, w, y)
        return y.detach().float()

    def submit_backward(self, layer: int, group: int, dy_TH: Tensor) -> None:
        assert dy_TH.dtype == torch.float32 and dy_TH.device.type == "cpu" and not dy_TH.requires_grad
        self.calls["backward", layer, group] += 1
        self._dy[layer, group] = dy_TH

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        x, w, y = self._graphs.pop((layer, group))
        dy_TH = self._dy.pop((layer, group))
        assert dy_TH.shape == y.shape
        if y.requires_grad and y.shape[0]:
            y.backward(dy_TH)
        return tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in (x, w))  # type: ignore[return-value]


@dataclass
class Run:
    """What a pass gave."""

    loss: float
    logits: dict[int, Tensor]  # sample -> [length, V]
    grads: dict[str, Tensor]
    exchange: TorchExchange
    loops: list[LayerLoop]


def split(rows: Sequence[Row], groups: int, micro: int) -> tuple[tuple[list[Row], ...], ...]:
    """Rows in micro-batches of `micro`, dealt to groups in turn (later groups may be empty)."""
    batches = [list(rows[i : i + micro]) for i in range(0, len(rows), micro)]
    return tuple(tuple(batches[g::groups]) for g in range(groups))


def pass_spec(
    rows: Sequence[Row], *, groups: int = 1, micro: int = 2, kind: str = "train", step: int = 0, seed: int = 0
) -> PassSpec:
    """One replica's pass over these rows."""
    wave = tuple(tuple(micro_batch(batch) for batch in group) for group in split(rows, groups, micro))
    return PassSpec(1, step, kind, seed, (wave,), loss_tokens(rows), return_logits=kind == "eval")


def make_stages(
    path: object, cuts: Sequence[int], lora: LoraConfig, seed: int = 0, **extra: object
) -> list[Stage]:
    """Stages of a checkpoint cut at these layers, e.g. (0, 1, 3)."""
    return [
        Stage(StageSpec(str(path), (a, b), cuts[-1], seed=seed, lora=lora, **({"dtype": "float32"} | extra)))  # type: ignore[arg-type]
        for a, b in itertools.pairwise(cuts)
    ]


class DirectLink:
    """A StageExchange in one process: tensors by (what, receiving stage, group)."""

    def __init__(self, number: int, sent: dict[tuple[str, int, int], list[Tensor]]) -> None:
        self.number = number
        self.sent = sent

    def send_hidden(self, group: int, tensors: list[Tensor]) -> None:
        self.sent["hidden", self.number + 1, group] = tensors

    def receive_hidden(self, group: int) -> list[Tensor]:
        return self.sent.pop(("hidden", self.number, group))

    def send_grad(self, group: int, tensors: list[Tensor]) -> None:
        self.sent["grad", self.number - 1, group] = tensors

    def receive_grad(self, group: int) -> list[Tensor]:
        return self.sent.pop(("grad", self.number, group))


def forward(stages: Sequence[Stage], spec: PassSpec, exchange: TorchExchange) -> list[LayerLoop]:
    """Forward of all stages; the last loop has the summed token losses."""
    groups = range(len(spec.wave[0]))
    sent: dict[tuple[str, int, int], list[Tensor]] = {}
    loops = [stage.begin(spec, 0, exchange, DirectLink(n, sent)) for n, stage in enumerate(stages)]
    for stage, loop in zip(stages, loops, strict=True):
        start, stop = stage.spec.layers
        for g in groups:
            loop.run(Op("embed" if stage.first else "recv_hidden", start, g))
        for layer in range(start, stop):
            for g in groups:
                loop.run(Op("forward", layer, g))
            if layer in stage.moe_layers:
                for g in groups:
                    loop.run(Op("join", layer, g))
        for g in groups:
            loop.run(Op("loss" if stage.last else "send_hidden", stop - 1, g))
    return loops


def backward(stages: Sequence[Stage], loops: Sequence[LayerLoop], lowest: int = 0) -> None:
    """Backward of all stages down to layer `lowest`, groups in flight together."""
    for stage, loop in reversed(list(zip(stages, loops, strict=True))):
        groups = range(len(loop.groups))
        start, stop = stage.spec.layers
        if not stage.last:
            for g in groups:
                loop.run(Op("recv_grad", stop - 1, g))
        for layer in reversed(range(max(start, lowest), stop)):
            for g in groups:
                loop.run(Op("recompute", layer, g))
            for g in groups:
                loop.run(Op("backward", layer, g))
        if not stage.first:
            for g in groups:
                loop.run(Op("send_grad", start, g))


def run(stages: Sequence[Stage], spec: PassSpec, experts: Reference) -> Run:
    """A whole pass: loss, logits of evaluations, gradients of training by canonical name."""
    experts.set_pass(spec.step, spec.kind == "train")
    for tensor in experts.parameters.values():
        tensor.grad = None
    for stage in stages:
        stage.zero_grad()
    exchange = TorchExchange(experts)
    loops = forward(stages, spec, exchange)
    loss = loops[-1].loss_sum / max(spec.loss_tokens, 1)
    logits: dict[int, Tensor] = {}
    grads: dict[str, Tensor] = {}
    if spec.kind == "train":
        backward(stages, loops)
        for loop in loops:
            loop.recomputed.check()
        own = {name: p.grad for stage in stages for name, p in stage.parameters.items()}
        for name, tensor in experts.parameters.items():
            grad = own.get(name) if name in own else tensor.grad
            grads[name] = torch.zeros_like(tensor) if grad is None else grad.clone()
    else:
        for group, of_group in zip(spec.wave[0], loops[-1].logits(), strict=True):
            for batch, values in zip(group, of_group, strict=True):
                for row, sample in enumerate(batch.sample_ids.tolist()):
                    logits[sample] = values[row, : int(batch.lengths[row])]
    return Run(loss, logits, grads, exchange, loops)
