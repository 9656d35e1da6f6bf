"""INT8 products (W8A8, W4A8) in torch: what `Engine(int8_products=True)` computes, with every rounding of it.

Elementwise in float32 in the engine's order and with exact integer sums, so that results without exp and
without adapters are the engine's to the bit. Shapes: R rows (a token at one expert), N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kt_ray.native import ExpertMatrix
from kt_ray.native.matrix import scales_to_float
from kt_ray.native.reference import activate
from tests.helpers.native import Case


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers -127 .. 127 of each row [R, K], and their scale [R, 1]."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / torch.where(scale == 0, 1.0, scale)).round().clamp(-127, 127), scale


def sums(rows: Tensor, columns: Tensor) -> Tensor:
    """Quantised rows [R, K] times integers [K, N], times the rows' scales: exact but for the scaling."""
    integers, scale = quantise(rows)
    return (integers.double() @ columns.double()).float() * scale


def weights_of(projection: ExpertMatrix, expert: int) -> tuple[Tensor, Tensor]:
    """Integers [N, K] and scales [N, groups] of one expert."""
    assert projection.scales is not None
    scales = scales_to_float(projection.scales)[expert]
    data = projection.data[expert]
    if projection.format == "int8":
        return data.float(), scales
    return ((data.unsqueeze(-1) >> torch.arange(0, 32, 4) & 15) - 8).flatten(1).float(), scales


def per_channel(projection: ExpertMatrix, expert: int) -> tuple[Tensor, Tensor]:
    """Integers [N, K] and scales [N] that backward multiplies: those of int4 are requantised."""
    integers, scales = weights_of(projection, expert)
    if projection.format == "int8":
        return integers, scales[:, 0]
    channels = scales.abs().amax(1) * torch.tensor(8.0 / 127.0)
    ratios = scales / torch.where(channels == 0, 1.0, channels)[:, None]
    columns = projection.shape[2] // scales.shape[1]
    return (integers * ratios.repeat_interleave(columns, 1)).round(), channels


def linear(rows: Tensor, projection: ExpertMatrix, expert: int) -> Tensor:
    """W x: of int4 group by group of 32 columns, added in order."""
    integers, scales = weights_of(projection, expert)
    if projection.format == "int8":
        return sums(rows, integers.T) * scales[:, 0]
    result = torch.zeros(len(rows), len(integers))
    columns = projection.shape[2] // scales.shape[1]
    for k in range(0, projection.shape[2], 32):
        result += sums(rows[:, k : k + 32], integers[:, k : k + 32].T) * scales[:, k // columns]
    return result


def linear_backward(gradients: Tensor, projections: list[ExpertMatrix], expert: int) -> Tensor:
    """Gradient of the common input, of those of several projections' outputs side by side."""
    found = [per_channel(p, expert) for p in projections]
    scales, integers = torch.cat([s for _, s in found]), torch.cat([w for w, _ in found])
    return sums(gradients * scales, integers)


def stored(t: Tensor) -> Tensor:
    return t.bfloat16().float()


def expect_int8(case: Case) -> dict[str, Tensor]:
    """Results of a case with at most one adapter, without dropout and biases, named as `Case.expected`."""
    w = case.weights
    adapter = case.lora[0] if case.lora else None
    grads = None if adapter is None else adapter.zeros_like()
    results = {"y": torch.zeros_like(case.dy), "dx": torch.zeros_like(case.dy)}
    results["dw"] = torch.zeros_like(case.weights_TK)

    def branch(projection: int, expert: int, rows: Tensor) -> Tensor:
        if adapter is None:
            return torch.zeros(())
        a, b = adapter.pair(projection)
        return adapter.scale * (rows @ a[expert].T) @ b[expert].T

    def branch_backward(projection: int, expert: int, rows: Tensor, dy: Tensor, factor: Tensor) -> Tensor:
        """Gradient of `rows`; those of the adapter's matrices are added, times `factor` [R, 1]."""
        if adapter is None or grads is None:
            return torch.zeros(())
        (a, b), (grad_a, grad_b) = adapter.pair(projection), grads.pair(projection)
        back = adapter.scale * dy @ b[expert]
        grad_a[expert] += (factor * back).T @ rows
        grad_b[expert] += (factor * dy).T @ (adapter.scale * rows @ a[expert].T)
        return back @ a[expert]

    for expert in range(w.E):
        token, slot = torch.where(case.ids == expert)
        if len(token) == 0:
            continue
        weight = case.weights_TK[token, slot].unsqueeze(1)
        one = torch.ones_like(weight)
        x, dy = stored(case.x.float())[token], stored(case.dy)[token]
        parts = [(p, m) for p, m in enumerate((w.gate, w.up)) if isinstance(m, ExpertMatrix)]
        assert isinstance(w.down, ExpertMatrix)
        outputs = [stored(linear(x, m, expert) + branch(p, expert, x)).requires_grad_() for p, m in parts]
        activated = activate(w, outputs[0] if w.gate is not None else None, outputs[-1])
        act = stored(activated.detach())
        y = linear(act, w.down, expert) + branch(2, expert, act)

        dact = linear_backward(dy, [w.down], expert) + branch_backward(2, expert, act, dy, weight)
        results["dw"][token, slot] = (act * dact).sum(1)
        back = [stored(g) for g in torch.autograd.grad(activated, outputs, weight * dact)]
        dx = linear_backward(torch.cat(back, 1), [m for _, m in parts], expert)
        for (p, _), g in zip(parts, back, strict=True):
            dx = dx + branch_backward(p, expert, x, g, one)
        for row, t in enumerate(token.tolist()):  # in the engine's order
            results["y"][t] += weight[row] * y[row]
            results["dx"][t] += dx[row]
    named = {} if grads is None else {f"0.{name}": t for name, t in grads.named().items()}
    return results | named
