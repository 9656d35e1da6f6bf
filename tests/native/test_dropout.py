"""The dropout mask: one definition in Python integers, torch and C++, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kt_ray.native import DropoutSpec, Engine, ExpertLora, ExpertWeights
from kt_ray.native.reference import DOWN, GATE, UP, dropout_hash
from tests.helpers.native import ISAS

pytestmark = pytest.mark.accept("engine")

M = 0xFFFFFFFF


def scalar_hash(spec: DropoutSpec, layer: int, expert: int, projection: int, key: int, j: int) -> int:
    """The definition of docs/numerics.md, in Python integers."""

    def fmix(h: int) -> int:
        h ^= h >> 16
        h = h * 0x85EBCA6B & M
        h ^= h >> 13
        h = h * 0xC2B2AE35 & M
        return h ^ h >> 16

    def combine(h: int, v: int) -> int:
        return fmix((h * 31 + v + 0x9E3779B9) & M)

    stream = combine(combine(combine(0x45585054, layer), expert), projection)
    row = 0
    for word in (spec.seed & M, spec.seed >> 32, spec.step, stream, key >> 32, 0, key & M):
        row = combine(row, word)
    return fmix((row + (j + 1) * 0x9E3779B9) & M)


KEYS = torch.tensor([0, 1, 2**32, 2**32 + 5, 77 * 2**32 + 4095, (2**31 - 1) * 2**32 + 2**32 - 1])


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345])
@pytest.mark.parametrize("projection", [GATE, UP, DOWN])
def test_torch_follows_the_definition(seed: int, projection: int) -> None:
    spec = DropoutSpec(0.1, seed, step=9)
    got = dropout_hash(spec, 3, 250, projection, KEYS, 37)
    want = [[scalar_hash(spec, 3, 250, projection, int(key), j) for j in range(37)] for key in KEYS]
    assert got.tolist() == want
    lines = dropout_hash(spec, 3, [7, 250], projection, torch.stack((KEYS.flip(0), KEYS)), 37)
    assert torch.equal(lines[0], dropout_hash(spec, 3, 7, projection, KEYS.flip(0), 37))
    assert torch.equal(lines[1], got)


def masks(engine: Engine, projection: str, inter: int, hidden: int, p: float) -> torch.Tensor:
    """What the engine multiplies one projection's input with, read off the gradients of its A.

    One row per token and expert; the chosen projection's A gets gradient sum over rows of
    (something non-zero) * mask * input, so with one token per expert its zeros are the mask's.
    """
    tokens = len(KEYS)
    weights = ExpertWeights(
        gate=torch.ones(tokens, inter, hidden),
        up=torch.ones(tokens, inter, hidden),
        down=torch.ones(tokens, hidden, inter),
        layer=3,
        expert_ids=tuple(range(40, 40 + tokens)),
    )
    rank = 1
    lora = ExpertLora(
        torch.zeros(tokens, rank, hidden),
        torch.ones(tokens, inter, rank),
        torch.zeros(tokens, rank, hidden),
        torch.ones(tokens, inter, rank),
        torch.zeros(tokens, rank, inter),
        torch.ones(tokens, hidden, rank),
        1.0,
    )
    x = torch.full((tokens, hidden), 1.0 / hidden)
    ids = torch.arange(tokens)[:, None]
    spec = DropoutSpec(p, seed=2**40 + 3, step=9)
    _, saved = engine.forward(weights, x, ids, torch.ones(tokens, 1), lora=lora, dropout=spec, keys=KEYS)
    grads = lora.zeros_like()
    engine.backward(weights, saved, torch.ones(tokens, hidden), lora=lora, lora_grads=grads)
    return {"gate": grads.gate_a, "up": grads.up_a, "down": grads.down_a}[projection][:, 0] != 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("projection", "number"), [("gate", GATE), ("up", UP), ("down", DOWN)])
def test_the_engine_has_the_same_mask(isa: str, p: float, projection: str, number: int) -> None:
    inter, hidden = 83, 150
    features = inter if projection == "down" else hidden
    with Engine(isa, threads=1) as engine:
        got = masks(engine, projection, inter, hidden, p)
    spec = DropoutSpec(p, seed=2**40 + 3, step=9)
    want = torch.cat(
        [
            dropout_hash(spec, 3, 40 + t, number, KEYS[t : t + 1], features) >= int(p * 2**32)
            for t in range(len(KEYS))
        ]
    )
    assert torch.equal(got, want)
    share = 1 - want.float().mean().item()
    assert abs(share - p) < 0.1


@pytest.mark.parametrize("isa", ISAS)
def test_a_mask_does_not_depend_on_the_company(isa: str) -> None:
    """A token's output is the same alone, in another order and beside others."""
    from tests.helpers.native import Shape, make_case

    case = make_case(Shape(tokens=30), torch.float32, dropout=0.3)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return engine.forward(
            case.weights,
            case.x[rows],
            case.ids[rows],
            case.weights_TK[rows],
            lora=case.lora,
            dropout=case.dropout,
            keys=case.keys[rows],
            save=False,
        )[0]

    with Engine(isa, threads=2) as engine:
        whole = forward(torch.arange(30))
        assert torch.equal(forward(order), whole[order])
        assert torch.equal(forward(torch.tensor([17])), whole[17:18])
