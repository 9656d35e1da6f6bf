"""Stages against transformers itself, whatever the family: its own experts behind the exchange.

    reference = Eager(path)                          # from_pretrained, eager experts and attention
    loss, grads = reference.run(rows, stage, scale)  # what the stage must give, B matrices being zero

With B = 0, the gradient of a LoRA B matrix is scale · dW · Aᵀ, where dW is the gradient of the frozen
weight: so the reference needs no adapters of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kt_ray.model.build import StageModel
from kt_ray.model.family import DISPATCHED
from tests.helpers.hf_reference import Row


class EagerExchange:
    """An exchange that computes on a transformers model's experts modules."""

    def __init__(self, experts: dict[int, Any]) -> None:
        self.experts = experts
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._dy: dict[tuple[int, int], Tensor] = {}

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def after(self, ready: Any) -> None:
        ready.synchronize()

    def submit_forward(
        self, layer: int, group: int, x: Tensor, ids: Tensor, weights: Tensor, keys: Tensor, keep: bool
    ) -> None:
        x, weights = x.float().requires_grad_(), weights.clone().requires_grad_()
        with torch.enable_grad():
            y = self.experts[layer](x, ids.long(), weights)
        self._graphs[layer, group] = (x, weights, y)

    def join_forward(self, layer: int, group: int) -> Tensor:
        return self._graphs[layer, group][2].detach().float()

    def submit_backward(self, layer: int, group: int, dy: Tensor) -> None:
        self._dy[layer, group] = dy

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        x, weights, y = self._graphs.pop((layer, group))
        y.backward(self._dy.pop((layer, group)))
        assert x.grad is not None and weights.grad is not None
        return x.grad, weights.grad


class Eager:
    """The family's own class with its own loader, frozen experts, in float32."""

    def __init__(self, path: Path, model: StageModel) -> None:
        self.causal = type(model.causal).from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        self.causal.requires_grad_(False).eval()
        self.base = self.causal.get_submodule(model.root)
        self.experts = {}
        called = self.base
        if called.config.model_type in DISPATCHED:
            called = copy.deepcopy(called)
            DISPATCHED[called.config.model_type](called, called.config)
        for layer in model.experts:
            found = [m for m in called.layers[layer].modules() if hasattr(m, "_apply_gate")]
            assert len(found) == 1
            self.experts[layer] = found[0]

    def run(
        self, rows: Sequence[Row], adapters: dict[str, Any], scale: float, aux: float = 0.0
    ) -> tuple[float, dict[str, Tensor]]:
        """Mean token loss, and the gradient of every LoRA B by canonical name; `aux`: coefficient of the
        routers' loss, with a single row."""
        weights = {}
        for name in adapters:
            if name.endswith(".lora_B.weight"):
                path = name.removesuffix(".lora_B.weight")
                weights[path] = self.causal.get_submodule(path).weight.requires_grad_()
        total, count = torch.zeros(()), 0
        for row in rows:
            asked = {"output_router_logits": True} if aux else {}
            out = self.causal(input_ids=torch.tensor([row.ids]), use_cache=False, **asked)
            labels = torch.tensor(row.labels)
            total = total + torch.nn.functional.cross_entropy(
                out.logits[0, :-1].float(), labels[1:], ignore_index=-100, reduction="sum"
            )
            count += int((labels[1:] != -100).sum())
        loss = total / count + (aux * out.aux_loss if aux else 0.0)
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        result = {}
        for (path, weight), grad in zip(weights.items(), grads, strict=True):
            a = adapters[f"{path}.lora_A.weight"].detach()
            dw = torch.zeros_like(weight) if grad is None else grad
            result[f"{path}.lora_B.weight"] = scale * dw @ a.T
        return float(loss.detach()), result
