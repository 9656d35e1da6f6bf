"""AdamW equals torch's own on the same numbers; the schedule's landmarks."""

import dataclasses
from typing import Any

import pytest
import torch

from kt_ray.config.schema import OptimConfig
from kt_ray.disk import cache_root
from kt_ray.optim.flat_parameters import flat_size, views
from kt_ray.optim.masters import Masters
from kt_ray.optim.muon import orthogonalised
from kt_ray.optim.optimizers import LoraOptimizer, learning_rate, number_of_steps, squared_norm, state_kinds

BASE = OptimConfig(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95))


def test_equals_torch_adamw_with_clipping_and_resume() -> None:
    torch.manual_seed(0)
    mine = torch.nn.Parameter(torch.randn(7, 5))
    other = torch.nn.Parameter(mine.detach().clone())
    optimizer = LoraOptimizer([mine], BASE)
    reference = torch.optim.AdamW([other], lr=1e-2, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(6):
        grad = torch.randn(7, 5)
        optimizer.gradients()[0].copy_(grad)
        optimizer.apply(1e-2, 0.5)
        other.grad = grad * 0.5
        reference.step()
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)
        assert not optimizer.gradients()[0].any()
        if step == 2:  # carry on from saved moments
            again = torch.nn.Parameter(mine.detach().clone())
            resumed = LoraOptimizer([again], BASE)
            for kind in state_kinds(BASE):
                resumed.state(again, kind).copy_(optimizer.state(mine, kind))
            resumed.set_step(3)
            mine, optimizer = again, resumed


def test_only_float32() -> None:
    with pytest.raises(ValueError, match="float32"):
        LoraOptimizer([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], BASE)


def test_squared_norm_is_float64() -> None:
    tensors = [torch.full((3,), 1e20), torch.full((2,), 3.0)]
    assert squared_norm(tensors) == pytest.approx(3e40, rel=1e-6)
    assert squared_norm([]) == 0.0


@pytest.mark.parametrize(
    ("schedule", "last", "middle"), [("constant", 1.0, 1.0), ("linear", 0.1, 0.55), ("cosine", 0.1, 0.55)]
)
def test_schedule(schedule: str, last: float, middle: float) -> None:
    optim = dataclasses.replace(BASE, lr=1.0, schedule=schedule, warmup=10, min_lr_ratio=0.1)
    assert learning_rate(optim, 0, 110) == pytest.approx(0.1)
    assert learning_rate(optim, 9, 110) == pytest.approx(1.0)
    assert learning_rate(optim, 60, 110) == pytest.approx(middle)
    assert learning_rate(optim, 110, 110) == pytest.approx(last)
    assert learning_rate(dataclasses.replace(optim, warmup=0), 0, 10) == 1.0


def test_warmup_as_share_and_as_count() -> None:
    assert number_of_steps(0.03, 100) == 3
    assert number_of_steps(0.001, 100) == 1
    assert number_of_steps(7, 100) == 7
    assert number_of_steps(0, 100) == 0


def test_squared_norm_does_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(300_001), torch.randn(7, 65_537), torch.randn(5)]
    before = torch.get_num_threads()
    seen = set()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            seen.add(squared_norm(tensors))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1
    assert seen.pop() == pytest.approx(sum(float((t.double() ** 2).sum()) for t in tensors), rel=1e-12)


