"""Wrong arguments: a ValueError that begins with the argument's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kt_ray.native import DropoutSpec, Engine, ExpertLora
from tests.helpers.native import Case, Shape, make_case


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
    ("expert_ids", "3 numbers for 5", lambda c: {"weights": replace(c.weights, expert_ids=(0, 1, 2))}),
    ("lora.gate_a", "dtype", lambda c: {"lora": adapter(c, gate_a=c.lora[0].gate_a.double())}),
    ("lora.gate_a", "shape", lambda c: {"lora": adapter(c, gate_a=c.lora[0].down_a)}),
    ("lora.gate_a", "rank 0", lambda c: {"lora": adapter(c, gate_a=torch.zeros(5, 0, 72))}),
    ("lora.gate_a", "rank 257", lambda c: {"lora": adapter(c, gate_a=torch.zeros(5, 257, 72))}),
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
