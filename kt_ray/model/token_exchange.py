"""A group's tokens between a stage's device and the routed experts, who read host memory.

Shapes: T valid tokens of a group, T_i of its micro-batch i, H hidden, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kt_ray.gpu import aside, driver


class ExpertExchange(Protocol):
    """Tokens to the routed experts, results back (kt_ray.transport.links.ExpertLink).

    Tensors to submit are on the CPU, in memory from `alloc`. `submit_*` returns at once; the loop submits and
    joins in the order of its program.
    """

    def after(self, ready: Any) -> None:
        """What is submitted next is still on its way to the host, until the event `ready`."""

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """CPU memory to fill and submit once, page-locked where the stage computes on CUDA.

        Experts in shared memory read it without another copy. Submitted, it belongs to the exchange.
        """

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
        """Send a group's tokens.

        Args:
            x_TH: float32 or bfloat16, input of the experts.
            ids_TK: int32, global expert ids.
            weights_TK: float32, routing weights.
            keys_T: int64, sample id · 2³² + position: the counters of dropout.
            keep: whether a backward will follow.
        """

    def join_forward(self, layer: int, group: int) -> Tensor:
        """Wait for y_TH float32, summed over all experts; on the CPU or on the stage's device."""

    def submit_backward(self, layer: int, group: int, dy_TH: Tensor) -> None:
        """Send dy float32."""

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        """Wait for (dx_TH, dw_TK) float32; on the CPU or on the stage's device.

        dx is [T, 0] in layers below `BackwardPart.inputs`.
        """


def bring_to_host(
    device: torch.device,
    tensors: Sequence[Sequence[Tensor]],
    alloc: Callable[[Sequence[int], torch.dtype], Tensor],
    ready: Any = None,
) -> tuple[tuple[Tensor, ...], Any]:
    """Each sequence's tensors one after another along the rows, on the host, in memory of `alloc`.

    Copied beside the computation, which goes on meanwhile.

    Args:
        ready: the mark after which they are complete; None = all that this thread gave the device.

    Returns:
        The tensors, and the mark after which they are there; None = they are.
    """
    host = []
    computing = driver().current(device) if driver().queues(device) else None
    with aside(device, "tokens") as stream:
        if stream is not None and ready is not None:
            stream.wait_event(ready)
        elif stream is not None:
            stream.wait_stream(computing)
        for parts in tensors:
            sizes = [part.shape[0] for part in parts]
            whole = alloc((sum(sizes), *parts[0].shape[1:]), parts[0].dtype)
            for to, part in zip(whole.split(sizes), parts, strict=True):
                driver().copy_out(to, part.detach())
                driver().used_by(stream, part)
            host.append(whole)
        return tuple(host), None if stream is None else driver().mark(device)


class TokenExchange:
    """All of a group's tokens go to the experts' exchange.

    Args:
        experts: the exchange. device: the stage's.
    """

    def __init__(self, experts: ExpertExchange, device: torch.device) -> None:
        self.experts, self.device = experts, device

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
        """Start the experts on a group's tokens.

        Args:
            x: [T_i, H], ids: int32 [T_i, K] and weights: float32 [T_i, K], on the device; keys: [T_i]. At
                least one of each, maybe without a token. keep: as for the exchange.
        """
        x_TH, ids_TK, weights_TK, keys_T = self.to_host(x, ids, weights, keys)
        self.experts.submit_forward(layer, group, x_TH, ids_TK, weights_TK, keys_T, keep)

    def settle(self) -> None:
        """The rest of the layer was given to the device: what depends on its routing may wait for it now."""

    def join_forward(self, layer: int, group: int) -> Tensor:
        """Wait for y [T, H], float32, on the device."""
        return self.experts.join_forward(layer, group).to(self.device, non_blocking=True)

    def submit_backward(self, layer: int, group: int, dy: Sequence[Tensor]) -> None:
        """Start the experts' backward; dy: float32 [T_i, H] on the device, at least one."""
        (dy_TH,) = self.to_host(dy)
        self.experts.submit_backward(layer, group, dy_TH)

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        """Wait for dx [T, H] and d(weights) [T, K], float32, on the device."""
        dx_TH, dw_TK = self.experts.join_backward(layer, group)
        return dx_TH.to(self.device, non_blocking=True), dw_TK.to(self.device, non_blocking=True)

    def to_host(self, *tensors: Sequence[Tensor], ready: Any = None) -> tuple[Tensor, ...]:
        """Each sequence's tensors one after another along the rows, in memory of the exchange, the only copy.

        They are to be submitted next, maybe before they are there. ready: as for `bring_to_host`.
        """
        host, done = bring_to_host(self.device, tensors, self.experts.alloc, ready)
        if done is not None:
            self.experts.after(done)
        return host
