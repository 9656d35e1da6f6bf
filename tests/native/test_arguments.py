"""Wrong arguments: a ValueError that begins with the argument's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kt_ray.native import DropoutSpec, Engine, ExpertLora, ExpertWeights
from kt_ray.native.tensors import plain_arg
from tests.helpers.matrices import quantised_case
from tests.helpers.native import ISAS, LAYOUTS, Case, Shape, lay_out, make_case


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("reference", threads=1) as engine:
        yield engine


def forward(engine: Engine, case: Case, **overrides: Any) -> Any:
    named = {"lora": case.lora, "adapter_of_token": case.adapter_of_token, "dropout": None, "keys": case.keys}
    positional = {"weights": case.weights, "x": case.x, "ids": case.ids, "weights_TK": case.weights_TK}
    for name, value in overrides.items():
        (positional if name in positional else named)[name] = value
    return engine.forward(*positional.values(), **named)


def adapter(case: Case, **changes: torch.Tensor) -> ExpertLora:
    return replace(case.lora[0], **changes)


Change = Callable[[Case], dict[str, Any]]
FORWARD: list[tuple[str, str, Change]] = [
    ("x", "dtype float64", lambda c: {"x": c.x.double()}),
    ("x", "shape", lambda c: {"x": c.x[:, :71].contiguous()}),
    ("x", "contiguous", lambda c: {"x": torch.zeros(72, 23).T}),
    ("x", "must be a tensor", lambda c: {"x": [[1.0]]}),
    ("x", "CPU tensor", lambda c: {"x": c.x.to("meta")}),
    ("ids", "dtype float32", lambda c: {"ids": c.ids.float()}),
    ("ids", "shape", lambda c: {"ids": c.ids[:-1]}),
    (
        "ids",
        "token 2 slot 1 names expert 6",
        lambda c: {"ids": c.ids.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(6))},
    ),
    ("ids", "names expert -1", lambda c: {"ids": torch.full_like(c.ids, -1)}),
    ("weights_TK", "dtype bfloat16", lambda c: {"weights_TK": c.weights_TK.bfloat16()}),
    ("weights_TK", "shape", lambda c: {"weights_TK": c.weights_TK[:, :1].contiguous()}),
    ("gate", "dtype float16", lambda c: {"weights": replace(c.weights, gate=c.weights.gate.half())}),
    ("gate", "shape", lambda c: {"weights": replace(c.weights, gate=c.weights.gate[0])}),
    ("up", "dtype bfloat16", lambda c: {"weights": replace(c.weights, up=c.weights.up.bfloat16())}),
    ("up", "shape", lambda c: {"weights": replace(c.weights, up=c.weights.down)}),
    ("down", "shape", lambda c: {"weights": replace(c.weights, down=c.weights.gate)}),
    ("activation", "'gelu'", lambda c: {"weights": replace(c.weights, activation="gelu")}),
    ("gate", "'relu2'", lambda c: {"weights": replace(c.weights, gate=None)}),
    ("gate", "given with activation 'relu2'", lambda c: {"weights": replace(c.weights, activation="relu2")}),
    ("gate", "ExpertMatrix, got list", lambda c: {"weights": replace(c.weights, gate=[1.0])}),
    ("gate", "on meta.*CPU", lambda c: {"weights": replace(c.weights, gate=c.weights.gate.to("meta"))}),
    (
        "gate",
        r"strides \[8640, 216, 3\].*required 1 .*contiguous",
        lambda c: {"weights": replace(c.weights, gate=torch.zeros(5, 40, 216)[..., ::3])},
    ),
    (
        "up",
        "expanded",
        lambda c: {"weights": replace(c.weights, up=torch.zeros(5, 1, 72).expand(5, 40, 72))},
    ),
    (
        "gate",
        "no elements",
        lambda c: {"weights": ExpertWeights(*torch.zeros(2, 2, 0, 8), torch.zeros(2, 8, 0))},
    ),
    ("down", "got NoneType", lambda c: {"weights": replace(c.weights, down=None)}),
    (
        "up",
        "format fp8 beside gate with dtype float32",
        lambda c: {"weights": replace(c.weights, up=quantised_case(Shape(), "fp8-channel").weights.up)},
    ),
    (
        "down",
        r"shape \[5, 72, 40\], required \[5, 40, 72\]",
        lambda c: {
            "weights": replace(
                c.weights,
                gate=c.weights.down,
                up=c.weights.down,
                down=c.weights.down,
            )
        },
    ),
    ("alpha", "nan", lambda c: {"weights": replace(c.weights, alpha=float("nan"))}),
    ("limit", "required a number above 0", lambda c: {"weights": replace(c.weights, limit=-7.0)}),
    ("limit", "nan", lambda c: {"weights": replace(c.weights, limit=float("nan"))}),
    (
        "limit",
        "'gelu_tanh'.* required None",
        lambda c: {"weights": replace(c.weights, activation="gelu_tanh", limit=7.0)},
    ),
    (
        "gate_bias",
        r"shape \[5, 72\], required \[5, 40\]",
        lambda c: {"weights": replace(c.weights, gate_bias=torch.zeros(5, 72))},
    ),
    (
        "gate_bias",
        "without a gate",
        lambda c: {
            "weights": replace(c.weights, gate=None, activation="relu2", gate_bias=torch.zeros(5, 40))
        },
    ),
    (
        "up_bias",
        "strides .*contiguous float32",
        lambda c: {"weights": replace(c.weights, up_bias=torch.zeros(5, 80)[:, ::2])},
    ),
    (
        "down_bias",
        "dtype bfloat16.*float32",
        lambda c: {"weights": replace(c.weights, down_bias=torch.zeros(5, 72).bfloat16())},
    ),
    ("down_bias", "got float", lambda c: {"weights": replace(c.weights, down_bias=0.0)}),
    ("expert_ids", "3 numbers for 5", lambda c: {"weights": replace(c.weights, expert_ids=(0, 1, 2))}),
    ("lora.gate_a", "dtype", lambda c: {"lora": adapter(c, gate_a=c.lora[0].gate_a.double())}),
    ("lora.gate_a", "shape", lambda c: {"lora": adapter(c, gate_a=c.lora[0].down_a)}),
    ("lora.gate_a", "rank 0", lambda c: {"lora": adapter(c, gate_a=torch.zeros(5, 0, 72))}),
    ("lora.gate_a", "rank 257", lambda c: {"lora": adapter(c, gate_a=torch.zeros(5, 257, 72))}),
    ("lora.gate_a", "None, required a tensor", lambda c: {"lora": adapter(c, gate_a=None)}),
    (r"lora\[1\].gate_b", "None", lambda c: {"lora": [c.lora[0], adapter(c, gate_b=None)]}),
    ("lora.up_a", "must be a tensor", lambda c: {"lora": adapter(c, up_a=None)}),
    (
        r"lora\[0\].gate_a",
        "given, required None.*no gate",
        lambda c: {"weights": replace(c.weights, gate=None, activation="relu2")},
    ),
    ("lora.down_b", "shape", lambda c: {"lora": adapter(c, down_b=c.lora[0].gate_b)}),
    (r"lora\[0\].up_b", "contiguous", lambda c: {"lora": [adapter(c, up_b=torch.zeros(5, 3, 40).mT)]}),
    ("adapter_of_token", "required", lambda c: {"lora": [c.lora[0], c.lora[0]]}),
    (
        "adapter_of_token",
        "token 0 names adapter 1",
        lambda c: {"adapter_of_token": torch.ones(23, dtype=torch.int64)},
    ),
    ("adapter_of_token", "shape", lambda c: {"adapter_of_token": torch.zeros(5, dtype=torch.int64)}),
    ("dropout", "p = 1", lambda c: {"dropout": DropoutSpec(1.0, 0, 0)}),
    ("dropout", "p = -0.1", lambda c: {"dropout": DropoutSpec(-0.1, 0, 0)}),
    ("keys", "required", lambda c: {"dropout": DropoutSpec(0.1, 0, 0), "keys": None}),
    ("keys", "dtype int32", lambda c: {"dropout": DropoutSpec(0.1, 0, 0), "keys": c.keys.int()}),
    ("save", "'all'", lambda c: {"save": "all"}),
]


@pytest.mark.parametrize(("name", "text", "change"), FORWARD, ids=[f"{n}-{t}" for n, t, _ in FORWARD])
def test_forward(engine: Engine, name: str, text: str, change: Change) -> None:
    case = make_case(Shape(), torch.float32)
    calls = engine.calls
    with pytest.raises(ValueError, match=f"^{name}: .*{text}"):
        forward(engine, case, **change(case))
    assert engine.calls == calls


BACKWARD: list[tuple[str, str, Change]] = [
    ("dy", "dtype", lambda c: {"dy": c.dy.bfloat16()}),
    ("dy", "shape", lambda c: {"dy": c.dy[:-1]}),
    ("saved", "None", lambda c: {"saved": None}),
    (
        "saved",
        "other shape",
        lambda c: {"weights": make_case(Shape(hidden=70), torch.float32).weights, "lora": None},
    ),
    (
        "saved",
        "or activation",
        lambda c: {
            "weights": make_case(Shape(), torch.float32, activation="relu2").weights,
            "lora": None,
        },
    ),
    ("lora", "ranks", lambda c: {"lora": None}),
    ("lora_grads", "2 entries for 1", lambda c: {"lora_grads": [None, None]}),
    ("lora_grads.gate_b", "shape", lambda c: {"lora_grads": adapter(c, gate_b=c.lora[0].down_b)}),
    (
        r"lora_grads\[0\].gate_a",
        "rank 2",
        lambda c: {"lora_grads": [make_case(Shape(rank=2), torch.float32).lora[0]]},
    ),
]


@pytest.mark.parametrize(("name", "text", "change"), BACKWARD, ids=[f"{n}-{t}" for n, t, _ in BACKWARD])
def test_backward(engine: Engine, name: str, text: str, change: Change) -> None:
    case = make_case(Shape(), torch.float32)
    _, saved = forward(engine, case)
    given = {"weights": case.weights, "saved": saved, "dy": case.dy, "lora": case.lora[0], "lora_grads": None}
    given.update(change(case))
    with pytest.raises(ValueError, match=f"^{name}: .*{text}"):
        engine.backward(
            given["weights"], given["saved"], given["dy"], lora=given["lora"], lora_grads=given["lora_grads"]
        )


def no_gate(case: Case) -> Case:
    case.weights = replace(case.weights, gate=None, activation="relu2")
    case.lora = [adapter(case, gate_a=None, gate_b=None)]
    return case


def test_gradients_of_a_gate_that_is_not_there(engine: Engine) -> None:
    gated = make_case(Shape(), torch.float32).lora[0]
    case = no_gate(make_case(Shape(), torch.float32))
    _, saved = forward(engine, case)
    with pytest.raises(ValueError, match=r"^lora_grads.gate_a: given, required None"):
        engine.backward(case.weights, saved, case.dy, lora=case.lora[0], lora_grads=gated)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_reach_the_engine_uncopied(layout: str) -> None:
    """Address and strides in bytes say where every element lies."""
    weights = lay_out(make_case(Shape(), torch.bfloat16).weights, layout)
    for name in ("gate", "up", "down"):
        view = getattr(weights, name)
        got = plain_arg(name, view)
        assert got[:5] == (name, "bf16", *view.shape)
        assert got[5] == view.data_ptr()
        assert got[6:9] == tuple(2 * stride for stride in view.stride())
        assert got[9:13] == ("none", 0, 0, 0)
    fused = {"separate": 1, "fused": 1, "interleaved": 2, "transposed": 1, "transposed-interleaved": 2}
    strides = weights.up.stride()
    assert strides[1] == fused[layout] * (1 if layout.startswith("transposed") else 72)


def test_dimensions_of_one_element() -> None:
    """Their stride means nothing: whatever torch says of it, the layout is a plain one."""
    assert plain_arg("up", torch.zeros(2, 7, 1)[:, ::3])[6:9] == (28, 12, 4)
    assert plain_arg("up", torch.zeros(2, 1, 7))[6:9] == (28, 28, 4)
    assert plain_arg("up", torch.zeros(2, 9, 5)[:, :, 2:3].mT)[7:9] == (4, 20)
    assert plain_arg("up", torch.zeros(0, 3, 7))[2:5] == (0, 3, 7)


def test_what_weights_say_of_themselves() -> None:
    case = make_case(Shape(), torch.bfloat16)
    gate, up, down = case.weights.gate, case.weights.up, case.weights.down
    weights = ExpertWeights(gate, up, down, down_bias=torch.zeros(5, 72), limit=float("inf"))
    assert (weights.E, weights.H, weights.I) == (5, 72, 40)
    assert weights.formats == ("bf16", "bf16", "bf16")
    assert (weights.layer, weights.expert_ids, weights.limit) == (0, (0, 1, 2, 3, 4), None)
    assert weights.bytes == 3 * 5 * 72 * 40 * 2 + 5 * 72 * 4
    quantised = quantised_case(Shape(hidden=96, inter=64), "mxfp4").weights
    assert quantised.formats == ("mxfp4",) * 3
    assert quantised.bytes == 3 * 5 * 96 * 64 * 17 // 32


def test_five_lines(engine: Engine) -> None:
    """Tensors in, tensors out: no layer, no expert numbers, no adapter."""
    case = make_case(Shape(rank=0), torch.float32)
    weights = ExpertWeights(case.weights.gate, case.weights.up, case.weights.down)
    y, saved = engine.forward(weights, case.x, case.ids, case.weights_TK)
    dx, dw = engine.backward(weights, saved, case.dy)
    case.expect().check({"y": y, "dx": dx, "dw": dw})


@pytest.mark.parametrize("isa", ISAS)
def test_values_that_are_not_finite(isa: str) -> None:
    """Looked for when asked, and then named with layer and expert (its global number)."""
    case = make_case(Shape(), torch.float32)
    gate, x, dy = case.weights.gate.clone(), case.x.clone(), case.dy.clone()
    case.ids[:] = torch.tensor([1, 2])
    with Engine(isa, threads=2) as engine:

        def run(weights: ExpertWeights, x: torch.Tensor, dy: torch.Tensor, check: bool) -> None:
            _, saved = engine.forward(weights, x, case.ids, case.weights_TK, check_finite=check)
            engine.backward(weights, saved, dy, check_finite=check)

        run(case.weights, x, dy, True)

        x[4, 9] = float("nan")
        with pytest.raises(ValueError, match=r"^x: .*layer 7"):
            run(case.weights, x, dy, True)
        run(case.weights, x, dy, False)

        dy[3, 0] = float("inf")
        with pytest.raises(ValueError, match=r"^dy: .*layer 7"):
            run(case.weights, case.x, dy, True)
        run(case.weights, case.x, dy, False)

        # Local expert 2 is number 7 of the model.
        gate[2] = float("nan")
        with pytest.raises(ValueError, match="layer 7, expert 7"):
            run(replace(case.weights, gate=gate), case.x, case.dy, True)

        # Finite in forward; the gradients overflow.
        with pytest.raises(ValueError, match=r"layer 7, expert \d+"):
            run(case.weights, case.x, torch.full_like(case.dy, 3e38), True)

        grads = case.lora[0].zeros_like()
        grads.up_b[2, 0, 0] = float("nan")
        _, saved = forward(engine, case)
        with pytest.raises(ValueError, match="layer 7, expert 7"):
            engine.backward(
                case.weights, saved, case.dy, lora=case.lora[0], lora_grads=grads, check_finite=True
            )
        run(case.weights, case.x, case.dy, True)


def test_released_activations(engine: Engine) -> None:
    case = make_case(Shape(), torch.float32)
    _, saved = forward(engine, case)
    saved.release()
    assert saved.bytes == 0
    with pytest.raises(ValueError, match=r"^saved: was released"):
        engine.backward(case.weights, saved, case.dy, lora=case.lora)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"threads": 0}, "^threads: 0"), ({"cpus": [100_000]}, r"^cpus: none of \[100000\]")],
)
def test_engine(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Engine("reference", **arguments)