TOTAL = 40


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("constant", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "cosine", "min_lr_ratio": 0.0}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.0}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "1-sqrt", "min_lr_ratio": 0.0}),
        ("inverse_sqrt", {}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_schedules_equal_those_of_transformers(schedule: str, options: dict[str, Any], warmup: int) -> None:
    """After the warm-up at the same step; in it one step earlier, since theirs begins with a rate of 0."""
    from transformers import get_scheduler

    name = {"constant": "constant_with_warmup"}.get(schedule, schedule)
    theirs = get_scheduler(
        name,
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5),
        num_warmup_steps=warmup,
        num_training_steps=TOTAL,
        scheduler_specific_kwargs=options or None,
    )
    rate = theirs.lr_lambdas[0]
    mine = {"cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}.get(schedule, schedule)
    optim = dataclasses.replace(
        BASE,
        lr=0.5,
        schedule=mine,
        warmup=warmup,
        min_lr_ratio=options.get("min_lr_rate", 0.0),
        decay=12,
        decay_shape=options.get("decay_type", "cosine"),
    )
    for step in range(TOTAL):
        expected = rate(step + 1) if step < warmup else rate(step)
        assert learning_rate(optim, step, TOTAL) == pytest.approx(0.5 * expected, rel=1e-12, abs=1e-15)


def test_wsd_decay_as_share() -> None:
    optim = dataclasses.replace(BASE, schedule="wsd", warmup=0, decay=0.25, lr=1.0)
    assert [learning_rate(optim, step, 40) for step in (0, 29, 30)] == [1.0, 1.0, 1.0]
    assert learning_rate(optim, 31, 40) < 1.0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_lora_plus_is_a_rate_of_its_own_for_b(name: str) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(2, 3, 4), [torch.randn(2, 3, 4) for _ in range(3)]
    moved = {}
    for side, ratio, lr in (("A", 16.0, 1e-3), ("B", 16.0, 1e-3), ("A", 1.0, 1.6e-2)):
        optim = dataclasses.replace(BASE, name=name, lora_plus_ratio=ratio)
        parameter = torch.nn.Parameter(start.clone())
        optimizer = LoraOptimizer([parameter], optim, [side])
        for grad in grads:
            optimizer.gradients()[0].copy_(grad)
            optimizer.apply(lr, 1.0)
        moved[side, ratio] = parameter.detach()
    assert torch.equal(moved["B", 16.0], moved["A", 1.0])
    assert not torch.allclose(moved["A", 16.0], moved["B", 16.0], atol=1e-3)


def test_muon_orthogonalises_every_matrix() -> None:
    torch.manual_seed(0)
    g = torch.randn(3, 4, 40)
    g[2] = 0.0
    u, _, vh = torch.linalg.svd(g[:2], full_matrices=False)
    got = orthogonalised(g)
    assert not got[2].any()
    # the iteration brings singular values near 1, not to 1, and keeps the singular vectors
    values = torch.linalg.svdvals(got[:2])
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    torch.testing.assert_close(
        got[:2],
        u @ torch.diag_embed((u.mT @ got[:2] @ vh.mT).diagonal(dim1=1, dim2=2)) @ vh,
        atol=1e-5,
        rtol=0,
    )
    assert torch.allclose(orthogonalised(g.mT), got.mT, atol=1e-6)


def test_muon_is_torchs_up_to_its_bfloat16() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    optim = dataclasses.replace(BASE, name="muon", betas=(0.95, 0.0), weight_decay=0.1)
    mine = torch.nn.Parameter(torch.randn(2, 6, 24))
    others = [torch.nn.Parameter(mine.detach()[i].clone()) for i in range(2)]
    optimizer = LoraOptimizer([mine], optim)
    theirs = torch.optim.Muon(others, lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    start = mine.detach().clone()
    for _ in range(4):
        grad = torch.randn(2, 6, 24)
        optimizer.gradients()[0].copy_(grad)
        optimizer.apply(0.1, 1.0)
        for i, other in enumerate(others):
            other.grad = grad[i]
        theirs.step()
    expected = torch.stack([o.detach() for o in others])
    assert float((mine.detach() - expected).norm() / (expected - start).norm()) < 0.02


def _muon_in_float64(
    value: torch.Tensor, grads: list[torch.Tensor], lr: float, keep: float, decay: float
) -> torch.Tensor:
    """One matrix by the rule of muon.py, alone."""
    value, average = value.double(), torch.zeros_like(value, dtype=torch.float64)
    for grad in (g.double() for g in grads):
        average = keep * average + (1 - keep) * grad
        value = value * (1 - lr * decay)
        if grad.any():
            update = orthogonalised((1 - keep) * grad + keep * average)
            value = value - lr * 0.2 * max(value.shape) ** 0.5 * update
    return value


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_leaves_an_expert_without_tokens_where_it_is(decay: float) -> None:
    """Three experts: one with tokens in the first steps only, one with tokens now and then, one in all."""
    torch.manual_seed(0)
    lr, steps = 1e-2, 120
    optim = dataclasses.replace(BASE, name="muon", betas=(0.95, 0.0), weight_decay=decay)
    start = torch.randn(3, 4, 24)
    grads = torch.randn(steps, 3, 4, 24)
    grads[3:, 0] = 0.0
    grads[1::7, 1] = 0.0
    parameter = torch.nn.Parameter(start.clone())
    optimizer = LoraOptimizer([parameter], optim)
    at_rest = torch.zeros(())
    for step, grad in enumerate(grads):
        optimizer.gradients()[0].copy_(grad)
        optimizer.apply(lr, 1.0)
        if step == 2:
            at_rest = parameter.detach()[0].clone()
    for expert in range(3):
        want = _muon_in_float64(start[expert], list(grads[:, expert]), lr, 0.95, decay)
        torch.testing.assert_close(parameter.detach()[expert].double(), want, rtol=0, atol=2e-4)
    if not decay:
        assert torch.equal(parameter.detach()[0], at_rest)
    else:
        torch.testing.assert_close(parameter.detach()[0], at_rest * (1 - lr * decay) ** (steps - 3))


@pytest.mark.parametrize(("quiet", "learning_rates"), [(0, 6), (999, 23)])
def test_adamw_fades_without_gradients(quiet: int, learning_rates: int) -> None:
    """As torch: after the last gradient all further steps together are a few learning rates."""
    torch.manual_seed(0)
    optim = dataclasses.replace(BASE, betas=(0.9, 0.999), weight_decay=0.0)
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = LoraOptimizer([parameter], optim)
    for _ in range(quiet):
        optimizer.apply(1e-2, 1.0)
    optimizer.gradients()[0].copy_(torch.randn(64))
    optimizer.apply(1e-2, 1.0)
    first = parameter.detach().clone()
    for _ in range(400):
        optimizer.apply(1e-2, 1.0)
    moved = (parameter.detach() - first).abs().max() / 1e-2
    # float64: t steps after the only gradient one is 0.1 0.9^t / (1 - 0.9^n) / sqrt(that of 0.999), n in all.
    ratios = [
        0.1
        * 0.9**t
        / (1 - 0.9 ** (quiet + t + 1))
        / (0.001 * 0.999**t / (1 - 0.999 ** (quiet + t + 1))) ** 0.5
        for t in range(1, 401)
    ]
    assert float(moved) == pytest.approx(sum(ratios), rel=1e-4) and sum(ratios) < learning_rates


def test_masters_as_matrices_step_as_the_flat_vector() -> None:
    shapes = [{"x.lora_A.weight": (2, 5), "x.lora_B.weight": (3, 2)}, {}, {"y.lora_A.weight": (2, 4)}]
    flats, grads = ([torch.randn(flat_size(stage)) for stage in shapes] for _ in range(2))
    found = []
    for ratio in (1.0, 1.0 + 1e-12):  # the second in parts, at rates that are the same in float32
        masters = Masters(shapes, dataclasses.replace(BASE, lora_plus_ratio=ratio), "cpu")
        for stage in range(3):
            masters.set(stage, flats[stage])
        for _ in range(2):
            for stage in range(3):
                masters.set_grad(stage, grads[stage])
            masters.optimizer.apply(1e-2, 0.7)
        found.append({(kind, n): t.clone() for kind in ("param", "exp_avg") for n, t in masters.named(kind)})
        assert torch.equal(
            views(masters.get(0), shapes[0])[1], dict(masters.named("param"))["x.lora_B.weight"]
        )
    assert len(found[0]) == 6
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value)


@pytest.mark.slow
@pytest.mark.exhaustive  # DeepSpeed compiles its own
def test_deepspeed_cpu_adam_equals_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is compiled here, once and without optimisation, which halves the minutes that takes."""
    builder = pytest.importorskip("deepspeed.ops.op_builder.cpu.cpu_adam").CPUAdamBuilder
    flags = builder.cxx_args
    unoptimised = {"-O3": "-O0", "-g": "-g0"}
    monkeypatch.setattr(builder, "cxx_args", lambda self: [unoptimised.get(f, f) for f in flags(self)])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache_root() / "test_extensions"))
    torch.manual_seed(0)
    start, grads = torch.randn(3, 7, 5), [torch.randn(3, 7, 5) for _ in range(5)]
    found = []
    for name in ("adamw", "deepspeed_cpu_adam"):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = LoraOptimizer([parameter], dataclasses.replace(BASE, name=name, lora_plus_ratio=2.0), "B")
        optimizer.set_step(3)
        for grad in grads:
            optimizer.gradients()[0].copy_(grad)
            optimizer.apply(1e-2, 0.5)
        found.append([parameter.detach(), optimizer.state(parameter, "exp_avg_sq")])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
