"""The engine against the float64 reference, on every instruction set and format of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kt_ray.native import Engine, ExpertLora
from kt_ray.native.reference import moe_reference
from tests.helpers.native import DTYPES, EVERY, ISAS, Case, Shape, make_case

pytestmark = pytest.mark.accept("engine")

_ENGINES: dict[tuple[str, int], Engine] = {}


@pytest.fixture(scope="module")
def engine_of() -> Iterator[dict[tuple[str, int], Engine]]:
    """Engines by (instruction set, threads), built on demand and closed at the end."""

    class Engines(dict[tuple[str, int], Engine]):
        def __missing__(self, key: tuple[str, int]) -> Engine:
            self[key] = Engine(key[0], threads=key[1])
            return self[key]

    engines = Engines()
    yield engines
    for engine in engines.values():
        engine.close()


SHAPES = [
    Shape(),
    Shape(rank=0),
    Shape(tokens=1, slots=1),
    Shape(tokens=61, slots=3, experts=3, hidden=33, inter=17, rank=1),
    Shape(tokens=37, slots=2, experts=4, hidden=33, inter=17, rank=8, adapters=2),
    Shape(tokens=40, slots=2, experts=2, hidden=128, inter=160, rank=33),
    Shape(tokens=9, slots=4, experts=6, hidden=1, inter=1, rank=2),
    Shape(tokens=5, slots=2, experts=2, hidden=1100, inter=70, rank=4),
    Shape(tokens=30, slots=2, experts=3, hidden=40, inter=300, rank=5, adapters=3),
    # Depths of gate and up that take three and four cuts, one of which begins inside up.
    Shape(tokens=12, slots=2, experts=2, hidden=96, inter=2300, rank=3),
    Shape(tokens=12, slots=2, experts=2, hidden=96, inter=3100, rank=3),
]


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["keep", "drop"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(engine_of, isa: str, dtype: torch.dtype, shape: Shape, dropout: float) -> None:
    case = make_case(shape, dtype, dropout=dropout).expect()
    case.check(case.run(engine_of[isa, 2]))


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
@pytest.mark.parametrize("routing", ["one", "none", "twice", "sparse"])
@pytest.mark.parametrize("rank", [0, 3])
def test_odd_routings(engine_of, isa: str, dtype: torch.dtype, routing: str, rank: int) -> None:
    case = make_case(Shape(tokens=130, slots=3, rank=rank), dtype, routing=routing).expect()
    case.check(case.run(engine_of[isa, 2]))


@pytest.mark.parametrize("isa", ISAS)
def test_more_rows_than_one_block_of_the_gradients(engine_of, isa: str) -> None:
    """700 rows of one expert: sums over rows run in blocks of 512."""
    shape = Shape(tokens=700, slots=1, experts=2, hidden=40, inter=24, rank=3)
    case = make_case(shape, torch.float32, routing="one", dropout=0.2).expect()
    case.check(case.run(engine_of[isa, 2]))


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
def test_x_of_the_other_dtype(engine_of, isa: str, dtype: torch.dtype) -> None:
    other = DTYPES[1 - DTYPES.index(dtype)]
    case = make_case(Shape(), dtype, x_dtype=other).expect()
    case.check(case.run(engine_of[isa, 2]))


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
def test_no_tokens_and_no_experts(engine_of, isa: str, dtype: torch.dtype) -> None:
    empty = make_case(Shape(tokens=0), dtype).run(engine_of[isa, 2])
    assert empty["y"].shape == (0, 72)
    assert empty["dw"].shape == (0, 2)
    assert all(not empty[name].any() for name in ("0.gate_a", "0.down_b"))

    nobody = make_case(Shape(experts=0, rank=0), dtype, routing="none").run(engine_of[isa, 2])
    for name in ("y", "dx", "dw"):
        assert torch.equal(nobody[name], torch.zeros_like(nobody[name]))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
def test_threads_do_not_change_a_bit(engine_of, isa: str, dtype: torch.dtype) -> None:
    shape = Shape(tokens=150, slots=3, experts=4, hidden=200, inter=270, rank=5, adapters=2)
    case = make_case(shape, dtype, dropout=0.1)
    one = case.run(engine_of[isa, 1])
    assert same(one, case.run(engine_of[isa, 2]))
    assert same(one, case.run(engine_of[isa, 3]))


ADAPTERS = [
    Shape(tokens=90, slots=3, experts=4, hidden=200, inter=270, rank=5, adapters=3),
    Shape(tokens=1900, slots=1, experts=1, hidden=33, inter=17, rank=3, adapters=2),  # of 512 rows and more
]


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
@pytest.mark.parametrize("shape", ADAPTERS, ids=str)
def test_other_adapters_rows_do_not_change_a_bit(
    engine_of, isa: str, dtype: torch.dtype, shape: Shape
) -> None:
    case = make_case(shape, dtype, dropout=0.1)
    for save in (True, "int8"):
        case.check_each_adapter(engine_of[isa, 2], save)


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
def test_save_modes_give_the_same_bits(engine_of, isa: str, dtype: torch.dtype) -> None:
    engine = engine_of[isa, 2]
    case = make_case(Shape(tokens=50, hidden=33, inter=17), dtype, dropout=0.1)
    kept = case.run(engine, save=True)
    assert same(kept, case.run(engine, save="recompute"))

    def forward(save: bool | str):
        return engine.forward(
            case.weights,
            case.x,
            case.ids,
            case.weights_TK,
            lora=case.lora,
            dropout=case.dropout,
            keys=case.keys,
            save=save,
        )

    y, saved = forward(False)
    assert saved is None
    assert torch.equal(y, kept["y"])
    everything, input_only = forward(True)[1], forward("recompute")[1]
    pair = 2 * int((case.ids < 5).sum()) * 17 * case.weights.gate.element_size()
    assert everything.bytes >= input_only.bytes + pair
    assert input_only.bytes >= case.x.numel() * case.x.element_size()


def flat(case: Case) -> list[torch.Tensor]:
    w = case.weights
    adapters = [t for a in case.lora for t in a.tensors()]
    return [w.gate, w.up, w.down, case.x, case.ids, case.weights_TK, case.keys, case.dy, *adapters]


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
def test_inputs_stay_as_they_are(engine_of, isa: str, dtype: torch.dtype) -> None:
    case = make_case(Shape(hidden=33, inter=17), dtype, dropout=0.2)
    before = [t.clone() for t in flat(case)]
    case.run(engine_of[isa, 2])
    assert all(torch.equal(a, b) for a, b in zip(before, flat(case), strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_written_outside_the_outputs(engine_of, isa: str) -> None:
    """Inputs are views into larger tensors of NaN: reading beyond an input would spread them."""
    case = make_case(Shape(tokens=21, hidden=33, inter=17), torch.float32, dropout=0.2)

    def fenced(t: torch.Tensor) -> torch.Tensor:
        room = torch.full((t.numel() + 128,), float("nan"))
        room[64 : 64 + t.numel()] = t.reshape(-1)
        return room[64 : 64 + t.numel()].view(t.shape)

    plain = case.run(engine_of[isa, 2])
    w = case.weights
    case.weights = replace(w, gate=fenced(w.gate), up=fenced(w.up), down=fenced(w.down))
    case.x, case.dy, case.weights_TK = fenced(case.x), fenced(case.dy), fenced(case.weights_TK)
    case.lora = [ExpertLora(*(fenced(t) for t in a.tensors()), a.scale) for a in case.lora]
    assert same(plain, case.run(engine_of[isa, 2]))


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
def test_memory_of_the_last_call_does_not_leak_into_the_next(engine_of, isa: str, dtype: torch.dtype) -> None:
    """A call full of NaN leaves its scratch full of them, up to the last even column."""
    odd = make_case(Shape(tokens=40, hidden=33, inter=17), dtype, dropout=0.2)
    clean = odd.run(engine_of[isa, 2])
    even = make_case(Shape(tokens=40, hidden=34, inter=18), dtype, dropout=0.2)
    even.x = torch.full_like(even.x, float("nan"))
    assert even.run(engine_of[isa, 2])["dx"].isnan().any()
    assert same(clean, odd.run(engine_of[isa, 2]))


@pytest.mark.parametrize(("isa", "dtype"), EVERY, ids=lambda v: str(v).removeprefix("torch."))
def test_backward_differentiates_what_forward_computed(engine_of, isa: str, dtype: torch.dtype) -> None:
    """y is linear in w, so sum_k w_k dw_k = <y, dy> for every token.

    It holds to float32 accuracy with bfloat16 weights too (dy taken as bfloat16 values), but only if
    backward rebuilds the very act that forward used.
    """
    case = make_case(Shape(tokens=40, hidden=96, inter=80), dtype, dropout=0.2)
    case.dy = case.dy.bfloat16().float()
    got = case.run(engine_of[isa, 2])
    along_w = (case.weights_TK.double() * got["dw"].double()).sum(1)
    along_y = (got["y"].double() * case.dy).sum(1)
    error = (along_w - along_y).norm() / (got["y"].norm() * case.dy.norm()).double() * 40**0.5
    assert error <= 1e-5


@pytest.mark.parametrize("isa", ISAS)
def test_gradients_are_added(engine_of, isa: str) -> None:
    engine = engine_of[isa, 2]
    case = make_case(Shape(tokens=40), torch.float32)
    once = case.run(engine)
    _, saved = engine.forward(case.weights, case.x, case.ids, case.weights_TK, lora=case.lora)
    grads = case.lora[0].zeros_like()
    for t in grads.tensors():
        t.fill_(1.0)
    for _ in range(2):
        engine.backward(case.weights, saved, case.dy, lora=case.lora[0], lora_grads=grads)
    for name, t in zip(("gate_a", "up_b", "down_b"), (grads.gate_a, grads.up_b, grads.down_b), strict=True):
        torch.testing.assert_close(t, 1 + 2 * once[f"0.{name}"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_an_adapter_without_gradients(engine_of, isa: str) -> None:
    engine = engine_of[isa, 2]
    case = make_case(Shape(tokens=40, adapters=2), torch.float32)
    both = case.run(engine)
    _, saved = engine.forward(
        case.weights,
        case.x,
        case.ids,
        case.weights_TK,
        lora=case.lora,
        adapter_of_token=case.adapter_of_token,
    )
    grads = case.lora[1].zeros_like()
    dx, _ = engine.backward(case.weights, saved, case.dy, lora=case.lora, lora_grads=[None, grads])
    assert torch.equal(dx, both["dx"])
    assert torch.equal(grads.down_a, both["1.down_a"])
    assert not torch.equal(grads.down_a, torch.zeros_like(grads.down_a))


def test_the_reference_differentiates() -> None:
    """torch's own check of the yardstick, all inputs at once."""
    case = make_case(
        Shape(tokens=3, slots=2, experts=2, hidden=4, inter=3, rank=2), torch.float32, dropout=0.3
    )
    adapter = case.lora[0]

    def function(x: torch.Tensor, w: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        lora = ExpertLora(*matrices, adapter.scale)
        return moe_reference(case.weights, x, case.ids, w, lora=lora, dropout=case.dropout, keys=case.keys)

    inputs = [t.double().requires_grad_() for t in (case.x, case.weights_TK, *adapter.tensors())]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("isa", ISAS)
def test_large_activations_stay_finite(engine_of, isa: str) -> None:
    case = make_case(Shape(rank=0), torch.float32)
    case.x = case.x * 1e4
    case.expect().check(case.run(engine_of[isa, 2]))


def test_counters_and_the_choice(engine_of) -> None:
    engine = Engine(ISAS[-1], threads=2)
    case = make_case(Shape(), torch.bfloat16)
    assert (engine.calls, engine.busy_seconds) == (0, 0.0)
    case.run(engine)
    assert engine.calls == 2
    assert engine.busy_seconds > 0
    assert engine.scratch_bytes > 0
    busy = engine.busy_seconds
    engine.close()
    engine.close()
    assert engine.busy_seconds == busy
    assert engine.scratch_bytes == 0
    with pytest.raises(RuntimeError, match="closed"):
        case.run(engine)
