"""LoRA in two bfloat16 parts, against float64 and against PEFT's own path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kt_ray.model.lora_linear as lora_linear
from kt_ray.checkpoint.quantized_linear import QuantizedLinear
from kt_ray.config.schema import LoraConfig
from kt_ray.model.dropout import DropoutContext
from kt_ray.model.lora import AdapterSwitch, inject_lora
from kt_ray.model.lora_linear import LoraLinear, Parts, with_adapters
from kt_ray.native import ExpertMatrix

EXACT = 2.0**-15  # of what the adapter adds, before anything is rounded to bfloat16
HALF = 2.0**-8  # half the distance of two bfloat16 numbers at 1: the largest error of one rounding
SCALE = 0.7
SHAPES = [(3,), (1, 1), (257,), (2, 29)]  # of x, its last dimension left out


class Nothing(nn.Module):
    """A base layer that answers zeros, so that the adapter's part is all there is."""

    def __init__(self, n_in: int, n_out: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.n_in, self.n_out, self.dtype = n_in, n_out, dtype

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:-1], self.n_out, dtype=self.dtype)

    def input_gradient(self, dy: Tensor, rows: slice = slice(None)) -> Tensor:
        return torch.zeros(dy.shape[0], self.n_in, dtype=dy.dtype)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(n_in: int, n_out: int) -> QuantizedLinear:
    values = (40 * normal(9, 1, n_out, n_in)).clamp(-127, 127).to(torch.int8)
    scales = normal(10, 1, n_out, 1).abs() / 40 / n_in**0.5
    return QuantizedLinear(ExpertMatrix.int8(values, scales), torch.bfloat16, "cpu")


def base_of(kind: str, n_in: int, n_out: int) -> nn.Module:
    if kind == "nothing":
        return Nothing(n_in, n_out)
    if kind == "quantized":
        return quantized(n_in, n_out)
    linear = nn.Linear(n_in, n_out, bias=kind == "bias", dtype=torch.bfloat16).requires_grad_(False)
    with torch.no_grad():
        linear.weight.copy_(normal(7, n_out, n_in) / n_in**0.5)
        if kind == "bias":
            linear.bias.copy_(normal(8, n_out))
    return linear


def weight_of(base: Any) -> Tensor:
    """W in float64."""
    return torch.zeros(base.n_out, base.n_in).double() if isinstance(base, Nothing) else base.weight.double()


def rounded_parts(x: Tensor, a: Tensor, b: Tensor, scale: float = SCALE) -> Tensor:
    """What plain bfloat16 products would add, in float64."""
    return scale * x.double() @ a.bfloat16().double().T @ b.double().T


def one_adapter(x: Tensor, a: Tensor, b: Tensor, scale: float, base: nn.Module) -> Tensor:
    return with_adapters(x, [(a, b, Parts.of(a, b, scale))], scale, base)


def spread(*factors: Tensor) -> float:
    """Norm that a product of float64 matrices has on average over the signs of their elements."""
    product = factors[0].square()
    for factor in factors[1:]:
        product = product @ factor.square()
    return float(product.sum().sqrt())


