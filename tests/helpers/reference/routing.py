"""Make a family's router choose given experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def forced_routing(
    router: nn.Module, num_experts: int, top_k: int, ids: Callable[[], Tensor]
) -> Iterator[None]:
    """Make a router's final choice be given experts; it computes their weights itself.

    Families choose by `torch.topk` over [N, E] scores with k = top_k (group choices have other shapes), or
    one expert after another by `scores.max(-1)` (PhiMoE). Each forward of the router within the context
    takes `ids()`: int64 [N, K].
    """
    original, topk, maximum = router.forward, torch.topk, torch.Tensor.max

    def forced(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted = ids()
        columns = iter(wanted.split(1, dim=1))

        def is_choice(scores: Tensor) -> bool:
            return scores.dim() == 2 and scores.shape[-1] == num_experts

        def patched(scores: Tensor, k: int, *a: Any, **kw: Any) -> Any:
            if is_choice(scores) and k == top_k:
                return torch.return_types.topk((scores.gather(1, wanted), wanted))
            return topk(scores, k, *a, **kw)

        def patched_max(scores: Tensor, *a: Any, **kw: Any) -> Any:
            if is_choice(scores) and kw == {"dim": -1, "keepdim": True}:
                chosen = next(columns)
                return scores.gather(1, chosen), chosen
            return maximum(scores, *a, **kw)

        with mock.patch("torch.topk", patched), mock.patch.object(torch.Tensor, "max", patched_max):
            return original(x, *args, **kwargs)

    router.forward = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del router.forward


def find_router(layer: nn.Module) -> nn.Module:
    """The router module of a decoder layer."""
    for name, module in layer.named_modules():
        if name.rsplit(".", 1)[-1] in ("gate", "router"):
            return module
    raise ValueError("this layer has no router")
