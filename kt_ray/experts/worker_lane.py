"""Experts that an attention worker computes for its own tokens (rule.experts.stream_to=workers).

The worker copies the weights and adapters of some experts out of the memory of its host's expert actors,
which it maps, to the device on which it computes anyway. Tokens of these experts stay there; the others go to
the actors as ever, and only rows that still have an expert among them. x for backward waits in host memory.
Each layer's adapter gradients go to the actors that hold the experts (docs/streaming.md).

Legend: T valid tokens of a group, T_i of its micro-batch i, H hidden size, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kt_ray.experts.device_lane import (
    Following,
    LaneBackward,
    LaneForward,
    LaneInput,
    LaneSaved,
    Room,
)
from kt_ray.experts.lane import Lane
from kt_ray.experts.lane_check import check_lane
from kt_ray.experts.lane_weights import Adapter, JoinedLora, adapter_shapes
from kt_ray.experts.shared_experts import ExportedFile, OpenExperts
from kt_ray.gpu import aside, driver
from kt_ray.model.token_exchange import ExpertExchange, TokenExchange, bring_to_host
from kt_ray.native import DropoutSpec
from kt_ray.placement.plan_types import ALL_LAYERS, BackwardPart, LanePlan
from kt_ray.pulse import beat


class LaneLink(ExpertExchange, Protocol):
    """The exchange with the expert actors (kt_ray.transport.links.ExpertLink)."""

    def submit_forward(
        self,
        layer: int,
        group: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        keys_T: Tensor,
        keep: bool,
        elsewhere: Sequence[int] = (),
    ) -> None: ...

    def submit_gradients(
        self, layer: int, group: int, of_actors: Mapping[int, dict[str, Tensor]]
    ) -> None: ...


@dataclass(frozen=True)
class _Layer:
    """ids: global id of every local expert, one actor's after the other's. local: [E + 1], local id by global
    one; as many as there are experts means none."""

    ids: Tensor
    local: Tensor


class WorkerLane:
    """The lane of one attention worker.

    Args:
        plan: on the one device that this process knows it by. threads: torch threads of a stand-in.
        num_experts: of a layer.

    Attributes:
        lane: what computes.
    """

    def __init__(self, plan: LanePlan, threads: int, num_experts: int) -> None:
        self.lane = Lane(plan, threads, recompute=False, stays=True)
        self.num_experts = num_experts
        self.held: dict[int, OpenExperts] = {}
        self._layers: dict[int, _Layer] = {}
        self._owners: dict[int, ExportedFile] = {}  # by rank, the weights that the layers are made of
        self._checked = False

    def keep_only(self, files: Collection[ExportedFile]) -> None:
        """Let go of all memory but these files'; `take` comes next."""
        if any(experts.of_weights not in files for experts in self.held.values()):
            self._forget_layers()
        for experts in self.held.values():
            for file, opened in experts.files.items():
                if file not in files:
                    self.lane.unlock(opened.memory)
        self.held = {}

    def take(self, held: Mapping[int, OpenExperts], layers: Iterable[int]) -> None:
        """Take the experts of these layers from actors of this host, by rank."""
        owners = {rank: experts.of_weights for rank, experts in held.items()}
        if owners != self._owners:
            self._forget_layers()
        self.held, self._owners = dict(held), owners
        some = next((weights for e in held.values() for _, weights in e.weights.values()), None)
        if some is not None and not self._checked:
            plan = self.lane.plan
            check_lane(plan.devices[0], some, plan.names[0], float8=plan.float8)
            self._checked = True
        if self.lane.plan.streams:
            for opened in (file for experts in held.values() for file in experts.files.values()):
                self.lane.lock(opened.parts, parts=True)
        for layer in layers:
            found = [experts.weights[layer] for experts in held.values() if layer in experts.weights]
            ids = [e for own, _ in found for e in own]
            # A layer without experts, without an actor until it is loaded again, or with the same ones.
            if not ids or layer in self._layers:
                continue
            self.lane.add_layer(layer, ids, [weights for _, weights in found])
            local = torch.full((self.num_experts + 1,), len(ids), dtype=torch.int64)
            local[ids] = torch.arange(len(ids))
            self._layers[layer] = _Layer(torch.tensor(ids), local)
            beat()

    def _forget_layers(self) -> None:
        self._layers.clear()
        self._owners = {}
        self.lane.drop_layers()

    def layer(self, layer: int) -> _Layer:
        return self._layers[layer]

    def layer_after(self, layer: int, step: int) -> int | None:
        """The next layer with experts above (1) or below (-1); None = there is none."""
        others = [other for other in self._layers if (other - layer) * step > 0]
        return min(others, key=lambda other: abs(other - layer), default=None)

    def adapter(self, layer: int, name: bool | str) -> Adapter | None:
        """LoRA of a layer's local experts; None without."""
        if name is False:
            return None
        parts = [experts.adapters.get(name, {}).get(layer) for experts in self.held.values()]
        some = [part for part in parts if part is not None]
        return JoinedLora(some) if some else None

    def owners(self, layer: int) -> dict[int, range]:
        """Rank -> local ids of its experts."""
        made, first = {}, 0
        for rank, experts in self.held.items():
            count = len(experts.weights[layer][0]) if layer in experts.weights else 0
            made[rank] = range(first, first + count)
            first += count
        return made

    def close(self) -> None:
        """End the thread and give the memory back. Idempotent."""
        self.lane.close()
        self.held = {}


