"""LoRA of a linear layer, of one adapter or of several trainings', in few passes over its input and output.

PEFT's path widens x to float32, and makes B A x, its scaled copy and the sum with y in float32, each with a
node of autograd that keeps them: 20 bytes per element of x and y forward and 40 backward.

**In float32** (`WideFunction`; on a CPU, and of float32 layers): one node, which widens x and dy for the
products and keeps neither. y and dx get the adapter's part in place, and are rounded once. Where the scale is
a power of two, y has PEFT's bits.

**In parts** (`PartsFunction`; bfloat16 on a GPU): A, B and what lies between them enter bfloat16 products as
two numbers, the rounded value and the rounded remainder, together 16 bits of mantissa. Products sum in
float32, and one of them adds the adapter's part to y, which is rounded once.

That is 3 and 5 bytes. Forward reads x for A x (2) and reads and writes y (4). Backward reads dy for the
gradients of A x and of B (4), x for that of A (2), and reads and writes dx (4).

Shapes: M tokens, K inputs, N outputs, r rank. What has the rank is held as [r, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor, nn

from kt_ray.gpu import product

_ALL = slice(None)


class Share(NamedTuple):
    """One training's adapter, and how many of a batch's `of` rows it has: those behind the shares before."""

    rows: int
    of: int
    a: Tensor  # float32 [r, K], a leaf with the gradient to add to
    b: Tensor  # [N, r]


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
    shares: adapters of inputs whose rows are of several trainings; () = all have the module's own.
    """

    multiplies = True
    rows = _ALL
    kept: dict[int, Parts] | None = None
    shares: tuple[Share, ...] = ()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs:
            answer: Tensor = super().forward(x, *args, **kwargs)
            return answer
        (name,) = self.active_adapters
        scale, sizes = self.scaling[name], self._sizes(x)
        pairs: list[Any] = [(share.a, share.b) for share in self.shares]
        pairs = pairs or [(self.lora_A[name].weight, self.lora_B[name].weight)]
        if not multiplies_in_parts(x):
            sides = [side for a, b in pairs for side in (a, b if self.rows == _ALL else b[self.rows])]
            return WideFunction.apply(x, scale, self.base_layer, self.multiplies, self.rows, sizes, *sides)
        adapters = []
        for a, b in pairs:
            parts = self._parts(a, b, scale)
            if self.rows != _ALL:
                b, parts = b[self.rows], Parts(parts.a, parts.b[:, self.rows])
            adapters.append((a, b, parts))
        return with_adapters(x, adapters, scale, self.base_layer, self.multiplies, self.rows, sizes)

    def _sizes(self, x: Tensor) -> list[int]:
        """How many of an input's rows [.., K] each adapter has: the batch's rows come first in its shape."""
        inputs = x.numel() // x.shape[-1]
        if not self.shares:
            return [inputs]
        each, rest = divmod(inputs, self.shares[0].of)
        if rest:
            raise RuntimeError(f"an adapted module got {inputs} rows for {self.shares[0].of} of a batch")
        return [share.rows * each for share in self.shares]

    def _parts(self, a: Tensor, b: Tensor, scale: float) -> Parts:
        if self.kept is None:
            return Parts.of(a, b, scale)
        if a.data_ptr() not in self.kept:
            self.kept[a.data_ptr()] = Parts.of(a, b, scale)
        return self.kept[a.data_ptr()]


def multiplies_in_parts(x: Tensor) -> bool:
    """Whether an input takes this path."""
    return x.is_cuda and x.dtype == torch.bfloat16


