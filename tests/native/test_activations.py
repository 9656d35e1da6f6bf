"""Activations, biases and layouts of the weights, on every instruction set, against float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_ray.native import Engine, ExpertLora, ExpertWeights
from kt_ray.native.reference import activate, moe_reference
from tests.helpers.native import ACTIVATIONS, EVERY, ISAS, LAYOUTS, Case, Shape, lay_out, make_case

pytestmark = pytest.mark.accept("engine")


@functools.cache
def expected(activation: str, bias: bool, dtype: torch.dtype, shape: Shape, dropout: float = 0.0) -> Case:
    """A case with its float64 results; the layouts share it, as they hold the same numbers."""
    return make_case(shape, dtype, activation=activation, bias=bias, dropout=dropout).expect()


def every(function: Any) -> Any:
    return pytest.mark.parametrize(
        ("isa", "dtype"), EVERY, ids=[f"{isa}-{str(dtype).removeprefix('torch.')}" for isa, dtype in EVERY]
    )(function)


ODD = Shape(tokens=23, slots=2, experts=3, hidden=37, inter=29, rank=3)
WIDE = Shape(tokens=71, slots=3, experts=4, hidden=200, inter=75, rank=9, adapters=2)


@every
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layouts(engine_of, isa: str, dtype: torch.dtype, activation: str, layout: str, bias: bool) -> None:
    case = expected(activation, bias, dtype, ODD)
    case = replace(case, weights=lay_out(case.weights, layout))
    case.check(case.run(engine_of[isa]))


@every
@pytest.mark.parametrize("layout", ["separate", "transposed-interleaved"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_many_rows_adapters_and_dropout(
    engine_of, isa: str, dtype: torch.dtype, activation: str, layout: str
) -> None:
    case = expected(activation, True, dtype, WIDE, dropout=0.2)
    case = replace(case, weights=lay_out(case.weights, layout))
    case.check(case.run(engine_of[isa]))


@every
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_bias_at_a_time(engine_of, isa: str, dtype: torch.dtype, activation: str) -> None:
    case = make_case(replace(ODD, rank=0), dtype, activation=activation, bias=True)
    names = [n for n in ("gate_bias", "up_bias", "down_bias") if getattr(case.weights, n) is not None]
    for kept in names:
        others = {name: None for name in names if name != kept}
        one = replace(case, weights=replace(case.weights, **others)).expect()
        one.check(one.run(engine_of[isa]))


@every
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_recomputing_gives_the_same_bits(engine_of, isa: str, dtype: torch.dtype, activation: str) -> None:
    case = expected(activation, True, dtype, ODD)
    kept, recomputed = (case.run(engine_of[isa], save=save) for save in (True, "recompute"))
    for name in kept:
        assert torch.equal(kept[name], recomputed[name]), name


@every
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_threads_do_not_change_a_bit(engine_of, isa: str, dtype: torch.dtype, activation: str) -> None:
    case = expected(activation, True, dtype, WIDE, dropout=0.2)
    case = replace(case, weights=lay_out(case.weights, "transposed-interleaved"))
    two = case.run(engine_of[isa])
    for threads in (1, 3):
        with Engine(isa, threads=threads) as engine:
            other = case.run(engine)
        for name in two:
            assert torch.equal(two[name], other[name]), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_activations_stay_finite(engine_of, isa: str, activation: str) -> None:
    """Arguments of exp and tanh far beyond their range.

    With a clamp the gradients come from the few values that fell between its bounds by chance, each
    the difference of large terms: they are looked at for being finite only.
    """
    case = make_case(replace(ODD, rank=0), torch.float32, activation=activation)
    case.x = case.x * 1e4
    got = case.expect().run(engine_of[isa])
    if case.weights.limit is not None:
        assert got["dx"].isfinite().all()
        assert got["dw"].isfinite().all()
        got["dx"] = case.expected["dx"]
    case.check(got)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_goes_through(engine_of, isa: str, activation: str) -> None:
    """No clamp, maximum or range reduction turns a NaN into a number."""
    case = make_case(replace(ODD, rank=0), torch.float32, activation=activation)
    case.x[5] = float("nan")
    case.ids = case.ids.clamp(max=ODD.experts - 1)
    got = case.run(engine_of[isa])
    assert got["y"][5].isnan().all()
    assert got["dw"][5].isnan().all()
    # A clamp's gradient of NaN is zero in torch: nothing to ask for there.
    if case.weights.limit is None:
        assert got["dx"][5].isnan().all()
    others = torch.arange(ODD.tokens) != 5
    assert not got["y"][others].isnan().any()


@pytest.mark.parametrize("isa", ISAS)
def test_a_clamp_stops_the_gradient(engine_of, isa: str) -> None:
    """Beyond the bounds nothing flows back; on them everything does."""
    one = torch.ones(1, 1, 1)
    for activation in ("silu", "capped_silu", "swiglu_oai"):
        weights = ExpertWeights(one, one, one, activation=activation, limit=2.0)
        x = torch.tensor([[-3.0], [-2.0], [1.0], [2.0], [3.0]])
        ids, w = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
        y, saved = engine_of[isa].forward(weights, x, ids, w)
        dx, _ = engine_of[isa].backward(weights, saved, torch.ones(5, 1))
        leaf = x.double().requires_grad_()
        wanted = moe_reference(weights, leaf, ids, w.double())
        (slope,) = torch.autograd.grad(wanted.sum(), leaf)
        assert slope[4] == 0
        torch.testing.assert_close(y.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(dx.double(), slope, rtol=1e-6, atol=1e-6)


# -- the reference itself ------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finite_differences_of_the_reference(activation: str, bias: bool) -> None:
    """Autograd's gradients of the yardstick, all inputs at once, against central differences along random
    directions; test_engine.py has one case with every entry of the Jacobian."""
    shape = Shape(tokens=3, slots=2, experts=2, hidden=4, inter=3, rank=2)
    case = make_case(shape, torch.float32, activation=activation, bias=bias, dropout=0.3)
    names = list(case.lora[0].named())

    def function(x: torch.Tensor, w: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        lora = replace(case.lora[0], **dict(zip(names, matrices, strict=True)))
        return moe_reference(case.weights, x, case.ids, w, lora=lora, dropout=case.dropout, keys=case.keys)

    inputs = [t.double().requires_grad_() for t in (case.x, case.weights_TK, *case.lora[0].tensors())]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finite_differences_of_the_engine(engine_of, isa: str, activation: str) -> None:
    """Central differences of the engine's own forward along random directions, without the reference."""
    engine = engine_of[isa]
    case = make_case(
        Shape(tokens=12, slots=2, experts=3, hidden=24, inter=20, rank=3),
        torch.float32,
        activation=activation,
        bias=True,
        dropout=0.25,
    )
    got = case.run(engine)
    names = list(case.lora[0].named())
    arguments = [case.x, case.weights_TK, *case.lora[0].tensors()]
    gradients = [got["dx"], got["dw"], *(got[f"0.{name}"] for name in names)]

    def loss(x: torch.Tensor, w: torch.Tensor, lora: ExpertLora) -> float:
        y, _ = engine.forward(
            case.weights, x, case.ids, w, lora=lora, dropout=case.dropout, keys=case.keys, save=False
        )
        return float((y.double() * case.dy).sum())

    g = torch.Generator().manual_seed(5)
    step = 2.0**-9
    for index, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        direction = torch.randn(argument.shape, generator=g)
        direction = direction / direction.norm() * argument.numel() ** 0.5
        values = []
        for sign in (1, -1):
            moved = list(arguments)
            moved[index] = argument + sign * step * direction
            lora = replace(case.lora[0], **dict(zip(names, moved[2:], strict=True)))
            values.append(loss(moved[0], moved[1], lora))
        slope = (values[0] - values[1]) / (2 * step)
        exact = float((gradient.double() * direction).sum())
        size = float(gradient.norm() * direction.norm())
        # Truncation, float32 noise of y over the step, and the few elements that cross a clamp's kink.
        assert abs(slope - exact) <= 5e-3 * size, (index, slope, exact, size)


