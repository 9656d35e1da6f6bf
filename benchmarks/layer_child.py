"""One implementation of an expert layer in a process of its own, started by moe_layer.py.

    python layer_child.py '{"impl": "torch", "case": {...}}'

    kt_ray      this project's engine, on any instruction set, with or without LoRA
    torch       factored LoRA as a careful user writes it: a loop over experts, the adapters in the weights'
                dtype and as two thin products (never W + BA), autograd for the rest
    peft        PEFT's target_parameters on a transformers experts module: W + BA anew in every forward
    grouped_mm  the same transformers module, frozen, without LoRA
    kt          KTransformers, in kt_child.py

A question is {"isa": ..., "lora": ..., "int8_products": ...}; the answer {"forward_ms", "backward_ms"}: means
of the case's calls. Ours adds {"predict_ms"} for a few tokens: a forward that keeps nothing, as generation
does.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from child import Message, serve_built
from layer_inputs import FEW_TOKENS, Case, Inputs, Stored, make_inputs, make_weights
from torch import Tensor, nn
from torch.nn.functional import linear, silu

# Forward of one call (a number below case.calls) and backward of what it returned.
Step = tuple[Callable[[int], Any], Callable[[int, Any], None]]


def measure(step: Step, calls: int) -> Message:
    """Run all forwards, then all backwards."""
    forward, backward = step
    begin = time.perf_counter()
    states = [forward(call) for call in range(calls)]
    middle = time.perf_counter()
    for call, state in enumerate(states):
        backward(call, state)
    end = time.perf_counter()
    return {"forward_ms": (middle - begin) / calls * 1e3, "backward_ms": (end - middle) / calls * 1e3}


class Native:
    """The engine; one per instruction set, all on the same weights."""

    def __init__(self, case: Case) -> None:
        from kt_ray.native import Engine, ExpertLora, ExpertWeights

        self.case, self.inputs = case, make_inputs(case)
        self.engines: dict[tuple[str, bool], Engine] = {}
        gate, up, down = (self._matrix(stored) for stored in make_weights(case))
        self.weights = ExpertWeights(gate, up, down, layer=0, expert_ids=tuple(range(case.experts)))
        self.lora = None
        if self.inputs.lora:
            gate_a, gate_b, up_a, up_b, down_a, down_b = self.inputs.lora
            self.lora = ExpertLora(gate_a, gate_b, up_a, up_b, down_a, down_b, scale=1.0)
        self.grads = self.lora.zeros_like() if self.lora else None
        # Results go to the same memory again, as an expert actor's do.
        self.y, self.dx = torch.empty_like(self.inputs.dy), torch.empty_like(self.inputs.dy)
        self.dw = torch.empty(self.inputs.routings[0][1].shape)

    @staticmethod
    def _matrix(stored: Stored) -> Any:
        if stored.format in ("f32", "bf16"):
            return stored.data
        from kt_ray.native.matrix import ExpertMatrix

        return ExpertMatrix(stored.format, stored.data, stored.shape, stored.scales, stored.block)

    def __call__(self, question: Message) -> Message:
        """Measure with the asked instruction set."""
        from kt_ray.hardware.describe import this_host
        from kt_ray.native import Engine

        key = isa, int8_products = question["isa"], question["int8_products"]
        if key not in self.engines:
            cpus = this_host().cpus  # a core for each thread, as in a run
            self.engines[key] = Engine(isa, self.case.threads, cpus, int8_products=int8_products)
        engine, lora = self.engines[key], self.lora if question["lora"] else None
        inputs, weights = self.inputs, self.weights

        def forward(call: int, save: bool = True) -> Any:
            ids, router = inputs.routings[call]
            return engine.forward(weights, inputs.x, ids, router, lora=lora, save=save, out=self.y)[1]

        def backward(call: int, saved: Any) -> None:
            grads, out = self.grads if lora else None, (self.dx, self.dw)
            engine.backward(weights, saved, inputs.dy, lora=lora, lora_grads=grads, out=out)
            saved.release()

        answer = measure((forward, backward), self.case.calls)
        if self.case.tokens <= FEW_TOKENS:
            predict = (functools.partial(forward, save=False), lambda call, saved: None)
            answer["predict_ms"] = measure(predict, self.case.calls)["forward_ms"]
        return answer | {"isa": engine.isa, "scratch_bytes": engine.scratch_bytes}


class Autograd:
    """What all torch peers share: gradients of x and of the router weights, adapters' gradients added up."""

    note = ""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(case.threads)
        self.case, self.inputs = case, make_inputs(case)
        self.x = self.inputs.x.requires_grad_()
        self.dy = self.inputs.dy.to(case.dtype)
        self.routings = [(ids, router.requires_grad_()) for ids, router in self.inputs.routings]
        self.build(make_weights(case), self.inputs)

    def build(self, weights: tuple[Stored, Stored, Stored], inputs: Inputs) -> None:
        """Make the module."""
        raise NotImplementedError

    def layer(self, ids: Tensor, router: Tensor) -> Tensor:
        """y [T, H] of x."""
        raise NotImplementedError

    def __call__(self, question: Message) -> Message:
        """Measure."""
        answer = measure(
            (
                lambda call: self.layer(*self.routings[call]),
                lambda _, y: y.backward(self.dy.to(y.dtype)),
            ),
            self.case.calls,
        )
        for leaf in (self.x, *(router for _, router in self.routings)):
            leaf.grad = None
        return answer | {"note": self.note}


