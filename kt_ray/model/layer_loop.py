"""The layer loop: one pass of one replica over one stage, operation by operation.

The attention worker walks its program (kt_ray.placement.order) and hands every operation to `LayerLoop.run`.
`LayerLoop.OPERATIONS` names the method of each operation.

Forward runs without gradients. The experts hook collects the tokens of every micro-batch of a group; at the
last one it submits the whole group, and the layer runs on with zeros in the experts' place, so that its
shared expert overlaps with the routed ones; the join adds c·y. Backward submits dy = c·dH first and
recomputes the layer under grad meanwhile; one autograd.backward per micro-batch then takes dH, dX and dw
together. What is recomputed meanwhile is the whole group, or only its first micro-batch: then the others
follow one by one, when dX and dw are there, and one graph per group is held. Products whose outputs are
known, or not needed, are not repeated (kt_ray.model.known_outputs). Where graphs are retained, forward makes
them, and nothing is recomputed.

A layer that is not affine in y (kt_ray.model.layer_checks) cannot be finished from h_partial. Its forward
stops at the hook, so the experts get their tokens as early as elsewhere, and the join runs the layer again
with y. The recomputation takes y as a leaf, whose gradient is dy: for it every micro-batch is recomputed
before dy is submitted, and those that are not held once more afterwards. Where graphs are retained, the join
makes them.

Shapes: b rows of s positions, N = b·s, T valid tokens of a group, T_i of its micro-batch i, H hidden, K
experts per token, V vocabulary. The hidden state between layers is [b, s, H], or [b, s, streams, H] with
hyper-connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import MicroBatch, PassSpec, TokenLoss, Tops
from kt_ray.errors import BadStep
from kt_ray.gpu_turns import turn
from kt_ray.model.build import StageModel
from kt_ray.model.clock import Clock
from kt_ray.model.dropout import DropoutContext
from kt_ray.model.hidden_shelf import HostShelf, Kept, KeptOnDevice
from kt_ray.model.known_outputs import KnownOutputs
from kt_ray.model.layer_calls import Handler
from kt_ray.model.lora import AdapterSwitch
from kt_ray.model.policy_losses import token_loss
from kt_ray.model.preference_losses import preference_loss
from kt_ray.model.routing import RouterWatch
from kt_ray.model.state import Graph, GroupState, MicroState, RecomputedRoutes, Routes
from kt_ray.model.token_exchange import ExpertExchange, TokenExchange
from kt_ray.model.token_loss import Head
from kt_ray.placement.order import Op
from kt_ray.placement.plan_types import ALL_LAYERS, BackwardPart
from kt_ray.placement.weight_slots import WeightSlots


class StageExchange(Protocol):
    """Hidden states to the next stage, gradients to the one before (kt_ray.transport.links.StageLink).

    Tensors are one per micro-batch of the group, on the stage's device.
    """

    def send_hidden(self, group: int, tensors: list[Tensor]) -> None: ...

    def receive_hidden(self, group: int) -> list[Tensor]: ...

    def send_grad(self, group: int, tensors: list[Tensor]) -> None: ...

    def receive_grad(self, group: int) -> list[Tensor]: ...


class _Stop(Exception):
    """Leaves a layer at its experts hook."""


class LayerLoop:
    """One replica's pass over one stage.

    shelf: where hidden states wait for backward; None = on the device. slots: of streamed layers.
    retain_layers: graphs of forward wait for backward. whole_groups: `recompute` runs a whole group; else its
        first micro-batch, and `backward` the others.
    known: by layer, of which products a recomputed layer need not repeat. passed: what backward passes.
    adapters: which LoRA the layers use.
    """

    # Kind -> method. Names, since bound methods kept in the loop would keep a finished pass alive until the
    # next cyclic collection: its memory would come on top of the next pass's.
    OPERATIONS: ClassVar[Mapping[str, str]] = {
        kind: kind
        for kind in (
            *("embed", "recv_hidden", "forward", "join", "send_hidden", "loss"),
            *("recv_grad", "recompute", "backward", "send_grad"),
        )
    }

    def __init__(
        self,
        model: StageModel,
        scales: dict[int, float | None],
        adapters: AdapterSwitch,
        dropout: DropoutContext,
        head: Head | None,
        spec: PassSpec,
        groups: list[GroupState],
        experts: ExpertExchange,
        stages: StageExchange | None,
        clock: Clock,
        watch: RouterWatch | None = None,
        shelf: HostShelf | None = None,
        slots: WeightSlots | None = None,
        retain_layers: bool = False,
        whole_groups: bool = True,
        known: Mapping[int, KnownOutputs] | None = None,
        passed: BackwardPart = ALL_LAYERS,
    ) -> None:
        self.model, self.device = model, model.device
        self.adapters = adapters
        self.scales, self.dropout, self.head = scales, dropout, head
        self.spec = spec
        self.groups = groups
        self.experts = experts
        self.tokens = TokenExchange(experts, self.device)
        self.stages = stages
        self.clock = clock
        self.watch = watch
        self.shelf = shelf
        self.slots = slots or WeightSlots((), 0)
        self.whole_groups = whole_groups
        self.known = known or {}
        self.passed = passed
        self._keep: Callable[[Tensor], Kept] = KeptOnDevice if shelf is None else shelf.keep
        self.train = spec.kind == "train"
        self.retain_layers = retain_layers and self.train
        self.loss_sum = 0.0  # of the losses so far (last stage)
        self.recomputed = RecomputedRoutes()  # of this pass

    def run(self, op: Op) -> None:
        """Do one operation of the stage's program. Raises ValueError: the loop has no such operation."""
        method = self.OPERATIONS.get(op.kind)
        if method is None:
            raise ValueError(f"operation {op} is not known to the {type(self).__name__}")
        getattr(self, method)(op.layer, op.group)

    # ------------------------------------------------------- the stage's ends

    def embed(self, layer: int, group: int) -> None:
        """First stage: the embedded tokens become the group's hidden state."""
        state = self.groups[group]
        state.hidden = []
        for micro in state.micro:
            assert micro.embedded is not None, "embed runs once per group, on the first stage"
            state.hidden.append(micro.embedded)
            micro.embedded = None

    def recv_hidden(self, layer: int, group: int) -> None:
        """Take a group's hidden states from the stage before."""
        assert self.stages is not None
        self.groups[group].hidden = self._checked(group, self.stages.receive_hidden(group))

    def send_hidden(self, layer: int, group: int) -> None:
        """Hand a group's hidden states to the next stage."""
        assert self.stages is not None
        state = self.groups[group]
        hidden = require(state.hidden, "send_hidden", layer, group)
        state.hidden = None
        self.stages.send_hidden(group, [h.detach() for h in hidden])

    def recv_grad(self, layer: int, group: int) -> None:
        """Take the gradients of a group's hidden states from the next stage."""
        assert self.stages is not None
        self.groups[group].grads = self._checked(group, self.stages.receive_grad(group))

    def send_grad(self, layer: int, group: int) -> None:
        """Hand the gradients at this stage's input to the stage before."""
        assert self.stages is not None
        state = self.groups[group]
        grads = require(state.grads, "send_grad", layer, group)
        state.grads = None
        self.stages.send_grad(group, [g.detach() for g in grads])

    def _checked(self, group: int, tensors: list[Tensor]) -> list[Tensor]:
        shapes = [tuple(t.shape) for t in tensors]
        expected = [
            (*m.batch.input_ids.shape, *self.model.capture.state_shape) for m in self.groups[group].micro
        ]
        if shapes != expected:
            raise ValueError(f"group {group} takes tensors of shapes {expected}, got {shapes}")
        return [self._received(t) for t in tensors]

    def _received(self, tensor: Tensor) -> Tensor:
        """Of another stage, where this loop has its own."""
        return tensor.to(self.device, self.model.dtype, non_blocking=True)

    def loss(self, layer: int, group: int) -> None:
        """Last stage: add the sum of the group's losses (float64) to `loss_sum`.

        A training pass also keeps dH / loss_tokens for the backward; an evaluation with
        `return_logits` keeps the logits.

        Raises:
            BadStep: the loss is not finite.
            ValueError: a TokenLoss lacks an input.
        """
        assert self.head is not None, "loss belongs to the last stage"
        state, spec = self.groups[group], self.spec
        hidden = require(state.hidden, "loss", layer, group)
        scale = 1.0 / max(spec.loss_tokens, 1) if self.train else None
        grads, logits = [], []
        with self.clock.device("loss"):
            for micro, h in zip(state.micro, hidden, strict=True):
                of_parts = [self._part_loss(state, *part, scale) for part in by_part(micro.batch, h)]
                if self.train:
                    grads.append(joined_parts([grad for grad in of_parts if grad is not None], h))
                if spec.return_logits:
                    with torch.no_grad():
                        logits.append(self.head.logits(h.to(self.device)).float().cpu())
        total = 0.0
        for value in state.losses:  # not sum(), which compensates from Python 3.12 on
            total += value
        if not math.isfinite(total):
            raise _not_finite(total, state, group, spec)
        state.hidden = None
        state.grads = grads if self.train else None
        state.logits = logits if spec.return_logits else None
        self.loss_sum += total

    def _part_loss(
        self, state: GroupState, batch: MicroBatch, h: Tensor, scale: float | None
    ) -> Tensor | None:
        """Notes the summed loss of rows of one training; its gradient at h, [b, s, H]."""
        assert self.head is not None
        objective = self.spec.objective_of(batch)
        if isinstance(objective, TokenLoss):
            value, grad, logps_BS, top = token_loss(
                self.head, h, batch, objective, scale, self.spec.return_top
            )
            state.token_logps.append(logps_BS)
            state.tops += [] if top is None else [top]
        elif objective is not None or self.spec.return_logps:
            value, grad, logps_b = preference_loss(self.head, h, batch, objective, self.train)
            state.logps.append(logps_b)
        else:
            labels = torch.from_numpy(batch.labels).to(self.device)
            value, grad = self.head.loss(h, labels, scale)
        state.losses.append(value)
        return grad

    def keeps(self, layer: int) -> bool:
        """Whether this pass comes back through a layer."""
        return self.train and layer >= self.passed.lowest

    # ---------------------------------------------------------------- forward

    def forward(self, layer: int, group: int) -> None:
        """Run a layer on every micro-batch of a group; submit its tokens if it has experts."""
        state = self.groups[group]
        hidden = require(state.hidden, "forward", layer, group)
        if self.keeps(layer) and not self.retain_layers:
            state.layer_inputs[layer] = [self._keep(h) for h in hidden]
        context = self.model.experts.get(layer)
        grown = self.retain_layers and layer >= self.passed.inputs
        if context is None:
            with torch.no_grad(), self._recorded(layer, state), self.clock.device("attention"):
                state.hidden = [
                    self._grown(layer, state, m, h) if grown else self._run(layer, m, h)
                    for m, h in zip(state.micro, hidden, strict=True)
                ]
            return
        collected: list[tuple[Tensor, Tensor, Tensor]] = []
        affine = self.scales[layer] is not None

        def asked(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
            collected.append((x_TH.detach(), ids_TK, weights_TK.detach()))
            if len(collected) == len(state.micro):
                self._submit_forward(layer, group, collected)

        def handler(hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
            asked(*valid_rows(state.micro[len(collected)], hidden_NH, ids_NK, weights_NK))
            if not affine:
                raise _Stop
            return torch.zeros_like(hidden_NH)

        if not state.micro:
            self._submit_forward(layer, group, [])
        out: list[Tensor] = []
        recorded, timed = self._recorded(layer, state), self.clock.device("attention")
        with torch.no_grad(), recorded, context.handled_by(handler), timed:
            for micro, h in zip(state.micro, hidden, strict=True):
                try:
                    if grown and affine:
                        out.append(self._grown(layer, state, micro, h, asked=asked))
                    else:
                        out.append(self._run(layer, micro, h))
                except _Stop:
                    out.append(h)
                if self.watch is not None and self.spec.routing and layer in self.watch.layers:
                    self.watch.count(micro.rows)
        if len(collected) != len(state.micro):
            raise RuntimeError(
                f"layer {layer} called its experts {len(collected)} times for {len(state.micro)} inputs"
            )
        self.tokens.settle()
        state.hidden = out

    def _recorded(self, layer: int, state: GroupState) -> AbstractContextManager[None]:
        """Inside, what is kept of the layer's products is."""
        if self.retain_layers or not self.keeps(layer) or layer not in self.known:
            return nullcontext()
        kept = state.known_outputs[layer] = []
        return self.known[layer].recorded(lambda output: kept.append(self._keep(output)))

    def _submit_forward(self, layer: int, group: int, collected: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        model, state = self.model, self.groups[group]
        x = [part for part, _, _ in collected] or [torch.empty(0, model.hidden_size, dtype=model.dtype)]
        ids = [part.to(torch.int32) for _, part, _ in collected]
        ids = ids or [torch.empty(0, model.top_k, dtype=torch.int32)]
        weights = [part for _, _, part in collected] or [torch.empty(0, model.top_k, dtype=torch.float32)]
        if self.keeps(layer) and not self.retain_layers:
            state.routes[layer] = [Routes(*each) for each in zip(ids, weights, strict=True)]
        keys = [m.keys_T for m in state.micro] or [torch.empty(0, dtype=torch.int64)]
        # In the middle of the layer: without overlap the answer is awaited here.
        with self.clock.host("experts_wait"):
            floats = [w.float() for w in weights]
            self.tokens.submit_forward(layer, group, x, ids, floats, keys, self.keeps(layer))

    def join(self, layer: int, group: int) -> None:
        """Wait for a group's experts and finish the layer."""
        state = self.groups[group]
        hidden = require(state.hidden, "join", layer, group)
        with self.clock.host("experts_wait"):
            parts = self.tokens.join_forward(layer, group).split(state.sizes)
        scale = self.scales[layer]
        with torch.no_grad(), self.clock.device("attention"):
            if scale is not None:
                state.hidden = [
                    add_answers(*each, scale) for each in zip(state.micro, hidden, parts, strict=True)
                ]
                return
            if self.keeps(layer) and not self.retain_layers:
                state.expert_outputs[layer] = list(parts)
            context = self.model.experts[layer]
            state.hidden = []
            for micro, h, y_TH in zip(state.micro, hidden, parts, strict=True):
                if self.retain_layers and self.keeps(layer):
                    state.hidden.append(self._grown(layer, state, micro, h, y_TH))
                    continue
                with context.handled_by(answer_with(micro, y_TH)):
                    state.hidden.append(self._run(layer, micro, h))

    # --------------------------------------------------------------- backward

    def recompute(self, layer: int, group: int) -> None:
        """Submit dy, and run the layer again under grad: for the whole group, or its first micro-batch; not
        where its graphs are retained, nor where only its experts train, and nothing below."""
        state = self.groups[group]
        grads = require(state.grads, "recompute", layer, group)
        self.slots.hold(layer)
        ahead = 0 if layer < self.passed.inputs else len(state.micro) if self.whole_groups else 1
        scale = self.scales.get(layer)
        if not self.retain_layers and (ahead or scale is None):
            self._fetch(layer, state, 0)
        if layer in self.model.experts:
            if scale is None:  # dy is the gradient at y, so every graph is needed now
                dy = [
                    self._leaf_gradient(layer, group, i, grad, keep=i < ahead) for i, grad in enumerate(grads)
                ]
                self._submit_backward(layer, group, dy, 1.0)
                return
            dy = [m.take(g.reshape(-1, g.shape[-1])).float() for m, g in zip(state.micro, grads, strict=True)]
            self._submit_backward(layer, group, dy, scale)
        if not self.retain_layers:
            state.graphs[layer] = [self._recomputed(layer, group, i) for i in range(len(state.micro[:ahead]))]

    def _leaf_gradient(self, layer: int, group: int, number: int, grad: Tensor, *, keep: bool) -> Tensor:
        """dy of a micro-batch of a layer that is not affine; keep: its graph is one of those held."""
        state = self.groups[group]
        if self.retain_layers:
            graph, keep = state.graphs[layer][number], True
            self._use(layer, state.micro[number])
        else:
            graph = self._recomputed(layer, group, number)
            if keep:
                state.graphs.setdefault(layer, []).append(graph)
        assert graph.y_TH is not None
        with self.clock.device("attention"):
            return torch.autograd.grad(graph.out, graph.y_TH, grad, retain_graph=keep)[0]

    def _recomputed(self, layer: int, group: int, number: int) -> Graph:
        """The graph of a micro-batch's layer."""
        state = self.groups[group]
        micro, outputs = state.micro[number], state.known_outputs.get(layer)
        h = state.layer_inputs[layer][number].take()
        known = self.known.get(layer, KnownOutputs()).given(outputs[number].take() if outputs else None)
        self._fetch(layer, state, number + 1)

        def asked(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
            again = Routes(ids_TK, weights_TK.detach())
            self.recomputed.compare(layer, group, state.routes[layer][number], again)

        y_TH = state.expert_outputs[layer][number] if layer in state.expert_outputs else None
        with known, self.clock.device("attention"):
            return self._grow(layer, micro, h, y_TH, asked)

    def _grow(
        self,
        layer: int,
        micro: MicroState,
        h: Tensor,
        y_TH: Tensor | None,
        asked: Callable[[Tensor, Tensor, Tensor], None] | None,
    ) -> Graph:
        """The graph of a layer's call on a micro-batch. The caller measures the time.

        Args:
            y_TH: what its experts gave, where dy is the gradient at it; None = zeros in its place.
            asked: gets what its experts are asked, [T_i, H], [T_i, K] and [T_i, K].
        """
        leaf = h.detach().requires_grad_(layer > self.passed.lowest)
        graph = Graph(leaf, leaf, taken=micro.handed.leaves(layer, self.passed.inputs))
        graph.y_TH = None if y_TH is None else y_TH.detach().requires_grad_()

        def handler(hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
            graph.x_TH, ids_TK, graph.weights_TK = valid_rows(micro, hidden_NH, ids_NK, weights_NK)
            if asked is not None:
                asked(graph.x_TH, ids_TK, graph.weights_TK)
            if graph.y_TH is None:
                return torch.zeros_like(hidden_NH)
            return answer_with(micro, graph.y_TH)(hidden_NH, ids_NK, weights_NK)

        context = self.model.experts.get(layer)
        handled = nullcontext() if context is None else context.handled_by(handler)
        with torch.enable_grad(), handled:
            graph.out = self._called(layer, micro, graph)
            graph.balance = self._balance(layer, micro)
        return graph

    def _grown(
        self,
        layer: int,
        state: GroupState,
        micro: MicroState,
        h: Tensor,
        y_TH: Tensor | None = None,
        asked: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """A layer's output in forward, whose graph waits for backward. See `_grow`."""
        graph = self._grow(layer, micro, h, y_TH, asked)
        state.graphs.setdefault(layer, []).append(graph)
        micro.handed.leave(layer, graph.left, lambda last, t: None)
        return graph.out.detach()

    def _fetch(self, layer: int, state: GroupState, number: int) -> None:
        """Begin to bring back what a layer is recomputed from for the micro-batch of this number, if any."""
        for kept in (state.layer_inputs[layer], state.known_outputs.get(layer, [])):
            for one in kept[number : number + 1]:
                one.fetch()
        for micro in state.micro[number : number + 1]:
            micro.handed.fetch(layer)

    def _submit_backward(self, layer: int, group: int, dy: list[Tensor], scale: float) -> None:
        parts = [d if scale == 1.0 else d * scale for d in dy]
        parts = parts or [torch.empty(0, self.model.hidden_size, dtype=torch.float32)]
        with self.clock.host("experts_wait"):
            self.tokens.submit_backward(layer, group, parts)

    def backward(self, layer: int, group: int) -> None:
        """Join the experts' gradients and back-propagate through the recomputed layer."""
        state = self.groups[group]
        grads = require(state.grads, "backward", layer, group)
        if layer in self.model.experts:
            with self.clock.host("experts_wait"):
                dx, dw = (d.split(state.sizes) for d in self.tokens.join_backward(layer, group))
        else:
            dx = dw = (None,) * len(grads)
        state.grads = None
        if layer >= self.passed.inputs:
            state.grads = [
                self._differentiated(layer, state.micro[i], self._graph(layer, group, i), *gradients)
                for i, gradients in enumerate(zip(grads, dx, dw, strict=True))
            ]
        state.drop(layer)
        self.slots.release(layer)

    def _graph(self, layer: int, group: int, number: int) -> Graph:
        """A micro-batch's recomputed layer, whose LoRA is in use: autograd reads it from the parameters."""
        state = self.groups[group]
        self._use(layer, state.micro[number])
        held = state.graphs.get(layer, [])
        return held.pop(0) if held else self._recomputed(layer, group, number)

    def _differentiated(
        self,
        layer: int,
        micro: MicroState,
        graph: Graph,
        grad: Tensor,
        dx: Tensor | None,
        dw: Tensor | None,
    ) -> Tensor:
        """The gradient at a recomputed layer's input; what the graph held is free again."""
        pairs = [(graph.out, grad), *micro.handed.gradients(layer, graph.left)]
        if graph.x_TH is not None and graph.weights_TK is not None:
            assert dx is not None and dw is not None
            pairs += [(graph.x_TH, dx), (graph.weights_TK, dw)]
        if graph.balance is not None:
            pairs.append((graph.balance, torch.ones_like(graph.balance)))
        pairs = [(t, g.to(t.dtype)) for t, g in pairs if t.requires_grad]
        with self.clock.device("attention"), turn(self.device):
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        micro.handed.add_gradients(layer, graph.taken)
        return torch.zeros_like(graph.h_in) if graph.h_in.grad is None else graph.h_in.grad

    # ---------------------------------------------------------------- results

    def seconds(self) -> dict[str, float]:
        """Seconds so far by term: "attention", "experts_wait", "loss"."""
        return {"attention": 0.0, "experts_wait": 0.0, "loss": 0.0} | self.clock.read()

    def losses(self) -> list[list[float]]:
        """Last stage: summed token losses by group and micro-batch."""
        return [state.losses for state in self.groups]

    def logps(self) -> list[list[np.ndarray]]:
        """Last stage: by group and micro-batch the rows' log-probabilities, float64 [b], when asked for."""
        return [state.logps for state in self.groups]

    def token_logps(self) -> list[list[np.ndarray]]:
        """Last stage, with a TokenLoss: by group and micro-batch the labels' log-probabilities, float32
        [b, s - 1]."""
        return [state.token_logps for state in self.groups]

    def tops(self) -> list[list[Tops]]:
        """Last stage: by group and micro-batch the most probable tokens, when asked for."""
        return [state.tops for state in self.groups]

    def logits(self) -> list[list[Tensor]]:
        """Last stage: by group and micro-batch float32 logits [b, s, V], padding included, on the CPU.

        Raises:
            RuntimeError: the pass keeps none, or its losses are not computed yet.
        """
        logits = [state.logits for state in self.groups if state.logits is not None]
        if len(logits) < len(self.groups):
            raise RuntimeError("logits are kept by a pass with return_logits, after loss")
        return logits

    def routing(self) -> np.ndarray | None:
        """After a pass with `routing`: float64 [2, E], how often each was chosen, its probabilities."""
        if self.watch is None or not self.spec.routing:
            return None
        return np.stack([self.watch.counts, self.watch.probabilities])

    # ---------------------------------------------------------------- helpers

    def _run(self, layer: int, micro: MicroState, hidden: Tensor) -> Tensor:
        """One call of one layer on one micro-batch, in forward."""
        graph = Graph(hidden, hidden, taken=micro.handed.given(layer))
        out = self._called(layer, micro, graph)
        kept = not self.retain_layers
        micro.handed.leave(
            layer, graph.left, lambda last, t: self._keep(t) if kept and self.keeps(last) else None
        )
        return out

    def _called(self, layer: int, micro: MicroState, graph: Graph) -> Tensor:
        """A layer's output for a graph's input, with what it takes; what it leaves goes into the graph."""
        self._use(layer, micro)
        call = micro.calls[layer]
        if graph.taken:
            call = replace(call, given=graph.taken)
        with self._rows_of(micro), turn(self.device):
            return call.run(self.model.layers[layer], graph.h_in, graph.left)

    def _balance(self, layer: int, micro: MicroState) -> Tensor | None:
        """The part of the routers' loss of a layer just called; None = it has none."""
        if self.watch is None or self.spec.router_slopes is None or layer not in self.watch.layers:
            return None
        slopes_E = torch.tensor(self.spec.router_slopes, dtype=torch.float32, device=self.device)
        return (self.watch.take(micro.rows) * slopes_E).sum()

    def _use(self, layer: int, micro: MicroState) -> None:
        """A layer's LoRA is the one that a micro-batch trains."""
        if self.spec.joined:
            parts = tuple((part.training, len(part.lengths)) for part in micro.batch.parts)
            self.adapters.switch(layer, parts or micro.batch.training)

    def _rows_of(self, micro: MicroState) -> AbstractContextManager[None]:
        """Inside, dropout knows the rows of what is computed."""
        spec = self.spec
        rows = (spec.seed, spec.step, micro.samples_N, micro.positions_N)
        return self.dropout.rows(*rows, enabled=spec.dropout)


def valid_rows(
    micro: MicroState, hidden: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The valid tokens' rows of what the router gave to the experts."""
    x_NH = hidden.reshape(-1, hidden.shape[-1])
    ids_NK, weights_NK = ids.reshape(x_NH.shape[0], -1), weights.reshape(x_NH.shape[0], -1)
    if x_NH.shape[0] != micro.samples_N.numel():
        raise RuntimeError(f"the experts got {x_NH.shape[0]} rows for {micro.samples_N.numel()} positions")
    return micro.take(x_NH), micro.take(ids_NK), micro.take(weights_NK)


def by_part(batch: MicroBatch, h: Tensor) -> list[tuple[MicroBatch, Tensor]]:
    """The rows of each training, without what others' widths pad them with."""
    parts = batch.of_one_training
    rows = h.split([len(part.lengths) for part in parts])
    return [(part, own[:, : part.input_ids.shape[1]]) for part, own in zip(parts, rows, strict=True)]


def joined_parts(grads: Sequence[Tensor], h: Tensor) -> Tensor:
    """Gradients at the rows of each training as one at h: zeros where they have no positions."""
    if len(grads) == 1:
        return grads[0]
    joined = h.new_zeros(h.shape, dtype=grads[0].dtype)
    for grad, rows in zip(grads, joined.split([len(grad) for grad in grads]), strict=True):
        rows[:, : grad.shape[1]] = grad
    return joined


def answer_with(micro: MicroState, y_TH: Tensor) -> Handler:
    """A handler that hands y to the layer, zeros on padding; differentiable in y."""

    def handler(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat_NH = hidden.detach().reshape(-1, hidden.shape[-1])
        return micro.put(y_TH.to(hidden.dtype), flat_NH).reshape(hidden.shape)

    return handler


def add_answers(micro: MicroState, h: Tensor, y_TH: Tensor, scale: float) -> Tensor:
    """h + scale·y at the valid positions, summed in float32 and rounded once."""
    y_TH = y_TH if scale == 1.0 else y_TH * scale
    if micro.rows is None:
        return (h.float() + y_TH.view(h.shape)).to(h.dtype)
    total_NH = h.float().reshape(-1, h.shape[-1]).index_add(0, micro.rows, y_TH)
    return total_NH.view(h.shape).to(h.dtype)


def require(tensors: list[Tensor] | None, op: str, layer: int, group: int) -> list[Tensor]:
    if tensors is None:
        raise RuntimeError(f"{op} of layer {layer}, group {group} came before its input")
    return tensors


def _not_finite(total: float, state: GroupState, group: int, spec: PassSpec) -> BadStep:
    """The error of a group whose loss is not finite, with the first layer whose kept input is not."""
    origin = "the head or the last layer"
    inputs = {layer: [kept.take() for kept in own] for layer, own in state.layer_inputs.items()}
    inputs |= {layer: [graph.h_in for graph in own] for layer, own in state.graphs.items()}
    for layer in sorted(inputs):
        if not all(bool(torch.isfinite(h).all()) for h in inputs[layer]):
            origin = f"layer {layer - 1} or before" if layer > 0 else "the embedding"
            break
    parts = [(i, part) for i, micro in enumerate(state.micro) for part in micro.batch.of_one_training]
    of_losses = zip(parts, state.losses, strict=True)
    bad, part = next((part for part, value in of_losses if not math.isfinite(value)), parts[0])
    rows = f"rows {part.named(spec.samples_per_row)}"
    step = spec.step
    what = f"the loss of step {step + 1} is {total}; the step was not applied"
    return BadStep(
        what if spec.kind == "train" else f"the loss of a forward pass is {total}",
        where=f"{origin}, group {group}, micro-batch {bad}, {rows}",
        required="a finite number",
        remedy="lower optim.lr or optim.max_grad_norm and continue from the last checkpoint with "
        "trainer.resume=latest; or look at these rows with mode=preview"
        if step
        else "compare the checkpoint's files with its release (download them again); or look at these rows "
        "with mode=preview",
    )