CONFIG = SimpleNamespace(
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 3),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 5),
    hidden_size=7,
    hidden_act="silu",
    hidden_activation="gelu_pytorch_tanh",
    mlp_hidden_act="relu2",
    moe_latent_size=None,
    swiglu_alpha=1.702,
    swiglu_limit=0.75,
    _experts_implementation="eager",
)
# transformers' family, class of its experts, and what the engine calls its activation.
FAMILIES = [
    ("mixtral", "MixtralExperts", {}),
    ("deepseek_v3", "DeepseekV3Experts", {}),
    ("aria", "AriaExperts", {}),
    ("deepseek_v4", "DeepseekV4Experts", {"limit": 0.75}),
    ("hy_v4", "HYV4Experts", {"limit": 0.75}),
    ("glm5_next", "Glm5NextTextExperts", {"limit": 0.75}),
    ("step3p7", "Step3p7Experts", {"activation": "capped_silu", "limit": 0.75}),
    ("gemma4", "Gemma4TextExperts", {"activation": "gelu_tanh"}),
    ("gpt_oss", "GptOssExperts", {"activation": "swiglu_oai", "limit": 0.75}),
    ("minimax_m3_vl", "MiniMaxM3VLExperts", {"activation": "swiglu_oai", "limit": 0.75}),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", {"activation": "swiglu_oai", "limit": 0.75}),
    ("nemotron_h", "NemotronHExperts", {"activation": "relu2"}),
]


