"""LoRA of a bfloat16 linear layer on a GPU, which passes over its input and output only to multiply.

PEFT's path widens x to float32, and makes B A x, its scaled copy and the sum with y in float32: 20 bytes per
element of x and y forward and 40 backward. Here A, B and what lies between them enter bfloat16 products as
two numbers, the rounded value and the rounded remainder, together 16 bits of mantissa. Products sum in
float32, and one of them adds the adapter's part to y, which is rounded once.

That is 3 and 5 bytes. Forward reads x for A x (2) and reads and writes y (4). Backward reads dy for the
gradients of A x and of B (4), x for that of A (2), and reads and writes dx (4).

Shapes: M tokens, K inputs, N outputs, r rank. What has the rank is held as [r, ...].
"""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor, nn

from kt_ray.gpu import product

_ALL = slice(None)


class LoraLinear(peft.tuners.lora.Linear):
    """PEFT's module of a frozen base layer, with neither dropout nor a variant (DoRA).

    multiplies: False = give zeros, for whoever knows the output or does not need it (known_outputs.py).
    rows: of the outputs, which the base layer gives, too (head_ranges.py).
    """

    multiplies = True
    rows = _ALL

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs or not multiplies_in_parts(x):
            answer: Tensor = super().forward(x, *args, **kwargs)
            return answer
        (name,) = self.active_adapters
        a, b = self.lora_A[name].weight, self.lora_B[name].weight[self.rows]  # type: ignore[index]
        scale, base = self.scaling[name], self.base_layer
        y: Tensor = LoraFunction.apply(x, a, b, scale, base, self.multiplies, self.rows)
        return y


def multiplies_in_parts(x: Tensor) -> bool:
    """Whether an input takes this path."""
    return x.is_cuda and x.dtype == torch.bfloat16


class LoraFunction(torch.autograd.Function):
    """base(x) + scale B A x, with x bfloat16, A [r, K] and B [N, r] float32. Keeps x and A x for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        base: nn.Module,
        multiplies: bool = True,
        rows: slice = _ALL,
    ) -> Tensor:
        y: Tensor = base(x)
        h = _split(_contracted(_split(a), x.reshape(-1, x.shape[-1])))
        if multiplies:
            _add_expanded(y.view(-1, y.shape[-1]), h, b.T, scale)
        ctx.save_for_backward(x, h, a, b)
        ctx.scale, ctx.base, ctx.rows = scale, base, rows
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, h, a, b = ctx.saved_tensors
        dy = grads[0].reshape(-1, b.shape[0])
        dh = _split(_contracted(_split(b.T), dy))
        dx = da = db = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(ctx.base, dy, ctx.rows)
            _add_expanded(dx, dh, a, ctx.scale)
            dx = dx.view(x.shape)
        if ctx.needs_input_grad[1]:
            da = ctx.scale * _contracted(dh, x.reshape(-1, x.shape[-1]).T)
        if ctx.needs_input_grad[2]:
            db = ctx.scale * _contracted(h, dy.T).T
        return dx, da, db, None, None, None, None


def input_gradient(base: Any, dy: Tensor, rows: slice = _ALL) -> Tensor:
    """dy W[rows] [M, K], new memory."""
    own = getattr(base, "input_gradient", None)  # of a QuantizedLinear
    gradient: Tensor = dy @ base.weight[rows] if own is None else own(dy, rows)
    return gradient


def _split(value: Tensor, remainder: int = 1) -> Tensor:
    """[3, r, n] bfloat16 of a float32 [r, n]: rounded, but at `remainder` the remainder, rounded."""
    parts = torch.empty((3, *value.shape), dtype=torch.bfloat16, device=value.device)
    parts[:] = value
    torch.sub(value, parts[0], out=parts[remainder])
    return parts


def _contracted(parts: Tensor, x: Tensor) -> Tensor:
    """w xᵀ [r, m] in float32, of w [r, n] as split and x [m, n] bfloat16."""
    both = product(parts[:2].flatten(0, 1), x.T)
    high, low = both.chunk(2)
    return high + low


def _add_expanded(out: Tensor, h: Tensor, w: Tensor, scale: float) -> None:
    """out [m, n] += scale hᵀ w, of h [r, m] as split and w [r, n] float32. The remainders' product, at most
    2⁻¹⁶ of the whole, is left out."""
    left, right = h.flatten(0, 1).T, _split(w, remainder=2).flatten(0, 1)
    if out.is_cuda:
        out.addmm_(left, right, alpha=scale)
    else:  # where nobody promises that a sum in bfloat16 is rounded only once
        out += scale * product(left, right)