@pytest.mark.parametrize("kind", ["nothing", "plain", "bias", "quantized"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("n_in", "n_out", "rank"), [(33, 47, 1), (64, 7, 3), (129, 64, 8), (96, 80, 64), (1, 1, 1)]
)
def test_as_in_float64(kind: str, shape: tuple[int, ...], n_in: int, n_out: int, rank: int) -> None:
    base = base_of(kind, n_in, n_out)
    a, b = normal(1, rank, n_in).requires_grad_(), normal(2, n_out, rank).requires_grad_()
    x = normal(3, *shape, n_in).bfloat16().requires_grad_()
    dy = normal(4, *shape, n_out).bfloat16()
    y = one_adapter(x, a, b, SCALE, base)
    assert y.dtype == torch.bfloat16 and y.shape == (*shape, n_out)
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    assert (dx.dtype, da.dtype, db.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (dx.shape, da.shape, db.shape) == (x.shape, a.shape, b.shape)

    X, A, B, G = (t.detach().double().reshape(-1, t.shape[-1]) for t in (x, a, b, dy))
    frozen = base(x.detach()).double().view(-1, n_out)
    exact = frozen + SCALE * X @ A.T @ B.T
    error = (y.detach().double().view(exact.shape) - exact).norm()
    assert float(error) <= HALF * float(exact.norm()) + EXACT * SCALE * spread(X, A.T, B.T)
    through = G @ weight_of(base)
    exact = through + SCALE * G @ B @ A
    error = (dx.double().view(exact.shape) - exact).norm()
    stored = HALF * float(exact.norm() + through.norm())  # the base's part is rounded by itself
    assert float(error) <= stored + EXACT * SCALE * spread(G, B, A)
    for found, factors in ((da, (B.T, G.T, X)), (db, (G.T, X, A.T))):
        exact = SCALE * factors[0] @ factors[1] @ factors[2]
        assert float((found.double() - exact).norm()) <= EXACT * SCALE * spread(*factors)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_what_is_added_has_15_bits(rank: int) -> None:
    """Before the one rounding; plain bfloat16 has 8."""
    a, b = normal(1, rank, 200), normal(2, 300, rank)
    x = normal(3, 64, 200).bfloat16()
    X, A, B = x.double(), a.double(), b.double()
    exact, limit = SCALE * X @ A.T @ B.T, EXACT * SCALE * spread(X, A.T, B.T)
    y = one_adapter(x, a, b, SCALE, Nothing(200, 300, torch.float32))
    assert float((y.double() - exact).norm()) <= limit
    assert float((rounded_parts(x, a, b) - exact).norm()) > 10 * limit


def test_outputs_are_rounded_once() -> None:
    """Exact numbers rounded to bfloat16, but where they lie at the boundary between two."""
    base, dy = Nothing(200, 300), normal(4, 64, 300).bfloat16()
    a, b = normal(1, 8, 200), normal(2, 300, 8)
    x = normal(3, 64, 200).bfloat16().requires_grad_()
    y = one_adapter(x, a, b, SCALE, base)
    (dx,) = torch.autograd.grad(y, x, dy)
    forward, backward = (SCALE * t.double() for t in (x.detach(), dy))
    for found, exact, plain in (
        (y, forward @ a.double().T @ b.double().T, rounded_parts(x, a, b)),
        (dx, backward @ b.double() @ a.double(), rounded_parts(dy, b.T, a.T)),
    ):
        once = exact.bfloat16()
        assert float((found != once).float().mean()) < 0.01
        assert float((plain.bfloat16() != once).float().mean()) > 0.1


def test_only_what_is_asked_for() -> None:
    """The first layer's input needs no gradient: its base is not asked for one."""
    base = Nothing(5, 4)
    base.input_gradient = None  # type: ignore[assignment, method-assign]
    a, b = normal(1, 2, 5).requires_grad_(), normal(2, 4, 2).requires_grad_()
    x = normal(3, 6, 5).bfloat16()
    y = one_adapter(x, a, b, 1.0, base)
    y.backward(torch.ones_like(y))
    assert a.grad is not None and b.grad is not None and x.grad is None
    frozen = one_adapter(x.requires_grad_(), a.detach(), b.detach(), 1.0, base_of("plain", 5, 4))
    frozen.backward(torch.ones_like(frozen))
    assert x.grad is not None
    with torch.no_grad():
        assert not one_adapter(x, a, b, 1.0, base).requires_grad


def test_what_is_kept_for_backward() -> None:
    """x itself, and three numbers of two bytes per token and rank, and per parameter: no float32 copy."""
    kept: list[Tensor] = []
    a, b = normal(1, 2, 50).requires_grad_(), normal(2, 40, 2).requires_grad_()
    parts = Parts.of(a, b, 1.0)
    x = normal(3, 6, 50).bfloat16()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        with_adapters(x, [(a, b, parts)], 1.0, base_of("plain", 50, 40))
    own = [t for t in kept if t.data_ptr() not in {x.data_ptr(), *(part.data_ptr() for part in parts)}]
    assert [(tuple(t.shape), t.dtype) for t in own] == [((6, 6), torch.bfloat16)]
    assert [(tuple(t.shape), t.dtype) for t in parts] == [((6, n), torch.bfloat16) for n in (50, 40)]


def test_one_adapter_makes_no_views_of_its_rows() -> None:
    """The host's time for them is a token's time where tokens are generated one by one."""
    called: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    x, a, b = normal(3, 6, 50).bfloat16(), normal(1, 2, 50), normal(2, 40, 2)
    sides, base = (a, b, Parts.of(a, b, 1.0)), base_of("plain", 50, 40)
    for adapters, sizes in (([sides], [6]), ([sides, sides], [2, 4])):
        called.clear()
        with Noted(), torch.no_grad():
            with_adapters(x, adapters, 1.0, base, sizes=sizes)
        assert any("split_with_sizes" in name for name in called) == (len(adapters) > 1)


def adapted(base: Any, **changes: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    """A PEFT module around a base layer, its adapter not zero."""
    layer: Any = nn.Module()
    layer.norm, layer.q_proj = nn.LayerNorm(1), base  # PEFT wants a parameter somewhere
    config = LoraConfig(rank=4, alpha=6.0, **changes)
    cpu = torch.device("cpu")
    parameters = inject_lora({"l": layer}, ["l.q_proj"], config, 0, DropoutContext(), cpu)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(parameters.items()):
            if not name.endswith("magnitude_vector"):
                parameter.copy_(normal(number, *parameter.shape))
    return layer, parameters


def passed(layer: nn.Module, x: Tensor, parameters: dict[str, nn.Parameter]) -> list[Tensor]:
    """y, dx and the adapter's gradients, float32."""
    module: Any = layer.q_proj
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    grads = torch.autograd.grad(
        y, (leaf, *parameters.values()), normal(11, *y.shape).to(y), allow_unused=True
    )
    return [t.detach().float() for t in (y, *grads) if t is not None]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Takes the path on the CPU, too; the shapes of its inputs."""
    calls: list[tuple[int, ...]] = []

    def takes(x: Tensor) -> bool:
        if x.dtype == torch.bfloat16:
            calls.append(tuple(x.shape))
        return x.dtype == torch.bfloat16

    monkeypatch.setattr(lora_linear, "multiplies_in_parts", takes)
    return calls


@pytest.mark.parametrize("kind", ["plain", "bias", "quantized"])
@pytest.mark.parametrize("rslora", [False, True])
def test_as_pefts_path(everywhere: list[Any], monkeypatch: Any, kind: str, rslora: bool) -> None:
    base = base_of(kind, 48, 40)
    layer, parameters = adapted(base, rslora=rslora)
    x = normal(3, 2, 9, 48).bfloat16()
    own = passed(layer, x, parameters)
    assert everywhere == [(2, 9, 48)]
    monkeypatch.setattr(lora_linear, "multiplies_in_parts", lambda x: False)
    peft = passed(layer, x, parameters)
    for found, want, limit in zip(own, peft, (HALF, 2 * HALF, EXACT, EXACT), strict=True):
        assert float((found - want).norm()) <= limit * float(want.norm())
    assert float(own[2].norm()) > 0 and float(own[3].norm()) > 0


def test_a_disabled_adapter_and_other_values(everywhere: list[Any]) -> None:
    """As generation and preference losses switch adapters, by `AdapterSwitch`."""
    base = base_of("plain", 48, 40)
    x = normal(3, 5, 48).bfloat16()
    bare = base(x)
    layer, parameters = adapted(base)
    switch = AdapterSwitch({0: layer}, parameters)
    trained = layer.q_proj(x)
    switch.keep("first", copy=True)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(2)
    twice = layer.q_proj(x)
    switch.switch(0, False)
    assert torch.equal(layer.q_proj(x), bare) and len(everywhere) == 2
    switch.switch(0, "first")
    assert torch.equal(layer.q_proj(x), trained) and not torch.equal(trained, twice)
    switch.switch(0, True)
    assert torch.equal(layer.q_proj(x), twice)


def test_parts_of_values_that_do_not_change(everywhere: list[Any], monkeypatch: Any) -> None:
    """Made once for all calls, of each adapter that is used meanwhile; the same bits."""
    made: list[Parts] = []
    of = Parts.of
    monkeypatch.setattr(Parts, "of", lambda *given: made.append(of(*given)) or made[-1])
    x = normal(3, 2, 9, 48).bfloat16()
    layer, parameters = adapted(base_of("plain", 48, 40))
    switch = AdapterSwitch({0: layer}, parameters)
    switch.keep("half", copy=True)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(2)
    own = passed(layer, x, parameters)
    made.clear()
    with switch.fixed():
        first, again = passed(layer, x, parameters), passed(layer, x, parameters)
        switch.switch(0, "half")
        half = passed(layer, x, parameters)
        switch.switch(0, True)
        assert torch.equal(passed(layer, x, parameters)[0], own[0]) and len(made) == 2
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(own, first, again, strict=True))
    assert not torch.equal(half[0], own[0])
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(0.5)
    assert torch.equal(passed(layer, x, parameters)[0], half[0])


@pytest.mark.parametrize("in_parts", [True, False], ids=["parts", "peft"])
def test_trainings_that_a_pass_joins(everywhere: list[Any], in_parts: bool) -> None:
    """Two graphs of one layer at once, each of another training's LoRA: gradients go to whose they are."""
    x = normal(3, 2, 9, 48)
    x = x.bfloat16() if in_parts else x
    base = base_of("plain", 48, 40)
    layer, parameters = adapted(base if in_parts else base.float())
    own = {name: p.detach().clone() for name, p in parameters.items()}
    other = {name: 2 * value for name, value in own.items()}
    expected = {}
    for which, values in ((True, own), ("other", other)):
        for name, parameter in parameters.items():
            parameter.data = values[name].clone()
        expected[which] = passed(layer, x, parameters)
    for name, parameter in parameters.items():
        parameter.data, parameter.grad = own[name], torch.zeros_like(own[name])
    switch = AdapterSwitch({0: layer}, parameters)
    grads = {name: torch.zeros_like(value) for name, value in other.items()}
    mine = {name: p.grad for name, p in parameters.items()}
    order: tuple[bool | str, ...] = (True, "other")
    with switch.lent({"other": (other, grads)}):
        graphs = {}
        for which in order:
            switch.switch(0, which)
            leaf = x.clone().requires_grad_()
            graphs[which] = leaf, layer.q_proj(leaf)
        for which in order:
            switch.switch(0, which)
            leaf, y = graphs[which]
            torch.autograd.backward(y, normal(11, *y.shape).to(y))
            assert leaf.grad is not None
            for found, want in zip((y, leaf.grad), expected[which], strict=False):
                assert torch.equal(found.detach().float(), want)
    for which, found_grads in ((True, mine), ("other", grads)):
        for found, want in zip(found_grads.values(), expected[which][2:], strict=True):
            assert found is not None and torch.equal(found, want)
    assert all(p.data_ptr() == own[name].data_ptr() for name, p in parameters.items())
    assert all(p.grad is mine[name] for name, p in parameters.items())
    with pytest.raises(KeyError):
        switch.switch(0, "other")


@pytest.mark.parametrize("kind", ["parts", "peft", "quantized"])
def test_rows_of_several_trainings(everywhere: list[Any], monkeypatch: Any, kind: str) -> None:
    """Of one input some rows are of each: as if every training's had come alone."""
    dtype = torch.float32 if kind == "peft" else torch.bfloat16
    x, dy = normal(3, 5, 9, 48).to(dtype), normal(11, 5, 9, 40).to(dtype)
    if kind == "quantized":  # a CPU's path in bfloat16
        monkeypatch.setattr(lora_linear, "multiplies_in_parts", lambda x: False)
    layer, parameters = adapted(base_of("quantized" if kind == "quantized" else "plain", 48, 40).to(dtype))
    module: Any = layer.q_proj
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    other = {name: p.detach().flip(-1) for name, p in parameters.items()}
    grads = {name: torch.zeros_like(value) for name, value in other.items()}
    summed = [*(p.grad for p in parameters.values() if p.grad is not None), *grads.values()]
    switch = AdapterSwitch({0: layer}, parameters)

    def run(which: Any, rows: slice) -> tuple[Tensor, Tensor]:
        switch.switch(0, which)
        leaf = x[rows].clone().requires_grad_()
        y = module(leaf)
        torch.autograd.backward(y, dy[rows])
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    def gradients() -> list[Tensor]:
        found = [t.clone() for t in summed]
        for t in summed:
            t.zero_()
        return found

    with switch.lent({"other": (other, grads)}):
        shared = run((("other", 1), (True, 2), ("other", 2)), slice(None))
        of_shared = gradients()
        alone = [run("other", slice(1)), run(True, slice(1, 3)), run("other", slice(3, 5))]
        of_alone = gradients()
        switch.switch(0, ((True, 2), ("other", 1)))
        with pytest.raises(RuntimeError, match="got 5 rows for 3 of a batch"):
            module(x[:, 0])
    close = {torch.bfloat16: 2 * HALF, torch.float32: 1e-6}[x.dtype]
    for found, parts in zip(shared, zip(*alone, strict=True), strict=True):
        assert float((found - torch.cat(parts)).float().norm()) <= close * float(found.float().norm())
    for found, want in zip(of_shared, of_alone, strict=True):
        assert float(want.norm()) > 0 and float((found - want).norm()) <= EXACT * float(want.norm())
    assert module(x).dtype == x.dtype and not module.shares


def test_the_rest_is_pefts(everywhere: list[Any]) -> None:
    """Dropout and DoRA by the class; float32 and float16, and every CPU, by the input."""
    plain = base_of("plain", 16, 16)
    for changes in ({"dropout": 0.1}, {"dora": True}):
        layer, _ = adapted(base_of("plain", 16, 16), **changes)
        assert not isinstance(layer.q_proj, LoraLinear)
    layer, _ = adapted(plain.float())
    assert type(layer.q_proj) is LoraLinear
    layer.q_proj(normal(3, 5, 16))
    assert everywhere == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cpu_has_pefts_output(dtype: torch.dtype) -> None:
    """y and the gradients of A and B to the bit, where the scale is a power of two. dx is rounded once, where
    PEFT rounds both its parts."""
    import peft

    layer, parameters = adapted(base_of("bias", 48, 40).to(dtype))
    layer.q_proj.scaling["default"] = 2.0
    x = normal(3, 7, 48).to(dtype)
    y, dx, *own = passed(layer, x, parameters)
    layer.q_proj.__class__ = peft.tuners.lora.Linear
    want, twice, *pefts = passed(layer, x, parameters)
    for found, of_peft in zip((y, *own), (want, *pefts), strict=True):
        assert torch.equal(found, of_peft)
    layer.double()
    _, exact, *_ = passed(layer, x.double(), parameters)
    error, of_peft = (float((gradient - exact).norm()) for gradient in (dx, twice))
    assert error < 0.9 * of_peft if dtype == torch.bfloat16 else error <= 1e-6 * float(exact.norm())
