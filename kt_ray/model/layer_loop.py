"""The layer loop of one pass: forward, join, recompute, backward, per layer and group.

Forward (no grad): the experts hook collects every micro-batch's tokens; at the last one it submits the
whole group and the layer runs on with zeros in the experts' place (its shared expert overlaps); the
join adds c·y. Backward: dy = c·dH is submitted first, the layer is recomputed under grad meanwhile,
and one autograd.backward per micro-batch takes dH, dX and dw together.

A layer that is not affine in y cannot be finished from h_partial. Its forward stops at the hook
(the experts get their tokens as early as elsewhere), and the join runs the layer again with y. y is
kept; the recomputation gets it as a leaf, whose gradient is dy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kt_ray.batch import PassSpec
from kt_ray.model.build import StageModel
from kt_ray.model.dropout import DropoutContext
from kt_ray.model.exchange import Exchange
from kt_ray.model.hook import Handler, LayerContext
from kt_ray.model.routing import RouterWatch
from kt_ray.model.stage_metrics import Clock, Histogram
from kt_ray.model.state import Graph, GroupState, MicroState, Routes

_WEIGHT_TOLERANCE = 1e-5  # routing weights recomputed on the same device are bit-equal in practice


class _Stop(Exception):
    """Leaves a layer at its experts hook."""


class LayerLoop:
    """One replica's pass over one stage.

    Args:
        model: the stage's modules.
        scales: MoE layer -> c, or None when not affine.
        dropout: read by the LoRA layers.
        spec: the pass.
        groups: state of each group.
        exchange: to the experts.
        clock: seconds by term.
        histogram: tokens per expert.
        watch: of the routers, in passes that ask for it.
    """

    def __init__(
        self,
        model: StageModel,
        scales: dict[int, float | None],
        dropout: DropoutContext,
        spec: PassSpec,
        groups: list[GroupState],
        exchange: Exchange,
        clock: Clock,
        histogram: Histogram,
        device: torch.device,
        watch: RouterWatch | None = None,
    ) -> None:
        self.model = model
        self.scales = scales
        self.dropout = dropout
        self.spec = spec
        self.groups = groups
        self.exchange = exchange
        self.clock = clock
        self.histogram = histogram
        self.device = device
        self.watch = watch
        self.train = spec.kind == "train"

    # ---------------------------------------------------------------- forward

    def forward(self, layer: int, group: int) -> None:
        """Run a layer on every micro-batch of a group; submit its tokens if it has experts."""
        state = self.groups[group]
        hidden = _present(state.hidden, "forward", layer, group)
        if self.train:
            state.kept[layer] = list(hidden)
        context = self.model.experts.get(layer)
        if context is None:
            with torch.no_grad(), self.clock.device("attention"):
                state.hidden = [self._run(layer, m, h) for m, h in zip(state.micro, hidden, strict=True)]
            return
        collected: list[tuple[Tensor, Tensor, Tensor]] = []
        affine = self.scales[layer] is not None

        def handler(hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
            collected.append(_valid(state.micro[len(collected)], hidden_NH, ids_NK, weights_NK))
            if len(collected) == len(state.micro):
                self._submit_forward(layer, group, collected)
            if not affine:
                raise _Stop
            return torch.zeros_like(hidden_NH)

        if not state.micro:
            self._submit_forward(layer, group, [])
        out: list[Tensor] = []
        with torch.no_grad(), _handled(context, handler), self.clock.device("attention"):
            for micro, h in zip(state.micro, hidden, strict=True):
                try:
                    out.append(self._run(layer, micro, h))
                except _Stop:
                    out.append(h)
                if self.watch is not None and self.spec.routing:
                    self.watch.count(micro.rows)
        if len(collected) != len(state.micro):
            raise RuntimeError(
                f"layer {layer} called its experts {len(collected)} times for {len(state.micro)} inputs"
            )
        state.hidden = out

    def _submit_forward(self, layer: int, group: int, collected: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        model, state = self.model, self.groups[group]
        x = [part for part, _, _ in collected] or [torch.empty(0, model.hidden_size, dtype=model.dtype)]
        ids = [part.to(torch.int32) for _, part, _ in collected]
        ids = ids or [torch.empty(0, model.top_k, dtype=torch.int32)]
        weights = [part for _, _, part in collected] or [torch.empty(0, model.top_k, dtype=torch.float32)]
        if self.train:
            state.routes[layer] = Routes(torch.cat(ids), torch.cat(weights))
        keys = [m.keys_T for m in state.micro] or [torch.empty(0, dtype=torch.int64)]
        x_TH, ids_TK, weights_TK, keys_T = self._to_host(x, ids, [w.float() for w in weights], keys)
        self.histogram.add(layer, ids_TK)
        # In the middle of the layer: without overlap the answer is awaited here.
        with self.clock.host("experts_wait"):
            self.exchange.submit_forward(layer, group, x_TH, ids_TK, weights_TK, keys_T, self.train)

    def join(self, layer: int, group: int) -> None:
        """Wait for a group's experts and finish the layer."""
        state = self.groups[group]
        hidden = _present(state.hidden, "join", layer, group)
        with self.clock.host("experts_wait"):
            y_TH = self.exchange.join_forward(layer, group)
        parts = y_TH.to(self.device, non_blocking=True).split(state.sizes)
        scale = self.scales[layer]
        with torch.no_grad(), self.clock.device("attention"):
            if scale is not None:
                state.hidden = [
                    _add(m, h, y_TH, scale) for m, h, y_TH in zip(state.micro, hidden, parts, strict=True)
                ]
                return
            if self.train:
                state.kept_y[layer] = list(parts)
            context = self.model.experts[layer]
            again: list[Tensor] = []
            for micro, h, y_TH in zip(state.micro, hidden, parts, strict=True):
                with _handled(context, _give(micro, y_TH)):
                    again.append(self._run(layer, micro, h))
            state.hidden = again

    # --------------------------------------------------------------- backward

    def recompute(self, layer: int, group: int) -> None:
        """Submit dy where it is known, and run the layer again under grad."""
        state = self.groups[group]
        grads = _present(state.grads, "recompute", layer, group)
        context = self.model.experts.get(layer)
        kept = state.kept.pop(layer)
        # The embedding is frozen: nothing before the model's first layer wants a gradient.
        leaves = [h.detach().requires_grad_(layer > 0) for h in kept]
        if context is None:
            with torch.enable_grad(), self.clock.device("attention"):
                outs = [self._run(layer, m, h) for m, h in zip(state.micro, leaves, strict=True)]
            state.graphs[layer] = [Graph(h, out) for h, out in zip(leaves, outs, strict=True)]
            return
        scale = self.scales[layer]
        if scale is not None:
            dy = [m.take(g.reshape(-1, g.shape[-1])).float() for m, g in zip(state.micro, grads, strict=True)]
            self._submit_backward(layer, group, dy, scale)
        state.graphs[layer], ids = self._recompute_experts(layer, state, context, leaves)
        self._compare(layer, group, ids)
        if scale is None:
            self._submit_leaf_gradients(layer, group, grads)

    def _recompute_experts(
        self, layer: int, state: GroupState, context: LayerContext, leaves: list[Tensor]
    ) -> tuple[list[Graph], list[Tensor]]:
        """The graphs of a layer's micro-batches, and the experts chosen this time ([T_i, K] each)."""
        graphs: list[Graph] = []
        given = state.kept_y.get(layer)
        if given is not None:
            given = state.kept_y[layer] = [y.detach().requires_grad_() for y in given]
        ids: list[Tensor] = []
        for number, (micro, h) in enumerate(zip(state.micro, leaves, strict=True)):
            graph = Graph(h, h)

            def handler(
                hidden_NH: Tensor,
                ids_NK: Tensor,
                weights_NK: Tensor,
                micro: MicroState = micro,
                graph: Graph = graph,
                number: int = number,
            ) -> Tensor:
                graph.x_TH, ids_TK, graph.weights_TK = _valid(micro, hidden_NH, ids_NK, weights_NK)
                ids.append(ids_TK)
                if given is None:
                    return torch.zeros_like(hidden_NH)
                return _give(micro, given[number])(hidden_NH, ids_NK, weights_NK)

            with torch.enable_grad(), _handled(context, handler), self.clock.device("attention"):
                graph.out = self._run(layer, micro, h)
                if self.watch is not None and self.spec.router_slopes is not None:
                    slopes_E = torch.tensor(self.spec.router_slopes, dtype=torch.float32, device=self.device)
                    graph.balance = (self.watch.take(micro.rows) * slopes_E).sum()
            graphs.append(graph)
        return graphs, ids

    def _compare(self, layer: int, group: int, ids: list[Tensor]) -> None:
        """Hold the recomputation against the forward."""
        before = self.groups[group].routes.pop(layer)
        if before.ids_TK.numel() == 0:
            return
        differs = int((before.ids_TK != torch.cat(ids)).any(dim=1).sum())
        if differs:
            raise RuntimeError(
                f"layer {layer}, group {group}: the recomputation chose other experts than the forward for "
                f"{differs} of {before.ids_TK.shape[0]} tokens"
            )
        graphs = self.groups[group].graphs[layer]
        weights_TK = torch.cat([g.weights_TK.detach() for g in graphs if g.weights_TK is not None])
        drift = float((before.weights_TK.float() - weights_TK.float()).abs().max())
        if not drift <= _WEIGHT_TOLERANCE * float(before.weights_TK.abs().max()):
            raise RuntimeError(
                f"layer {layer}, group {group}: recomputed routing weights differ by {drift:.3g}"
            )

    def _submit_leaf_gradients(self, layer: int, group: int, grads: list[Tensor]) -> None:
        """Non-affine layers: dy is the gradient at y."""
        state = self.groups[group]
        leaves = state.kept_y.pop(layer)
        dy: list[Tensor] = []
        with self.clock.device("attention"):
            for graph, leaf, grad in zip(state.graphs[layer], leaves, grads, strict=True):
                (value,) = torch.autograd.grad(graph.out, leaf, grad, retain_graph=True)
                dy.append(value)
        self._submit_backward(layer, group, dy, 1.0)

    def _submit_backward(self, layer: int, group: int, dy: list[Tensor], scale: float) -> None:
        parts = [d if scale == 1.0 else d * scale for d in dy]
        (host_TH,) = self._to_host(parts or [torch.empty(0, self.model.hidden_size, dtype=torch.float32)])
        with self.clock.host("experts_wait"):
            self.exchange.submit_backward(layer, group, host_TH)

    def backward(self, layer: int, group: int) -> None:
        """Join the experts' gradients and back-propagate through the recomputed layer."""
        state = self.groups[group]
        grads = _present(state.grads, "backward", layer, group)
        graphs = state.graphs.pop(layer)
        dx: tuple[Tensor, ...] = ()
        dw: tuple[Tensor, ...] = ()
        if layer in self.model.experts:
            with self.clock.host("experts_wait"):
                dx_TH, dw_TK = self.exchange.join_backward(layer, group)
            dx = dx_TH.to(self.device, non_blocking=True).split(state.sizes)
            dw = dw_TK.to(self.device, non_blocking=True).split(state.sizes)
        new: list[Tensor] = []
        with self.clock.device("attention"):
            for number, (graph, grad) in enumerate(zip(graphs, grads, strict=True)):
                pairs = [(graph.out, grad)]
                if graph.x_TH is not None and graph.weights_TK is not None:
                    pairs.append((graph.x_TH, dx[number]))
                    pairs.append((graph.weights_TK, dw[number]))
                if graph.balance is not None:
                    pairs.append((graph.balance, torch.ones_like(graph.balance)))
                pairs = [(t, g.to(t.dtype)) for t, g in pairs if t.requires_grad]
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                h_grad = graph.h_in.grad
                new.append(torch.zeros_like(graph.h_in) if h_grad is None else h_grad)
        state.grads = new

    # ---------------------------------------------------------------- helpers

    def _run(self, layer: int, micro: MicroState, hidden: Tensor) -> Tensor:
        """One call of one layer on one micro-batch, with its rows known to dropout."""
        dropout = self.dropout
        dropout.seed, dropout.step, dropout.enabled = self.spec.seed, self.spec.step, self.spec.dropout
        dropout.samples_N, dropout.positions_N = micro.samples_N, micro.positions_N
        try:
            return micro.calls[layer].run(self.model.layers[layer], hidden)
        finally:
            dropout.enabled, dropout.samples_N, dropout.positions_N = False, None, None

    def _to_host(self, *tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Each list's tensors one after another along the rows, in memory of the exchange: the only copy.

        Waits only for what this stream has done so far: the expert side reads the tensors at once.
        """
        host = []
        for parts in tensors:
            sizes = [part.shape[0] for part in parts]
            whole = self.exchange.alloc((sum(sizes), *parts[0].shape[1:]), parts[0].dtype)
            for to, part in zip(whole.split(sizes), parts, strict=True):
                to.copy_(part.detach(), non_blocking=True)
            host.append(whole)
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
        return tuple(host)


@contextmanager
def _handled(context: LayerContext, handler: Handler) -> Iterator[None]:
    context.handler = handler
    try:
        yield
    finally:
        context.handler = None


def _valid(micro: MicroState, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The valid tokens' rows of what the router gave to the experts."""
    x_NH = hidden.reshape(-1, hidden.shape[-1])
    ids_NK, weights_NK = ids.reshape(x_NH.shape[0], -1), weights.reshape(x_NH.shape[0], -1)
    if x_NH.shape[0] != micro.samples_N.numel():
        raise RuntimeError(f"the experts got {x_NH.shape[0]} rows for {micro.samples_N.numel()} positions")
    return micro.take(x_NH), micro.take(ids_NK), micro.take(weights_NK)


def _give(micro: MicroState, y_TH: Tensor) -> Handler:
    """A handler that hands y to the layer, zeros on padding; differentiable in y."""

    def handler(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat_NH = hidden.detach().reshape(-1, hidden.shape[-1])
        return micro.put(y_TH.to(hidden.dtype), flat_NH).reshape(hidden.shape)

    return handler


def _add(micro: MicroState, h: Tensor, y_TH: Tensor, scale: float) -> Tensor:
    """h + scale·y at the valid positions, summed in float32 and rounded once."""
    y_TH = y_TH if scale == 1.0 else y_TH * scale
    if micro.rows is None:
        return (h.float() + y_TH.view(h.shape)).to(h.dtype)
    total_NH = h.float().reshape(-1, h.shape[-1]).index_add(0, micro.rows, y_TH)
    return total_NH.view(h.shape).to(h.dtype)


def _present(tensors: list[Tensor] | None, op: str, layer: int, group: int) -> list[Tensor]:
    if tensors is None:
        raise RuntimeError(f"{op} of layer {layer}, group {group} came before its input")
    return tensors
