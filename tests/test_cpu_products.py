"""Widened products of bfloat16 beside float64, and where torch takes them."""

import subprocess
import sys
import textwrap
from itertools import product

import pytest
import torch
from torch import Tensor

from kt_ray import cpu_products


def made(*shape: int, layout: str = "plain") -> Tensor:
    """Random bfloat16: contiguous, transposed in memory, or every second element of wider memory."""
    if layout == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).bfloat16().mT
    if layout == "strided":
        return torch.randn(*shape[:-1], 2 * shape[-1]).bfloat16()[..., ::2]
    return torch.randn(*shape).bfloat16()


def check(found: Tensor, exact: Tensor, size: Tensor) -> None:
    """size: sums of absolute products. Half a unit of bfloat16 for the result, float32 for its sums."""
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * size + 2**-120).all()


LAYOUTS = list(product(("plain", "transposed", "strided"), repeat=2))


@pytest.mark.parametrize("left, right", LAYOUTS)
@pytest.mark.parametrize("rows, depth, columns", [(1, 40, 24), (7, 33, 65), (9, 96, 200), (70, 257, 130)])
@pytest.mark.parametrize("block", [1 << 20, 1000], ids=["whole", "blocks"])
def test_matrices(left, right, rows, depth, columns, block, monkeypatch):
    monkeypatch.setattr(cpu_products, "_BLOCK", block)
    torch.manual_seed(0)
    a, b = made(rows, depth, layout=left), made(depth, columns, layout=right)
    bias = made(columns)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    check(cpu_products.mm(a, b), exact, size)
    added = cpu_products.addmm(bias, a, b, beta=0.5, alpha=-2)
    check(added, 0.5 * bias.double() - 2 * exact, size * 2 + bias.double().abs())


@pytest.mark.parametrize("left, right", LAYOUTS)
@pytest.mark.parametrize("batch, rows, depth, columns", [(1, 9, 40, 24), (5, 33, 70, 65), (3, 130, 20, 300)])
@pytest.mark.parametrize("block", [1 << 20, 10000, 1000], ids=["whole", "one by one", "blocks"])
def test_batches(left, right, batch, rows, depth, columns, block, monkeypatch):
    monkeypatch.setattr(cpu_products, "_BLOCK", block)
    torch.manual_seed(0)
    a, b = made(batch, rows, depth, layout=left), made(batch, depth, columns, layout=right)
    other = made(batch, 1, columns)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    check(cpu_products.bmm(a, b), exact, size)
    added = cpu_products.baddbmm(other, a, b, beta=0.5, alpha=-2)
    check(added, 0.5 * other.double() - 2 * exact, size * 2 + other.double().abs())


@pytest.mark.parametrize("rows, depth, columns", [(0, 8, 8), (9, 0, 8), (9, 8, 0)])
def test_nothing_to_multiply(rows, depth, columns):
    a, b = made(rows, depth), made(depth, columns)
    assert torch.equal(cpu_products.mm(a, b), a @ b)
    assert torch.equal(cpu_products.bmm(a[None], b[None]), (a @ b)[None])
    assert torch.equal(
        cpu_products.bmm(a.expand(0, rows, depth), b.expand(0, depth, columns)), a.new_empty(0, rows, columns)
    )


def test_an_operand_that_is_read_once_is_left_to_torch(monkeypatch):
    """One token: the weights lie along the contraction."""
    widened = []
    monkeypatch.setattr(cpu_products, "_rounded", lambda *tensors: widened.append(tensors))
    weight = made(24, 40)
    cpu_products.mm(made(7, 40), weight.t())
    assert not widened
    cpu_products.mm(made(8, 40), weight.t())
    cpu_products.mm(made(1, 24), weight)
    assert len(widened) == 2


REGISTERED = """
    import torch
    from torch import nn
    from kt_ray import cpu_products

    cpu_products.multiplies_bfloat16 = lambda: False
    taken = []
    own = cpu_products._rounded
    def rounded(*arguments):
        made = own(*arguments)
        taken.append(tuple(made.shape))
        return made
    cpu_products._rounded = rounded

    torch.manual_seed(0)
    a, b = torch.randn(20, 30), torch.randn(30, 40)
    before = a @ b, torch.addmm(b[0], a, b), torch.bmm(a[None], b[None])
    cpu_products.widen_products()
    cpu_products.widen_products()  # once is enough
    after = a @ b, torch.addmm(b[0], a, b), torch.bmm(a[None], b[None])
    assert all(torch.equal(x, y) for x, y in zip(before, after)), "float32 is as before"
    assert not taken

    x = torch.randn(2, 10, 30).bfloat16().requires_grad_()
    linear = nn.Linear(30, 40, dtype=torch.bfloat16)
    y = linear(x)
    assert taken == [(20, 40)], taken
    y.backward(torch.ones_like(y))
    assert taken[1:] in ([(20, 30), (40, 30)], [(40, 30), (20, 30)]), taken
    exact = linear.weight.double().sum(0)
    assert torch.allclose(x.grad.double(), exact.expand(2, 10, 30), rtol=2**-8, atol=1e-6)

    taken.clear()
    torch.einsum("bhtd,bhsd->bhts", torch.randn(2, 3, 9, 8).bfloat16(), torch.randn(2, 3, 9, 8).bfloat16())
    assert taken == [(6, 9, 9)], taken
    w = linear.weight.t()
    for wrong in (
        lambda: x[0] @ x[0],
        lambda: torch.bmm(x, x),
        lambda: x[0].float() @ w,
        lambda: torch.mm(x, x.mT),
        lambda: torch.mm(x[0], w[:, 0]),
        lambda: torch.addmm(w[0], x, x.mT),
    ):
        try:
            wrong()
        except RuntimeError:
            pass  # torch's own words
        else:
            raise AssertionError("torch refuses these")
    print("all there")
"""


def test_registered():
    """In a process of its own: what is registered stays."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(REGISTERED)], capture_output=True, text=True
    )
    assert done.stdout == "all there\n", done.stderr
    assert done.stderr == ""