@dataclass
class _Call:
    """A group's tokens of one layer.

    ids: [T, K] on the host, complete at `there`; x is at `ready`. rows: of every micro-batch those that the
    actors get, on the device at `chosen`; None = all. forward, backward: what is computed here.
    """

    x: Sequence[Tensor]
    ids: Tensor
    weights: Tensor
    keys: Tensor
    keep: bool
    ready: Any
    there: Any
    sizes: Sequence[int]
    rows: list[Tensor] | None = None
    chosen: Any = None
    forward: Future[LaneForward] | None = None
    saved: LaneSaved | None = None
    backward: Future[LaneBackward] | None = None
    gradients: dict[int, dict[str, Tensor]] | None = None


class LaneTokens(TokenExchange):
    """A pass's tokens, shared between the worker's lane and the expert actors.

    Args:
        lane: the worker's. experts: the exchange with the actors. device: the stage's.
        dropout: of the pass. adapter: which one it uses. groups: how many pass each layer, in order. passed:
            what backward passes.
    """

    def __init__(
        self,
        lane: WorkerLane,
        experts: LaneLink,
        device: torch.device,
        dropout: DropoutSpec | None,
        adapter: bool | str,
        groups: int,
        passed: BackwardPart = ALL_LAYERS,
    ) -> None:
        super().__init__(experts, device)
        self._passed = passed
        self._link, self._lane = experts, lane
        self._dropout, self._adapter, self._last = dropout, adapter, groups - 1
        self._calls: dict[tuple[int, int], _Call] = {}
        self._unsettled: list[tuple[int, int]] = []
        lane.lane.forget_calls()

    def submit_forward(
        self,
        layer: int,
        group: int,
        x: Sequence[Tensor],
        ids: Sequence[Tensor],
        weights: Sequence[Tensor],
        keys: Sequence[Tensor],
        keep: bool,
    ) -> None:
        """Begin to bring the routing to the host. `settle` sends what the actors get."""
        ready = driver().current(self.device).record_event() if driver().queues(self.device) else None
        (ids_TK, weights_TK), there = bring_to_host(self.device, (ids, weights), self._own)
        sizes = [len(part) for part in ids]
        call = _Call(x, ids_TK, weights_TK, torch.cat(list(keys)), keep, ready, there, sizes)
        self._calls[layer, group] = call
        self._unsettled.append((layer, group))

    def _own(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.device.type == "cuda")

    def settle(self) -> None:
        """Choose the experts that are computed here, start them, and send the rest of the tokens."""
        for layer, group in self._unsettled:
            self._start(layer, group, self._calls[layer, group])
        self._unsettled.clear()

    def _start(self, layer: int, group: int, call: _Call) -> None:
        here, lane = self._lane.layer(layer), self._lane.lane
        if call.there is not None:
            call.there.synchronize()
        local_TK, experts = here.local[call.ids.long()], len(here.ids)
        counts = torch.bincount(local_TK.flatten(), minlength=experts + 1)[:experts].tolist()
        ((*chosen,),) = lane.choose(layer, counts, len(local_TK))
        ids_TK, x, keys_T, weights_TK = call.ids, call.x, call.keys, call.weights
        elsewhere: list[int] = []
        if chosen:
            kept = None
            if call.keep:
                shape = (len(local_TK), call.x[0].shape[-1])
                kept = lane.room((layer, group), shape, lane.compute_dtype(layer))
            adapter = self._lane.adapter(layer, self._adapter)
            dropout = self._dropout if adapter is not None else None
            given = LaneInput(
                *(call.x, local_TK, call.weights, adapter, dropout, call.keys, kept, counts, call.ready),
                following=self._after_forward(layer, group),
            )
            (call.forward,) = lane.forward(layer, [chosen], given)
            ids_TK, elsewhere = self._left(here, chosen, counts, call.ids)
            stays = (ids_TK < self._lane.num_experts).any(dim=1)
            if not bool(stays.all()):
                x = self._keep_rows(call, stays)
                ids_TK, weights_TK, keys_T = ids_TK[stays], weights_TK[stays], keys_T[stays]
        call.x = ()
        x_TH, *routing = self.to_host(x, [ids_TK], [weights_TK], [keys_T], ready=call.ready)
        ids_TK, weights_TK, keys_T = routing
        self._link.submit_forward(layer, group, x_TH, ids_TK, weights_TK, keys_T, call.keep, elsewhere)

    def _after_forward(self, layer: int, group: int) -> Following | None:
        """Behind a layer's last call come experts of the next one, those that every call has streamed."""
        above = self._lane.layer_after(layer, 1)
        if group < self._last or above is None:
            return None
        return above, self._lane.lane.parts[0].ahead_of(above)

    def _after_backward(self, layer: int, group: int) -> Following | None:
        """Behind a layer's last call come experts that the layer below needs first."""
        below = self._lane.layer_after(layer, -1)
        call = None if below is None else self._calls.get((below, 0))
        if group < self._last or below is None or call is None or call.saved is None:
            return None
        return below, [e for batch in call.saved.routed.batches for e in batch]

    def _left(
        self, here: _Layer, chosen: Sequence[int], counts: Sequence[int], ids_TK: Tensor
    ) -> tuple[Tensor, list[int]]:
        """Global ids with no expert in the place of those chosen, and the rows of every expert chosen."""
        none = self._lane.num_experts
        table = torch.arange(none + 1, dtype=ids_TK.dtype)
        own = here.ids[list(chosen)]
        table[own] = none
        elsewhere = torch.zeros(none, dtype=torch.int64)
        elsewhere[own] = torch.tensor(counts)[list(chosen)]
        return table[ids_TK.long()], elsewhere.tolist()

    def _keep_rows(self, call: _Call, stays: Tensor) -> list[Tensor]:
        """x of the rows that the actors get, by the stream that copies it out."""
        with aside(self.device, "tokens") as stream:
            if stream is not None:
                stream.wait_event(call.ready)
            call.rows = [
                part.nonzero().flatten().to(self.device, non_blocking=True)
                for part in stays.split(list(call.sizes))
            ]
            made = [part.index_select(0, rows) for part, rows in zip(call.x, call.rows, strict=True)]
            for part in call.x:
                driver().used_by(stream, part)
            call.chosen = None if stream is None else stream.record_event()
        return made

    def join_forward(self, layer: int, group: int) -> Tensor:
        y_TH, call = super().join_forward(layer, group), self._calls[layer, group]
        if call.forward is not None:
            made = call.forward.result()
            call.forward, call.saved = None, made.saved
            if call.chosen is not None and call.rows is not None:
                computing = driver().current(self.device)
                computing.wait_event(call.chosen)
                driver().used_by(computing, *call.rows)
            y_TH = self._added(made.y, y_TH, call)
        if not call.keep:
            del self._calls[layer, group]
        return y_TH

    def _added(self, own: Tensor, part: Tensor, call: _Call) -> Tensor:
        """own [T, ...] plus the actors' part of it, in place."""
        if driver().queues(self.device):
            driver().used_by(driver().current(self.device), own)
        if call.rows is None:
            return own.add_(part)
        first = 0
        sizes = [len(rows) for rows in call.rows]
        for rows, size, values in zip(call.rows, call.sizes, part.split(sizes), strict=True):
            own[first : first + size].index_add_(0, rows, values)
            first += size
        return own

    def submit_backward(self, layer: int, group: int, dy: Sequence[Tensor]) -> None:
        call = self._calls[layer, group]
        call.gradients = {rank: {} for rank in self._lane.held}
        if call.saved is not None:
            ready = driver().current(self.device).record_event() if driver().queues(self.device) else None
            adapter = self._lane.adapter(layer, self._adapter)
            room = self._room(layer, call, adapter)
            following = self._after_backward(layer, group)
            (call.backward,) = self._lane.lane.backward(
                *(layer, [call.saved], dy, adapter),
                ready=ready,
                room=room,
                following=following,
                input_grad=layer >= self._passed.inputs,
            )
        if call.rows is not None:
            dy = [part.index_select(0, rows) for part, rows in zip(dy, call.rows, strict=True)]
        super().submit_backward(layer, group, dy)

    def _room(self, layer: int, call: _Call, adapter: Adapter | None) -> Room:
        """Memory for a call's adapter gradients, in which they go to the actors."""
        assert call.saved is not None and call.gradients is not None
        places: dict[int, tuple[int, int]] = {}  # local id -> its owner's rank, its place there
        order = [e for batch in call.saved.routed.batches for e in batch]
        for rank, owned in self._lane.owners(layer).items():
            own = [e for e in order if e in owned]
            places |= {e: (rank, place) for place, e in enumerate(own)}
            ids = self.experts.alloc((len(own),), torch.int64)
            ids.copy_(torch.tensor(own, dtype=torch.int64) - owned.start)
            tensors = call.gradients[rank] = {"ids": ids}
            for name, shape in (adapter_shapes(adapter) if own else {}).items():
                tensors[name] = self.experts.alloc((len(own), *shape), torch.float32)
        gradients = call.gradients

        def room(batch: Sequence[int], name: str, shape: Sequence[int]) -> Tensor:
            rank, place = places[batch[0]]  # a batch has one owner's experts, and their places follow
            return gradients[rank][name][place : place + len(batch)]

        return room

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        call = self._calls[layer, group]
        dx_TH, dw_TK = super().join_backward(layer, group)
        if call.backward is not None:
            made = call.backward.result()
            dx_TH = self._added(made.dx, dx_TH, call)
            own_TK = torch.zeros(call.ids.shape, dtype=torch.float32, device=self.device)
            if driver().queues(self.device):
                driver().used_by(driver().current(self.device), made.dw)
            own_TK.view(-1)[made.slots.to(self.device, non_blocking=True)] = made.dw
            dw_TK = self._added(own_TK, dw_TK, call)
        del self._calls[layer, group]  # only now: `close` waits for what still writes its gradients
        assert call.gradients is not None, "submit_backward came first"
        self._link.submit_gradients(layer, group, call.gradients)
        return dx_TH, dw_TK

    def close(self) -> None:
        """Wait for what still reads this pass's tensors, whether or not the pass came to its end."""
        pending: list[Future[Any]] = []
        for call in self._calls.values():
            pending += [future for future in (call.forward, call.backward) if future is not None]
        wait(pending)
        self._calls.clear()