class FactoredTorch(Autograd):
    """A loop over experts."""

    def build(self, weights: tuple[Stored, Stored, Stored], inputs: Inputs) -> None:
        self.matrices = [stored.data for stored in weights]
        self.note = f"adapters {str(self.case.dtype).removeprefix('torch.')}"
        self.adapters = [t.to(self.case.dtype).requires_grad_() for t in inputs.lora or []]

    def layer(self, ids: Tensor, router: Tensor) -> Tensor:
        # Once per call: backward of each expert's own selection would fill zeros for all of them.
        adapters = [t.unbind(0) for t in self.adapters]

        def project(z: Tensor, projection: int, e: int) -> Tensor:
            out = linear(z, self.matrices[projection][e])
            if not adapters:
                return out
            a, b = adapters[2 * projection][e], adapters[2 * projection + 1][e]
            return out + linear(linear(z, a), b)

        y = torch.zeros(self.x.shape, dtype=self.case.dtype)
        for e in range(self.case.experts):
            token, slot = torch.where(ids == e)
            if not len(token):
                continue
            z = self.x[token]
            act = silu(project(z, 0, e)) * project(z, 1, e)
            y = y.index_add(0, token, project(act, 2, e) * router[token, slot, None].to(y.dtype))
        return y


class GroupedMM(Autograd):
    """A transformers experts module, frozen."""

    note = "no LoRA: experts frozen"

    def build(self, weights: tuple[Stored, Stored, Stored], inputs: Inputs) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        h, i, e, k = self.case.dims
        config = MixtralConfig(
            hidden_size=h, intermediate_size=i, num_local_experts=e, num_experts_per_tok=k, hidden_act="silu"
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            experts: Any = MixtralExperts(config)
        gate, up, down = (stored.data for stored in weights)
        experts.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1), requires_grad=False)
        experts.down_proj = nn.Parameter(down, requires_grad=False)
        self.root: Any = nn.Module()
        self.root.experts = experts

    def layer(self, ids: Tensor, router: Tensor) -> Tensor:
        y: Tensor = self.root.experts(self.x, ids, router)
        return y


class Peft(GroupedMM):
    """PEFT's LoRA on the module's parameters; gate and up share A."""

    note = "adapters float32; gate and up share A; W + BA made anew in every forward"

    def build(self, weights: tuple[Stored, Stored, Stored], inputs: Inputs) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().build(weights, inputs)
        if not self.case.rank:
            raise ValueError("rank 0: nothing to adapt")
        config = LoraConfig(
            r=self.case.rank,
            lora_alpha=self.case.rank,
            target_modules=[],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        )
        inject_adapter_in_model(config, self.root)
        trained = [p for p in self.root.parameters() if p.requires_grad]
        if not trained:
            raise RuntimeError("PEFT adapted nothing")
        for parameter in trained:
            parameter.data = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5


IMPLS: dict[str, Callable[[Case], Callable[[Message], Message]]] = {
    "kt_ray": Native,
    "torch": FactoredTorch,
    "peft": Peft,
    "grouped_mm": GroupedMM,
}


def main() -> None:
    asked = json.loads(sys.argv[1])
    serve_built(lambda: IMPLS[asked["impl"]](Case(**asked["case"])))


if __name__ == "__main__":
    main()