def weights_of(module: Any, fields: dict[str, Any]) -> ExpertWeights:
    """A transformers experts module's parameters as views, from the flags of its experts interface."""
    parameters = dict(module.named_parameters())
    p = {
        name: t.detach().mT if module.is_transposed and t.dim() == 3 else t for name, t in parameters.items()
    }
    if not module.has_gate:
        return ExpertWeights(None, p["up_proj"].detach(), p["down_proj"].detach(), **fields)
    halves = {}
    for name in ("gate_up_proj", "gate_up_proj_bias"):
        if name in p:
            t = p[name].detach()
            halves[name] = t.chunk(2, 1) if module.is_concatenated else (t[:, 0::2], t[:, 1::2])
    gate, up = halves["gate_up_proj"]
    if module.has_bias:
        gate_bias, up_bias = (half.contiguous() for half in halves["gate_up_proj_bias"])
        fields = {
            **fields,
            "gate_bias": gate_bias,
            "up_bias": up_bias,
            "down_bias": p["down_proj_bias"].detach(),
        }
    return ExpertWeights(gate, up, p["down_proj"].detach(), **fields)


@pytest.mark.parametrize(("family", "name", "fields"), FAMILIES, ids=[family for family, _, _ in FAMILIES])
def test_the_reference_is_what_transformers_computes(family: str, name: str, fields: dict[str, Any]) -> None:
    """y, dx and the routing weights' gradient of the family's own experts, in float64.

    OpenAI's privacy filter computes its experts in float32 whatever it is given.
    """
    import importlib

    experts = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    g = torch.Generator().manual_seed(2)
    module = experts(CONFIG)
    if family == "step3p7":
        module.limit, module.has_gate, module.has_bias = 0.75, True, False
        module.is_transposed, module.is_concatenated = False, True
    if not hasattr(module, "is_transposed"):
        pytest.skip(f"{name} of this transformers has no flags of the experts interface")
    if hasattr(module, "limit"):  # which older versions do not take from the configuration
        fields = {**fields, "limit": float(module.limit)}
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g)
    weights = weights_of(module, fields)
    module = module.double().requires_grad_(False)
    x = torch.randn(11, 7, generator=g, dtype=torch.float64).requires_grad_()
    ids = torch.stack([torch.randperm(3, generator=g)[:2] for _ in range(11)])
    w = torch.rand(11, 2, generator=g, dtype=torch.float64).requires_grad_()
    dy = torch.randn(11, 7, generator=g, dtype=torch.float64)

    close = {"rtol": 1e-5, "atol": 1e-5} if family == "openai_privacy_filter" else {}
    theirs = module(x, ids, w)
    ours = moe_reference(weights, x, ids, w)
    torch.testing.assert_close(ours, theirs, **close)
    for a, b in zip(
        torch.autograd.grad((ours * dy).sum(), (x, w)),
        torch.autograd.grad((theirs * dy).sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **close)


def test_clamps_at_the_bound() -> None:
    """The reference keeps the gradient on the bound itself, as torch's clamp does."""
    one = torch.ones(1, 1, 1)
    weights = ExpertWeights(one, one, one, limit=2.0)
    gate = torch.tensor([1.0, 2.0, 2.5], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(activate(weights, gate, torch.ones(3).double()).sum(), gate)
    assert (slope != 0).tolist() == [True, True, False]
