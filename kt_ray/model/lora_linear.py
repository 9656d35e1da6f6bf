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

from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor, nn

from kt_ray.gpu import product

_ALL = slice(None)


class Parts(NamedTuple):
    """Of scale A and of Bᵀ, [r, n] each, what enters products: [3 r, n] bfloat16, the rounded values twice,
    then the rounded remainders."""

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float) -> Parts:
        """a: [r, K]. b: [N, r]. float32."""
        with torch.no_grad():
            return cls(_split(scale * a, remainder=2), _split(b.T, remainder=2))


class LoraLinear(peft.tuners.lora.Linear):
    """PEFT's module of a frozen base layer, with neither dropout nor a variant (DoRA).

    multiplies: False = give zeros, for whoever knows the output or does not need it (known_outputs.py).
    rows: of the outputs, which the base layer gives, too (head_ranges.py).
    kept: by the address of A, parts of values that do not change meanwhile; None = they may
        (`AdapterSwitch.fixed`).
    """

    multiplies = True
    rows = _ALL
    kept: dict[int, Parts] | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs or not multiplies_in_parts(x):
            answer: Tensor = super().forward(x, *args, **kwargs)
            return answer
        (name,) = self.active_adapters
        a: Tensor = self.lora_A[name].weight  # type: ignore[assignment]
        b: Tensor = self.lora_B[name].weight  # type: ignore[assignment]
        parts = self._parts(a, b, self.scaling[name])
        if self.rows != _ALL:
            b, parts = b[self.rows], Parts(parts.a, parts.b[:, self.rows])
        scale, base = self.scaling[name], self.base_layer
        y: Tensor = LoraFunction.apply(x, a, b, scale, base, self.multiplies, self.rows, parts)
        return y

    def _parts(self, a: Tensor, b: Tensor, scale: float) -> Parts:
        if self.kept is None:
            return Parts.of(a, b, scale)
        if a.data_ptr() not in self.kept:
            self.kept[a.data_ptr()] = Parts.of(a, b, scale)
        return self.kept[a.data_ptr()]


def multiplies_in_parts(x: Tensor) -> bool:
    """Whether an input takes this path."""
    return x.is_cuda and x.dtype == torch.bfloat16


class LoraFunction(torch.autograd.Function):
    """base(x) + scale B A x, with x bfloat16, A [r, K] and B [N, r] float32. Keeps x and A x for backward,
    and the parts of A and B."""

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
        parts: Parts | None = None,
    ) -> Tensor:
        y: Tensor = base(x)
        parts = Parts.of(a, b, scale) if parts is None else parts
        h = _split(_contracted(parts.a[len(a) :], x.reshape(-1, x.shape[-1])), remainder=1)
        if multiplies:
            _add_expanded(y.view(-1, y.shape[-1]), h, parts.b)
        ctx.save_for_backward(x, h, *parts)
        ctx.scale, ctx.base, ctx.rows = scale, base, rows
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, h, *both = ctx.saved_tensors
        parts, rank = Parts(*both), len(h) // 3
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dh = _split(_contracted(parts.b[rank:], dy), remainder=1)
        dx = da = db = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(ctx.base, dy, ctx.rows)
            _add_expanded(dx, dh, parts.a)
            dx = dx.view(x.shape)
        if ctx.needs_input_grad[1]:
            da = _contracted(dh[: 2 * rank], x.reshape(-1, x.shape[-1]).T).mul_(ctx.scale)
        if ctx.needs_input_grad[2]:
            db = _contracted(h[: 2 * rank], dy.T).T  # of which A x has the scale
        return dx, da, db, None, None, None, None, None


def input_gradient(base: Any, dy: Tensor, rows: slice = _ALL) -> Tensor:
    """dy W[rows] [M, K], new memory."""
    own = getattr(base, "input_gradient", None)  # of a QuantizedLinear
    gradient: Tensor = dy @ base.weight[rows] if own is None else own(dy, rows)
    return gradient


def _split(value: Tensor, remainder: int) -> Tensor:
    """[3 r, n] bfloat16 of a float32 [r, n]: rounded, but at `remainder`, from 0, the remainder, rounded."""
    parts = torch.empty((3, *value.shape), dtype=torch.bfloat16, device=value.device)
    parts.copy_(value)
    torch.sub(value, parts[0], out=parts[remainder])
    return parts.flatten(0, 1)


def _contracted(parts: Tensor, x: Tensor) -> Tensor:
    """w xᵀ [r, m] in float32, of w's values and remainders [2 r, n] and x [m, n] bfloat16."""
    high, low = product(parts, x.T).chunk(2)
    return high.add_(low)


def _add_expanded(out: Tensor, h: Tensor, w: Tensor) -> None:
    """out [m, n] += hᵀ w, of h [r, m] and w [r, n] as split: value by value, remainder by value and value by
    remainder. The remainders' product, at most 2⁻¹⁶ of the whole, is left out."""
    if out.is_cuda:
        out.addmm_(h.T, w)
    else:  # where nobody promises that a sum in bfloat16 is rounded only once
        out += product(h.T, w)
