"""The engine's function in float64 with the roundings of docs/numerics.md, and no others.

What the engine computes must agree with this far better than with the exact function: a rounding too many,
too few or in the wrong place shows as an error of the size of the roundings themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kt_ray.native.reference import DOWN, GATE, UP, activate, dense, dropout_hash
from tests.helpers.native import Case

BF16_PRODUCTS = ("avx512_bf16", "amx")


def stored(values: Tensor) -> Tensor:
    """Rounded to bfloat16, nearest even, by way of float32."""
    return values.float().bfloat16().double()


def pairs(values: Tensor) -> Tensor:
    """As the sum of a bfloat16 and the bfloat16 nearest to what it leaves."""
    high = stored(values)
    return high + stored(values.double() - high)


def with_roundings(case: Case, products: bool) -> dict[str, Tensor]:
    """What forward and backward of a case give, named as `Case.run` does. Weights must not be float32.

    Args:
        products: whether the instruction set multiplies bfloat16: one of BF16_PRODUCTS.
    """
    assert case.weights.formats[-1] != "f32"
    w = case.weights
    frozen = [None if p is None else dense(p, torch.float64) for p in (w.gate, w.up, w.down)]
    if products:  # else a panel holds the format's float32 values
        frozen = [None if p is None else stored(p) for p in frozen]
    biases = [None if b is None else b.double() for b in (w.gate_bias, w.up_bias, w.down_bias)]
    x, dy, tokens = stored(case.x), stored(case.dy), case.x.shape[0]
    out = {
        "y": torch.zeros(tokens, w.H, dtype=torch.float64),
        "dx": torch.zeros(tokens, w.H, dtype=torch.float64),
        "dw": torch.zeros(case.ids.shape, dtype=torch.float64),
    }
    grads = [lora.map(lambda t: torch.zeros_like(t, dtype=torch.float64)) for lora in case.lora]
    adapter = case.adapter_of_token
    if adapter is None:
        adapter = torch.full((tokens,), 0 if case.lora else -1)
    used = [GATE, UP] if w.gate is not None else [UP]

    for e, global_expert in enumerate(w.expert_ids):
        for index in range(-1, len(case.lora)):
            t, k = torch.where((case.ids == e) & (adapter == index)[:, None])
            weight = case.weights_TK[t, k].double()[:, None]

            def mask(projection: int, width: int, t: Tensor = t, expert: int = global_expert) -> Tensor:
                if case.dropout is None:
                    return torch.ones(len(t), width, dtype=torch.float64)
                u = dropout_hash(case.dropout, w.layer, expert, projection, case.keys[t], width)
                return (u >= int(case.dropout.p * 2**32)) / (1 - case.dropout.p)

            def matrices(
                projection: int, index: int = index, e: int = e
            ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
                """A and B as the projections to rank r see them, then as the expansions from it do."""
                a, b = (m[e].double() for m in case.lora[index].pair(projection))
                seen = pairs if products else torch.clone
                return seen(a), seen(b), a, b

            # Forward: gate, up (stored), act (stored), out.
            down_masks, inner, projected = mask(DOWN, w.I), {}, {}
            for p in used:
                inner[p] = x[t] @ frozen[p][e].T
                if biases[p] is not None:
                    inner[p] += biases[p][e]
                if index >= 0:
                    a, _, _, b = matrices(p)
                    projected[p] = case.lora[index].scale * (mask(p, w.H) * x[t]) @ a.T
                    inner[p] += projected[p] @ b.T
                inner[p] = stored(inner[p]).requires_grad_()
            exact = activate(w, inner.get(GATE), inner[UP])
            act = stored(exact.detach())
            o = act @ frozen[DOWN][e].T
            if biases[DOWN] is not None:
                o += biases[DOWN][e]
            if index >= 0:
                a, _, _, b = matrices(DOWN)
                mid = case.lora[index].scale * (down_masks * act) @ a.T
                o += mid @ b.T
            out["y"].index_add_(0, t, weight * o)

            # Backward: dact, then the gradients of gate and up (stored).
            dact = dy[t] @ frozen[DOWN][e]
            if index >= 0:
                _, b, a, _ = matrices(DOWN)
                back = case.lora[index].scale * dy[t] @ b
                dact += down_masks * (back @ a)
                grads[index].down_b[e] += (weight * dy[t]).T @ mid
                grads[index].down_a[e] += (weight * back).T @ (down_masks * act)
            out["dw"][t, k] = (act * dact).sum(1)
            if biases[DOWN] is not None:
                out["dw"][t, k] += case.dy[t].double() @ biases[DOWN][e]
            slopes = torch.autograd.grad(exact, [inner[p] for p in used], weight * dact)
            for p, slope in zip(used, slopes, strict=True):
                d = stored(slope)
                dx = d @ frozen[p][e]
                if index >= 0:
                    _, b, a, _ = matrices(p)
                    v = case.lora[index].scale * d @ b
                    dx += mask(p, w.H) * (v @ a)
                    grad_a, grad_b = grads[index].pair(p)
                    grad_b[e] += d.T @ projected[p]
                    grad_a[e] += v.T @ (mask(p, w.H) * x[t])
                out["dx"].index_add_(0, t, dx)
    return out | {f"{a}.{m}": t for a, g in enumerate(grads) for m, t in g.named().items()}
