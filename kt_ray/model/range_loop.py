"""The layer loop where a row does not fit on the device: every layer by ranges (rule.activations=ranges).

What is as long as a row waits in host memory: hidden states, their gradients, attention's outputs. Of a row
the device holds what attention's first projections give, what one range of heads needs, and a range of tokens
with all that the layer makes of it (kt_ray.model.head_ranges). Forward runs

    enter    by tokens: the layer up to attention, and its first projections
    attend   by heads: their outputs go to the host
    leave    by tokens: attention's last projection and the rest; tokens go to the experts

and backward, one micro-batch at a time, enters and attends again, then `leave`, `attend` and `enter` each
under grad with its gradients. The gradient at a head's outputs takes the place of those outputs.

Numerics: the sums are those of whole rows but for two. Where all heads share a projection's output (latent
attention), each range's gradient of it is rounded to the layer's type before they add up in float32. And
LoRA's gradients are sums over ranges of tokens or heads, in float32.

Shapes: as in layer_loop.py; N = b·s positions of a micro-batch, R ranges of heads, O attention's outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kt_ray.gpu import driver
from kt_ray.model.head_ranges import Call, HeadRanges
from kt_ray.model.hidden_shelf import HostShelf, KeptOnDevice
from kt_ray.model.known_outputs import KnownOutputs
from kt_ray.model.layer_calls import Handler
from kt_ray.model.layer_loop import LayerLoop, add_answers, require, valid_rows
from kt_ray.model.state import MicroState, Routes
from kt_ray.model.streamed_weights import bring
from kt_ray.placement.range_memory import RANGE_TOKENS


class TokenRange(NamedTuple):
    """Neighbouring positions of a micro-batch."""

    rows: slice  # of its N positions
    valid: slice  # of its valid tokens
    micro: MicroState  # these alone

    @classmethod
    def cut(cls, micro: MicroState, size: int) -> Iterator[TokenRange]:
        """All of a micro-batch, `size` positions at a time."""
        n = micro.samples_N.numel()
        ends = [*range(0, n, size), n]
        valid = ends
        if micro.rows is not None:
            valid = torch.searchsorted(micro.rows, torch.tensor(ends, device=micro.rows.device)).tolist()
        for (i, j), (a, b) in zip(itertools.pairwise(ends), itertools.pairwise(valid), strict=True):
            rows = None if micro.rows is None or b - a == j - i else micro.rows[a:b] - i
            samples_N, positions_N = micro.samples_N[i:j], micro.positions_N[i:j]
            own = replace(micro, rows=rows, samples_N=samples_N, positions_N=positions_N, embedded=None)
            yield cls(slice(i, j), slice(a, b), own)


class RangeLoop(LayerLoop):
    """One replica's pass over one stage, every layer by ranges.

    Hidden states and gradients between layers are host tensors.

    Args:
        ranges: by layer. count: R. retain: whether attention's outputs are kept from forward.
        host: the memory of what waits.
    """

    def __init__(
        self,
        *args: Any,
        ranges: Mapping[int, HeadRanges],
        count: int,
        retain: bool,
        host: HostShelf,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.ranges, self.count, self.retain, self.host = ranges, count, retain, host
        # By the identity of the micro-batch. Once, since the host waits here for where padding is.
        self._cut = {id(m): [*TokenRange.cut(m, RANGE_TOKENS)] for group in self.groups for m in group.micro}
        shapes = [tuple(m.samples_N.shape) for group in self.groups for m in group.micro]
        hidden = [(*shape, self.model.hidden_size) for shape in shapes]
        kept = [each.width for layer, each in ranges.items() if self.keeps(layer)]
        last = self.head is not None or not self.train
        # A gradient takes the place of a hidden state: of the last one, or it comes from the next stage.
        rooms = hidden * (len(kept) + (1 if last else 2))
        if retain:
            rooms += [(*shape, width) for shape in shapes for width in kept]
        largest = max((n for (n,) in shapes), default=0) * max(each.width for each in ranges.values())
        host.clear([*rooms, (largest,)], self.model.dtype)
        self._heads = host.room((largest,), self.model.dtype)

    # ------------------------------------------------------------------ between device and host

    def _up(self, host: Tensor) -> Tensor:
        return driver().upload(host, self.device)

    def _room(self, like: Tensor) -> Tensor:
        return self.host.room(like.shape, self.model.dtype)

    def _settle(self) -> None:
        """The host reads what the device wrote."""
        if driver().queues(self.device):
            driver().mark(self.device).synchronize()

    def _tokens(self, micro: MicroState) -> list[TokenRange]:
        return self._cut[id(micro)]

    def _heads_of(self, layer: int, n: int) -> Tensor:
        """[R, N, O / R], where attention's outputs of a micro-batch wait that are not kept."""
        width = self.ranges[layer].width
        return self._heads[: n * width].view(self.count, n, width // self.count)

    def _heads_up(self, heads: Tensor, rows: slice) -> Tensor:
        """[n, O] of a range of tokens."""
        parts = [self._up(part[rows]) for part in heads.unbind()]
        return torch.cat(parts, -1)

    def _heads_down(self, heads: Tensor, rows: slice, values: Tensor) -> None:
        for to, part in zip(heads.unbind(), values.chunk(self.count, -1), strict=True):
            driver().copy_out(to[rows], part)

    # ------------------------------------------------------------------ the stage's ends

    def embed(self, layer: int, group: int) -> None:
        super().embed(layer, group)
        state = self.groups[group]
        state.hidden = [self._moved(h) for h in require(state.hidden, "embed", layer, group)]

    def _moved(self, hidden: Tensor) -> Tensor:
        room = self._room(hidden)
        self._settle()  # of the pass before
        driver().copy_out(room, hidden)
        self._settle()
        return room

    def _received(self, tensor: Tensor) -> Tensor:
        return self._moved(tensor.to(self.model.dtype))

    def send_hidden(self, layer: int, group: int) -> None:
        self._settle()
        super().send_hidden(layer, group)

    def send_grad(self, layer: int, group: int) -> None:
        self._settle()
        super().send_grad(layer, group)

    def loss(self, layer: int, group: int) -> None:
        state = self.groups[group]
        hidden = require(state.hidden, "loss", layer, group)
        self._settle()
        super().loss(layer, group)
        if state.grads is not None:  # whose places are page-locked
            state.grads = [h.copy_(g) for h, g in zip(hidden, state.grads, strict=True)]

    # ------------------------------------------------------------------ forward

    def forward(self, layer: int, group: int) -> None:
        state = self.groups[group]
        hidden = require(state.hidden, "forward", layer, group)
        if self.keeps(layer):
            state.layer_inputs[layer] = [KeptOnDevice(h) for h in hidden]
            state.routes[layer] = []
            state.known_outputs[layer] = []
        moe = layer in self.model.experts
        sent = _Sent(self, sum(state.sizes) if moe else 0)
        out = []
        with torch.no_grad(), self.clock.device("attention"):
            for micro, h in zip(state.micro, hidden, strict=True):
                n, ranges = micro.samples_N.numel(), self.ranges[layer]
                heads = self._heads_of(layer, n)
                if self.keeps(layer) and self.retain:
                    heads = self.host.room((self.count, n, ranges.width // self.count), self.model.dtype)
                    state.known_outputs[layer].append(KeptOnDevice(heads))
                self._attend(layer, micro, *self._enter(layer, micro, h), heads)
                out.append(self._leave(layer, micro, h, heads, sent if moe else None))
                if self.keeps(layer) and moe:
                    state.routes[layer].append(sent.routes())
        if moe:
            if not state.micro:
                self._submit_forward(layer, group, [])
            else:
                keys_T = torch.cat([m.keys_T for m in state.micro])
                with self.clock.host("experts_wait"):
                    self.experts.submit_forward(layer, group, *sent.submitted(keys_T), self.keeps(layer))
        state.hidden = out

    def _enter(self, layer: int, micro: MicroState, h: Tensor) -> tuple[list[Tensor], Call]:
        """What attention's first projections give, [b, s, E_i] each, and how it is called."""
        flat, whole = h.flatten(0, 1), list[Tensor]()
        call: Call | None = None
        for part in self._tokens(micro):
            values, call = self._entered(layer, part, self._up(flat[part.rows]))
            whole = whole or [v.new_empty((flat.shape[0], v.shape[-1])) for v in values]
            for to, value in zip(whole, values, strict=True):
                to[part.rows] = value.detach()[0]
        assert call is not None
        return [values.view(*h.shape[:2], -1) for values in whole], call

    def _entered(self, layer: int, part: TokenRange, h: Tensor) -> tuple[list[Tensor], Call]:
        with self._rows_of(part.micro):
            run = part.micro.calls[layer].run
            return self.ranges[layer].enter(lambda: run(self.model.layers[layer], h[None]))

    def _attend(
        self, layer: int, micro: MicroState, entered: list[Tensor], call: Call, heads: Tensor
    ) -> None:
        """Fill `heads` [R, N, O / R] on the host."""
        ranges = self.ranges[layer]
        bring(self.model.layers[layer])
        with torch.no_grad(), self._rows_of(micro):
            for number, to in enumerate(heads.unbind()):
                values = ranges.part(entered, number, self.count)
                driver().copy_out(to, ranges.attend(call, values, number, self.count).flatten(0, 1))

    def _leave(self, layer: int, micro: MicroState, h: Tensor, heads: Tensor, sent: _Sent | None) -> Tensor:
        """The layer's output; its tokens go to `sent`."""
        flat, out = h.flatten(0, 1), self._room(h) if self.keeps(layer) else h
        for part in self._tokens(micro):
            given = self.ranges[layer].left(self._heads_up(heads, part.rows)[None])
            if sent is None:
                with given:
                    values = self._run(layer, part.micro, self._up(flat[part.rows])[None])
            else:
                with given, self.model.experts[layer].handled_by(sent.handler(part)):
                    values = self._run(layer, part.micro, self._up(flat[part.rows])[None])
                if self.watch is not None and self.spec.routing and layer in self.watch.layers:
                    self.watch.count(part.micro.rows)
            driver().copy_out(out.flatten(0, 1)[part.rows], values[0])
        return out

    def join(self, layer: int, group: int) -> None:
        state = self.groups[group]
        hidden = require(state.hidden, "join", layer, group)
        with self.clock.host("experts_wait"):
            y_TH = self.experts.join_forward(layer, group)
        scale = self.scales[layer]
        assert scale is not None, "such layers are refused when the stage is built"
        with torch.no_grad(), self.clock.device("attention"):
            for micro, h, own_TH in zip(state.micro, hidden, y_TH.split(state.sizes), strict=True):
                flat = h.flatten(0, 1)
                for part in self._tokens(micro):
                    whole = add_answers(
                        part.micro, self._up(flat[part.rows]), self._up(own_TH[part.valid]), scale
                    )
                    driver().copy_out(flat[part.rows], whole)

    # ------------------------------------------------------------------ backward

    def recompute(self, layer: int, group: int) -> None:
        """Submit dy. Each micro-batch is computed again when its gradients are there."""
        state = self.groups[group]
        grads = require(state.grads, "recompute", layer, group)
        self.slots.hold(layer)
        if layer not in self.model.experts:
            return
        scale = self.scales[layer]
        assert scale is not None
        dy_TH = self.experts.alloc((sum(state.sizes), self.model.hidden_size), torch.float32)
        with self.clock.device("attention"):
            for micro, grad, to in zip(state.micro, grads, dy_TH.split(state.sizes), strict=True):
                for part in self._tokens(micro):
                    dy = part.micro.take(self._up(grad.flatten(0, 1)[part.rows])).float()
                    driver().copy_out(to[part.valid], dy if scale == 1.0 else dy * scale)
        self._follow()
        with self.clock.host("experts_wait"):
            self.experts.submit_backward(layer, group, dy_TH)

    def _follow(self) -> None:
        """What is submitted next is written by what the device was given before."""
        if driver().queues(self.device):
            self.experts.after(driver().mark(self.device))

    def backward(self, layer: int, group: int) -> None:
        state = self.groups[group]
        grads = require(state.grads, "backward", layer, group)
        joined: list[Any] = [None] * len(grads)
        if layer in self.model.experts:
            with self.clock.host("experts_wait"):
                dx_TH, dw_TK = self.experts.join_backward(layer, group)
            joined = list(zip(dx_TH.split(state.sizes), dw_TK.split(state.sizes), strict=True))
        with torch.enable_grad(), self.clock.device("attention"):
            for number, micro in enumerate(state.micro if layer >= self.passed.inputs else ()):
                h = state.layer_inputs[layer][number].take()
                entered, call = self._enter(layer, micro, h)
                if self.retain:
                    heads = state.known_outputs[layer][number].take()
                else:
                    heads = self._heads_of(layer, micro.samples_N.numel())
                    self._attend(layer, micro, entered, call, heads)
                routes = state.routes[layer][number] if joined[number] else None
                self._leave_backward(layer, group, micro, h, grads[number], heads, joined[number], routes)
                slopes = self._attend_backward(layer, micro, entered, call, heads)
                del entered
                self._enter_backward(layer, micro, h, grads[number], slopes)
                del slopes, heads  # before the next micro-batch has its own
        state.drop(layer)
        self.slots.release(layer)

    def _leave_backward(
        self,
        layer: int,
        group: int,
        micro: MicroState,
        h: Tensor,
        grad: Tensor,
        heads: Tensor,
        joined: tuple[Tensor, Tensor] | None,
        routes: Routes | None,
    ) -> None:
        """grad becomes the gradient at h but for what comes through attention, heads that at its outputs."""
        flat, grad = h.flatten(0, 1), grad.flatten(0, 1)
        known = self.known.get(layer, KnownOutputs())
        for part in self._tokens(micro):
            h_in = self._up(flat[part.rows]).detach().requires_grad_(layer > self.passed.lowest)
            leaf = self._heads_up(heads, part.rows).requires_grad_()
            found: list[Tensor] = []
            given = (known.given(None), self.ranges[layer].left(leaf[None]))
            if joined is None:
                with given[0], given[1]:
                    out = self._run(layer, part.micro, h_in[None])
            else:
                handler = _collect(part.micro, found)
                with given[0], given[1], self.model.experts[layer].handled_by(handler):
                    out = self._run(layer, part.micro, h_in[None])
            pairs = [(out[0], self._up(grad[part.rows]))]
            if joined is not None and routes is not None:
                x_TH, ids, weights_TK = found
                pairs += [
                    (x_TH, self._up(joined[0][part.valid])),
                    (weights_TK, self._up(joined[1][part.valid])),
                ]
                before = Routes(*(values[part.valid] for values in routes))
                self.recomputed.compare(layer, group, before, Routes(ids, weights_TK.detach()))
                balance = self._balance(layer, part.micro)
                if balance is not None:
                    pairs.append((balance, torch.ones_like(balance)))
            pairs = [(t, g.to(t.dtype)) for t, g in pairs if t.requires_grad]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            if h_in.grad is not None:
                driver().copy_out(grad[part.rows], h_in.grad)
            self._heads_down(heads, part.rows, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)

    def _attend_backward(
        self, layer: int, micro: MicroState, entered: list[Tensor], call: Call, heads: Tensor
    ) -> list[Tensor]:
        """The gradients at what the first projections gave. heads: those at attention's outputs."""
        ranges = self.ranges[layer]
        totals = [
            torch.empty_like(values) if of_heads else torch.zeros_like(values, dtype=torch.float32)
            for values, (_, of_heads) in zip(entered, ranges.entries, strict=True)
        ]
        with self._rows_of(micro):
            for number, grad in enumerate(heads.unbind()):
                leaves = [
                    values.detach().requires_grad_() for values in ranges.part(entered, number, self.count)
                ]
                out = ranges.attend(call, leaves, number, self.count)
                torch.autograd.backward(out, self._up(grad).view(out.shape))
                del out
                into = ranges.part(totals, number, self.count)
                for total, leaf, (_, of_heads) in zip(into, leaves, ranges.entries, strict=True):
                    assert leaf.grad is not None
                    if of_heads:
                        total.copy_(leaf.grad)
                    else:
                        total.add_(leaf.grad)
        return totals

    def _enter_backward(
        self, layer: int, micro: MicroState, h: Tensor, grad: Tensor, slopes: list[Tensor]
    ) -> None:
        """Add to grad what comes through attention."""
        flat, grad = h.flatten(0, 1), grad.flatten(0, 1)
        slopes = [values.flatten(0, 1) for values in slopes]
        for part in self._tokens(micro):
            h_in = self._up(flat[part.rows]).detach().requires_grad_(layer > self.passed.lowest)
            values, _ = self._entered(layer, part, h_in)
            pairs = [(v, s[None, part.rows].to(v.dtype)) for v, s in zip(values, slopes, strict=True)]
            pairs = [(v, s) for v, s in pairs if v.requires_grad]
            if pairs:
                torch.autograd.backward([v for v, _ in pairs], [s for _, s in pairs])
            if h_in.grad is not None:
                driver().copy_out(grad[part.rows], self._up(grad[part.rows]) + h_in.grad)


class _Sent:
    """A group's tokens on their way to the experts, one range of tokens after another.

    Args:
        tokens: of the group.
    """

    def __init__(self, loop: RangeLoop, tokens: int) -> None:
        self._loop, self._tokens = loop, tokens
        self._host: list[Tensor] = []  # x, ids, weights
        self._at = 0
        self._routes: list[Routes] = []  # of the micro-batch under way

    def handler(self, part: TokenRange) -> Handler:
        def take(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            x_TH, ids_TK, weights_TK = valid_rows(part.micro, hidden, ids, weights)
            ids_TK = ids_TK.to(torch.int32)
            values = (x_TH, ids_TK, weights_TK.float())
            if not self._host:
                alloc = self._loop.experts.alloc
                self._host = [alloc((self._tokens, *v.shape[1:]), v.dtype) for v in values]
            end = self._at + x_TH.shape[0]
            for to, value in zip(self._host, values, strict=True):
                driver().copy_out(to[self._at : end], value)
            self._at = end
            self._routes.append(Routes(ids_TK, weights_TK))
            return torch.zeros_like(hidden)

        return take

    def routes(self) -> Routes:
        """Of the micro-batch that went by last."""
        routes, self._routes = self._routes, []
        return Routes(*(torch.cat(values) for values in zip(*routes, strict=True)))

    def submitted(self, keys_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, ids, weights and keys of the group, in the exchange's memory."""
        keys = self._loop.experts.alloc(keys_T.shape, keys_T.dtype).copy_(keys_T)
        self._loop._follow()
        x_TH, ids_TK, weights_TK = self._host
        return x_TH, ids_TK, weights_TK, keys


def _collect(micro: MicroState, found: list[Tensor]) -> Handler:
    """A handler that keeps what the experts got: x, ids, weights."""

    def take(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x_TH, ids_TK, weights_TK = valid_rows(micro, hidden, ids, weights)
        found.extend((x_TH, ids_TK.to(torch.int32), weights_TK))
        return torch.zeros_like(hidden)

    return take