def with_adapters(
    x: Tensor,
    adapters: Sequence[tuple[Tensor, Tensor, Parts]],
    scale: float,
    base: nn.Module,
    multiplies: bool = True,
    rows: slice = _ALL,
    sizes: Sequence[int] = (),
) -> Tensor:
    """base(x) + scale B A x, bfloat16 [.., N], with x bfloat16 [.., K].

    Args:
        adapters: A [r, K] and B [N, r], float32, and their parts. sizes: how many of x's rows each has; () =
            the one adapter has all.
        multiplies, rows: see `LoraLinear`.
    """
    sides = [side for a, b, _ in adapters for side in (a, b)]
    parts, sizes = [parts for *_, parts in adapters], list(sizes) or [x.numel() // x.shape[-1]]
    y: Tensor = PartsFunction.apply(x, scale, base, multiplies, rows, sizes, parts, *sides)
    return y


class PartsFunction(torch.autograd.Function):
    """See `with_adapters`. Keeps x and A x for backward, and the parts of A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: float,
        base: nn.Module,
        multiplies: bool,
        rows: slice,
        sizes: list[int],
        parts: list[Parts],
        *sides: Tensor,
    ) -> Tensor:
        y: Tensor = base(x)
        kept: list[Tensor] = []
        outs = _shared(y.view(-1, y.shape[-1]), sizes) if multiplies else (None,) * len(sizes)
        for own, out, (a, b) in zip(_shared(_rows(x), sizes), outs, parts, strict=True):
            h = _split(_contracted(a[len(a) // 3 :], own), remainder=1)
            if out is not None:
                _add_expanded(out, h, b)
            kept += [h, a, b]
        ctx.save_for_backward(x, *kept)
        ctx.scale, ctx.base, ctx.rows, ctx.sizes = scale, base, rows, sizes
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        dy, needed = _rows(grads[0]), ctx.needs_input_grad
        dx = input_gradient(ctx.base, dy, ctx.rows) if needed[0] else None
        of_sides: list[Tensor | None] = []
        for number, rows in enumerate(zip(*(_shared(t, ctx.sizes) for t in (_rows(x), dy)), strict=True)):
            own, own_dy = rows
            h, a, b = kept[3 * number : 3 * number + 3]
            rank, da, db = len(h) // 3, None, None
            dh = _split(_contracted(b[rank:], own_dy), remainder=1)
            if dx is not None:
                _add_expanded(_shared(dx, ctx.sizes)[number], dh, a)
            if needed[7 + 2 * number]:
                da = _contracted(dh[: 2 * rank], own.T).mul_(ctx.scale)
            if needed[8 + 2 * number]:
                db = _contracted(h[: 2 * rank], own_dy.T).T  # of which A x has the scale
            of_sides += [da, db]
        return None if dx is None else dx.view(x.shape), *(None,) * 6, *of_sides


class WideFunction(torch.autograd.Function):
    """base(x) + scale B A x with products of A and B in float32, x [.., K] and the result [.., N] in the type
    of the layer. Keeps x and A x for backward.

    multiplies, rows: see `LoraLinear`. sizes: how many of x's rows each adapter has; sides: A [r, K] and B
    [N, r] of each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: float,
        base: nn.Module,
        multiplies: bool,
        rows: slice,
        sizes: list[int],
        *sides: Tensor,
    ) -> Tensor:
        y: Tensor = base(x)
        wide = _shared(_rows(x).to(sides[0].dtype), sizes)
        kept = [torch.mm(own, a.t()).mul_(scale) for own, a in zip(wide, sides[::2], strict=True)]
        if multiplies:
            for out, h, b in zip(_shared(_rows(y), sizes), kept, sides[1::2], strict=True):
                out.add_(torch.mm(h, b.t()))
        ctx.save_for_backward(x, *kept, *sides)
        ctx.scale, ctx.base, ctx.rows, ctx.sizes = scale, base, rows, sizes
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sizes, scale = ctx.sizes, ctx.scale
        (x, *saved), count = ctx.saved_tensors, len(sizes)
        kept, sides = saved[:count], saved[count:]
        dy = _rows(grads[0])
        dx = input_gradient(ctx.base, dy, ctx.rows) if ctx.needs_input_grad[0] else None
        outs = (None,) * len(sizes) if dx is None else _shared(dx, sizes)
        wide, wide_dy = (_shared(_rows(t).to(sides[0].dtype), sizes) for t in (x, dy))
        of_sides: list[Tensor] = []
        for number, (own, own_dy, out, h) in enumerate(zip(wide, wide_dy, outs, kept, strict=True)):
            a, b = sides[2 * number : 2 * number + 2]
            dh = torch.mm(own_dy, b).mul_(scale)
            if out is not None:
                out.add_(torch.mm(dh, a))
            of_sides += [torch.mm(dh.t(), own), torch.mm(own_dy.t(), h)]  # of which A x has the scale
        return None if dx is None else dx.view(x.shape), *(None,) * 5, *of_sides


def _rows(x: Tensor) -> Tensor:
    """[.., n] as [M, n]."""
    return x.reshape(-1, x.shape[-1])


def _shared(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Each adapter's rows of x [M, n]. Where there is one adapter, no view is made: tokens are generated one
    by one, and the host is what they wait for."""
    return (x,) if len(sizes) == 1 else x.split(sizes)


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
