"""One stage of a Hugging Face MoE model on one device. Plain Python: no actors, no threads.

The caller runs the stage's program (kt_ray.placement.order): begin, then embed/receive_hidden,
forward, join, hidden/loss, receive_grad, recompute, backward, grad, per layer and group. Tensors that
go to the experts are on the CPU; those for other stages are handed over and taken on the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kt_ray.batch import PassSpec
from kt_ray.model.build import StageModel, build_stage_model
from kt_ray.model.decode import Decoder
from kt_ray.model.dropout import DropoutContext
from kt_ray.model.exchange import Exchange
from kt_ray.model.layer_loop import LayerLoop
from kt_ray.model.lora import initial_lora, inject_lora, resolve_targets
from kt_ray.model.not_finite import not_finite
from kt_ray.model.objective import preference_loss
from kt_ray.model.packing_probe import check_packing
from kt_ray.model.pissa import relative_to_weights
from kt_ray.model.probe import probe_layer
from kt_ray.model.recording import RecordedCall, check_carry, check_family
from kt_ray.model.routing import RouterWatch
from kt_ray.model.stage_metrics import Clock, Histogram
from kt_ray.model.stage_spec import StageSpec
from kt_ray.model.state import GroupState, MicroState
from kt_ray.model.token_loss import Head

__all__ = ["Stage", "StageSpec"]

# transformers sets torch's default dtype and device while it builds: one stage of a process at a time
_building = threading.Lock()


class Stage:
    """Builds, cuts, loads, adapts and probes; then runs passes.

    Args:
        spec: which model, which layers, which device, which LoRA.

    Attributes:
        spec: as given.
        first: whether this stage embeds.
        last: whether this stage has the head.
        moe_layers: own layers with routed experts.
        parameters: canonical name -> float32 LoRA parameter, gradients in `.grad`.
        principal: PiSSA: the parameters' initial values, on the CPU; else empty.
        num_experts, top_k, hidden_size, vocab_size: dimensions.
        state_shape: of the hidden state between layers after [b, s]: (H,), or (streams, H).
        dtype: of the hidden state.

    Raises:
        UserError: the model cannot be run, named before its weights are read.
    """

    def __init__(self, spec: StageSpec) -> None:
        with _building:
            self._build(spec)

    def _build(self, spec: StageSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.model: StageModel = build_stage_model(spec)
        model = self.model
        self.first, self.last = spec.first, spec.last
        self.moe_layers = tuple(sorted(model.experts))
        self.num_experts, self.top_k = model.num_experts, model.top_k
        self.hidden_size, self.vocab_size, self.dtype = model.hidden_size, model.vocab_size, model.dtype
        check_family(model.recorder, self.first, self.last, model.hidden_size, spec.device)
        self.state_shape = model.recorder.state_shape
        self._dropout = DropoutContext()
        self.parameters = self._inject(model)
        self._kept: dict[str, dict[str, Tensor]] = {}  # adapters for generation, by name
        # PiSSA's come from weights that are changed by taking them: kept for a restart and for the export.
        self.principal = {
            name: p.detach().cpu().clone()
            for name, p in self.parameters.items()
            if spec.lora.init.startswith("pissa")
        }
        self._scales = self._probe()
        self._head: Head | None = None
        if self.last:
            self._head = Head(
                model.recorder,
                model.base,
                model.causal,
                model.hidden_size,
                model.dtype,
                self.device,
                spec.loss_chunk,
            )
        self._clock = Clock(self.device)
        self._histogram = Histogram(self.num_experts)
        self._groups: list[GroupState] = []
        self._adapters_on = True
        self._watch: RouterWatch | None = None
        self._loop: LayerLoop | None = None
        self._spec: PassSpec | None = None
        self._packing_checked = False
        self.zero_grad()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers held, adapters included."""
        return self.model.weight_bytes

    def _inject(self, model: StageModel) -> dict[str, nn.Parameter]:
        prefixes = tuple(name + "." for name in model.names.values())
        targets = resolve_targets(self.spec.lora.target_modules, model.lora_names)
        return inject_lora(
            {name: model.layers[index] for index, name in model.names.items()},
            [name for name in targets if name.startswith(prefixes)],
            self.spec.lora,
            self.spec.seed,
            self._dropout,
            self.device,
        )

    def _probe(self) -> dict[int, float | None]:
        model = self.model
        b, s = 2, 4
        calls = model.recorder.record(self._inputs(torch.zeros(b, s, dtype=torch.int64)), None)
        self._check_carry(calls, (b, s, *self.state_shape))
        numbers = tuple(
            float(v) for v in model.causal.config.to_dict().values() if isinstance(v, float) and abs(v) > 0
        )
        return {
            layer: probe_layer(
                model.layers[layer],
                calls[layer],
                context,
                (b, s, *self.state_shape),
                numbers,
                seed=layer,
            )
            for layer, context in sorted(model.experts.items())
        }

    def _check_carry(self, calls: Mapping[int, RecordedCall], shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = [torch.randn(shape, generator=generator, dtype=torch.float32) for _ in range(2)]
        for context in self.model.experts.values():
            context.handler = lambda x, ids, weights: torch.zeros_like(x)
        try:
            check_carry(
                self.model.recorder, self.model.layers, calls, [h.to(self.device, self.dtype) for h in hidden]
            )
        finally:
            for context in self.model.experts.values():
                context.handler = None

    def probe(self) -> dict[int, float | None]:
        """MoE layer -> c of h_out = h_partial + c·y, or None where the layer is not affine in y."""
        return dict(self._scales)

    def _inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """What the inner model is given: token ids on every stage (see BlankEmbedding)."""
        return {"input_ids": input_ids.to(self.device)}

    # ------------------------------------------------------------------ a pass

    def begin(self, spec: PassSpec, replica: int, exchange: Exchange) -> None:
        """Start a pass: forget the last one, record every micro-batch's call arguments."""
        self._clock.reset()
        self._histogram.reset()
        self._spec = spec
        self._groups = []
        self._switch_adapters(spec.adapters)
        wanted = spec.routing or spec.router_slopes is not None
        if wanted and self._watch is None:
            model = self.model
            self._watch = RouterWatch(model.causal, model.layers, self.top_k, self.num_experts)
        if self._watch is not None:
            self._watch.reset(wanted)
        with self._clock.device("attention"):
            for group in spec.waves[replica]:
                self._groups.append(
                    GroupState([self._record(MicroState.create(mb, self.device)) for mb in group])
                )
        self._loop = LayerLoop(
            self.model,
            self._scales,
            self._dropout,
            spec,
            self._groups,
            exchange,
            self._clock,
            self._histogram,
            self.device,
            self._watch,
        )

    def _switch_adapters(self, on: bool) -> None:
        """PEFT's layers with or without their adapters; gradients are wanted of both kinds of pass."""
        from peft.tuners.tuners_utils import BaseTunerLayer  # slow to import, and only needed here

        if on == self._adapters_on:
            return
        for layer in self.model.layers.values():
            for module in layer.modules():
                if isinstance(module, BaseTunerLayer):
                    module.enable_adapters(on)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self._adapters_on = on

    def _record(self, micro: MicroState) -> MicroState:
        ids = torch.from_numpy(micro.batch.input_ids)
        start, stop = self.spec.layers

        def note(index: int, hidden: Tensor) -> Tensor:
            if index == 0 and self.first:
                micro.embedded = hidden
            return hidden

        inputs = self._inputs(ids)
        if micro.documents is not None:
            if not self._packing_checked:
                self._check_packing()
            # transformers makes a block-diagonal mask of position ids that restart (masking_utils)
            inputs["position_ids"] = micro.documents
        calls = self.model.recorder.record(inputs, micro.mask, note)
        micro.calls = {layer: calls[layer] for layer in range(start, stop)}
        return micro

    def _check_packing(self) -> None:
        model = self.model
        for context in model.experts.values():
            context.handler = lambda x, ids, weights: torch.zeros_like(x)
        try:
            check_packing(model.recorder, model.layers, self.state_shape, self.device)
        finally:
            for context in model.experts.values():
                context.handler = None
        self._packing_checked = True

    def embed(self, group: int) -> None:
        """First stage: the embedded tokens become the group's hidden state."""
        state = self._groups[group]
        hidden = []
        for micro in state.micro:
            assert micro.embedded is not None, "embed runs once per group, on the first stage"
            hidden.append(micro.embedded)
            micro.embedded = None
        state.hidden = hidden

    def receive_hidden(self, group: int, tensors: Iterable[Tensor]) -> None:
        """Hidden states [b, s, *state_shape] of a group, from the stage before."""
        self._groups[group].hidden = self._take(group, tensors)

    def forward(self, layer: int, group: int) -> None:
        """Run a layer for a group; MoE layers submit their tokens."""
        self._running.forward(layer, group)

    def join(self, layer: int, group: int) -> None:
        """Wait for the experts of a layer and group, and finish the layer."""
        self._running.join(layer, group)

    def hidden(self, group: int) -> list[Tensor]:
        """Hand over a group's hidden states [b, s, *state_shape], one per micro-batch, on the device."""
        return self._give(group, "hidden")

    def loss(self, group: int) -> float:
        """Last stage: sum of the group's token losses (float64).

        A training pass also keeps dH / loss_tokens for the backward; an evaluation with
        `return_logits` keeps the logits.
        """
        assert self._head is not None and self._spec is not None, (
            "loss belongs to the last stage, after begin"
        )
        state, spec = self._groups[group], self._spec
        hidden = state.hidden
        if hidden is None:
            raise RuntimeError(f"loss of group {group} came before its last layer")
        scale = 1.0 / max(spec.loss_tokens, 1) if spec.kind == "train" else None
        values: list[float] = []
        logps: list[np.ndarray] = []
        grads, logits = [], []
        with self._clock.device("loss"):
            for micro, h in zip(state.micro, hidden, strict=True):
                if spec.objective is not None or spec.return_logps:
                    value, grad, of_rows = preference_loss(
                        self._head, h, micro.batch, spec.objective, scale is not None
                    )
                    logps.append(of_rows)
                else:
                    labels = torch.from_numpy(micro.batch.labels).to(self.device)
                    value, grad = self._head.loss(h, labels, scale)
                values.append(value)
                if grad is not None:
                    grads.append(grad)
                if spec.return_logits:
                    with torch.no_grad():
                        logits.append(self._head.logits(h).float().cpu())
        total = 0.0
        for value in values:
            total += value
        if not math.isfinite(total):
            raise not_finite(total, values, state, group, spec.step)
        state.hidden = None
        state.grads = grads if spec.kind == "train" else None
        state.logits = logits if spec.return_logits else None
        state.losses, state.logps = values, logps
        return total

    def logps(self, group: int) -> list[np.ndarray]:
        """Last stage: float64 [b] log-probabilities of each micro-batch's rows, when asked for."""
        return self._groups[group].logps

    def routing(self) -> np.ndarray | None:
        """After a pass with `routing`: float64 [2, E], how often each was chosen, its probabilities."""
        if self._watch is None or self._spec is None or not self._spec.routing:
            return None
        return np.stack([self._watch.counts, self._watch.probabilities])

    def losses(self, group: int) -> list[float]:
        """Last stage: the summed token losses of each of a group's micro-batches."""
        return self._groups[group].losses

    def logits(self, group: int) -> list[Tensor]:
        """Float32 logits [b, s, V] of a group's micro-batches (padding included), on the CPU."""
        logits = self._groups[group].logits
        if logits is None:
            raise RuntimeError("logits are kept by a pass with return_logits, after loss")
        return logits

    def receive_grad(self, group: int, tensors: Iterable[Tensor]) -> None:
        """Gradients [b, s, *state_shape] of a group's hidden states, from the stage after."""
        self._groups[group].grads = self._take(group, tensors)

    def recompute(self, layer: int, group: int) -> None:
        """Submit the experts' dy and run the layer again under grad.

        Raises:
            RuntimeError: the recomputation chose other experts than the forward.
        """
        self._running.recompute(layer, group)

    def backward(self, layer: int, group: int) -> None:
        """Join the experts' gradients; accumulate the parameters' and give dH to the layer below."""
        self._running.backward(layer, group)

    def grad(self, group: int) -> list[Tensor]:
        """Hand over a group's gradients at this stage's input, on the device."""
        return self._give(group, "grads")

    def decoder(self) -> Decoder:
        """For generation: caches of its own, this stage's weights and adapters."""
        return Decoder(
            self.model,
            self._scales,
            self._dropout,
            self._head,
            self.device,
            self.first,
            self.parameters,
            self._kept,
        )

    def keep(self, name: str, *, copy: bool) -> None:
        """Keep what the parameters hold now as an adapter for generation; `copy` if they will be changed."""
        self._kept[name] = {n: p.data.clone() if copy else p.data for n, p in self.parameters.items()}

    # ------------------------------------------------------------- parameters

    def zero_grad(self) -> None:
        """Set every gradient to zeros (allocated from the start, so that a sum always has all of them)."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def initial_parameters(self) -> dict[str, Tensor]:
        """Every parameter's value before the first step."""
        spec = self.spec
        return {
            name: self.principal[name]
            if name in self.principal
            else initial_lora(spec.seed, name, p.shape, spec.lora.init)
            for name, p in self.parameters.items()
        }

    def adapter(self) -> dict[str, Tensor]:
        """The adapter of the unchanged weights, on the CPU: the parameters, or PiSSA's of rank 2r."""
        now = {name: p.detach().cpu().clone() for name, p in self.parameters.items()}
        return relative_to_weights(now, self.principal) if self.principal else now

    @torch.no_grad()
    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Copy new values into parameters of these names."""
        for name, value in values.items():
            self.parameters[name].copy_(value)

    def metrics(self) -> dict[str, Any]:
        """Figures of the last pass.

        Returns:
            seconds: {"attention", "experts_wait", "loss"}; expert_tokens: {MoE layer: tokens per expert}.
        """
        seconds = self._clock.read()
        return {
            "seconds": {term: seconds.get(term, 0.0) for term in ("attention", "experts_wait", "loss")},
            "expert_tokens": {
                layer: counts.tolist() for layer, counts in sorted(self._histogram.counts.items())
            },
        }

    # ---------------------------------------------------------------- helpers

    @property
    def _running(self) -> LayerLoop:
        if self._loop is None:
            raise RuntimeError("begin a pass first")
        return self._loop

    def _take(self, group: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        received = [t.to(self.device, self.dtype, non_blocking=True) for t in tensors]
        expected = [(*m.batch.input_ids.shape, *self.state_shape) for m in self._groups[group].micro]
        if [tuple(t.shape) for t in received] != expected:
            raise ValueError(
                f"group {group} takes tensors of shapes {expected}, got {[tuple(t.shape) for t in received]}"
            )
        return received

    def _give(self, group: int, what: str) -> list[Tensor]:
        state = self._groups[group]
        tensors: Sequence[Tensor] | None = getattr(state, what)
        if tensors is None:
            raise RuntimeError(f"group {group} has no {what} to hand over yet")
        setattr(state, what, None)
        return [t.detach() for t in tensors]
