"""Layers by ranges of heads and tokens: the losses and gradients of whole rows, to rounding."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.config.schema import LoraConfig
from kt_ray.dims.config_json import dims_from_config
from kt_ray.errors import UserError
from kt_ray.model import range_loop
from kt_ray.model.range_loop import RangeLoop, TokenRange
from kt_ray.model.stage import Stage
from kt_ray.model.state import MicroState
from kt_ray.placement.plan_types import BackwardPart
from kt_ray.placement.range_memory import range_counts, range_host, without_ranges
from tests.helpers.exhaustive import exhaustive, spread
from tests.helpers.families import LAYERS, dispatched, save_whole, write_config
from tests.helpers.hf_reference import Reference, micro_batch, random_rows
from tests.helpers.stages import Run, make_stages, pass_spec, run
from tests.placement.configs import make_config

Checkpoint = Callable[..., Path]
LORA = LoraConfig(rank=2, alpha=4.0, dropout=0.1)
ROWS = random_rows(5)
RANGES: dict[str, Any] = {"activations": "ranges", "head_ranges": 2}
RETAIN = {"attention_output": "retain"}
# Of gradients, relative to their norms. By ranges float32 sums go in another order; in bfloat16 what latent
# attention compresses gets the sum of two rounded gradients.
EXACT = 1e-5
ROUNDED = 2.0**-5


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are of several ranges of tokens, which do not divide them."""
    monkeypatch.setattr(range_loop, "RANGE_TOKENS", 5)


def result(stages: list[Stage], reference: Reference, kind: str = "train") -> Run:
    for stage in stages:
        stage.load_parameters({name: reference.parameters[name] for name in stage.parameters})
    return run(stages, pass_spec(ROWS, groups=2, micro=2, kind=kind), reference)


def check_same(found: Run, expected: Run, tolerance: float) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=max(1e-6, tolerance / 8))
    assert found.grads.keys() == expected.grads.keys()
    squares: Counter[str] = Counter()
    for name, grad in expected.grads.items():
        squares[_of_all_experts(name)] += float(grad.square().sum())
    for name, grad in expected.grads.items():
        error = float((found.grads[name] - grad).norm())
        assert error <= tolerance * squares[_of_all_experts(name)] ** 0.5, name


def _of_all_experts(name: str) -> str:
    """One expert has a row or two, whose terms may cancel: a rounding is small beside a layer's experts."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", EXACT), exhaustive(("bfloat16", ROUNDED))])
@pytest.mark.parametrize(
    "family", spread(["deepseek_v3", "deepseek_v2", "gpt_oss", "glm4_moe", "qwen3_moe", "granitemoe"], 2)
)
def test_the_gradients_of_whole_rows(
    checkpoint: Checkpoint, tmp_path: Path, family: str, dtype: str, tolerance: float
) -> None:
    """Padded rows of two micro-batches a group, with dropout; heads' outputs kept or computed again."""
    small = {"gpt_oss": {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8}}.get(family, {})
    path = checkpoint(family, **small)
    reference = Reference(path, LORA)
    reference.randomize_b(1)
    whole = result(make_stages(path, (0, 3), LORA, dtype=dtype), reference)
    runs = [
        result(make_stages(path, (0, 3), LORA, dtype=dtype, **RANGES, **more), reference)
        for more in ({}, RETAIN)
    ]
    assert type(runs[0].loops[0]) is RangeLoop
    check_same(runs[0], whole, tolerance)
    assert runs[0].loss == runs[1].loss
    for name, grad in runs[0].grads.items():  # kept outputs are those that are computed again
        assert torch.equal(grad, runs[1].grads[name]), name


def test_what_waits_is_what_the_plan_counts(checkpoint: Checkpoint) -> None:
    """Of layers that backward passes, no others."""
    path, lora = checkpoint("deepseek_v3"), replace(LORA, layers=[2])
    dims = dims_from_config(json.loads((path / "config.json").read_text()), name="deepseek_v3")
    (stage,) = make_stages(path, (0, 3), lora, **RANGES, **RETAIN, backward=BackwardPart(2, 2))
    (loop,) = result([stage], Reference(path, lora)).loops
    tokens = [micro.samples_N.numel() for group in loop.groups for micro in group.micro]
    counted, _ = range_host(dims, range(2, 3), sum(tokens), 0, max(tokens), 4, outputs=True)
    assert stage.shelf is not None and 0.6 * counted < stage.shelf.nbytes <= counted


def test_two_stages_streamed_layers_and_evaluation(checkpoint: Checkpoint) -> None:
    path = checkpoint("deepseek_v3")
    reference = Reference(path, LORA)
    reference.randomize_b(1)
    made = [
        make_stages(path, (0, 3), LORA),
        make_stages(path, (0, 1, 3), LORA, **RANGES),
        make_stages(path, (0, 3), LORA, **RANGES, streamed=(0, 1, 2), slots=2),
    ]
    for kind in ("eval", "train"):
        whole, *others = (result(stages, reference, kind) for stages in made)
        for found in others:
            check_same(found, whole, EXACT)
            for sample, logits in whole.logits.items():
                torch.testing.assert_close(found.logits[sample], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("olmoe", "OlmoeAttention"),  # norms over all heads
        ("qwen3_next", "without attention"),
        ("deepseek_v32", "DeepseekV32Attention"),  # an index chooses keys
        ("afmoe", "not affine"),
    ],
)
def test_what_cannot_is_refused_by_name(tmp_path: Path, family: str, reason: str) -> None:
    path = write_config(tmp_path / family, family)
    save_whole(path)
    with pytest.raises(UserError) as refused:
        make_stages(path, (0, LAYERS), LoraConfig(rank=2), **RANGES)
    message = str(refused.value)
    assert family in message and reason in message and "data.max_length" in message


def test_dora_between_is_refused(checkpoint: Checkpoint) -> None:
    """Its norms are of whole weights."""
    with pytest.raises(UserError, match=r"rule\.activations=ranges"):
        make_stages(checkpoint("deepseek_v3"), (0, 3), replace(LORA, dora=True, experts=False), **RANGES)


def test_ranges_of_tokens() -> None:
    micro = MicroState.create(micro_batch(random_rows(3)), torch.device("cpu"))
    assert micro.rows is not None
    parts = list(TokenRange.cut(micro, 4))
    n = micro.samples_N.numel()
    found = []
    for part in parts:
        positions = torch.arange(n)[part.rows]
        found.append(positions if part.micro.rows is None else positions[part.micro.rows])
    assert torch.equal(torch.cat(found), micro.rows)
    assert [part.valid.stop - part.valid.start for part in parts] == [len(each) for each in found]
    assert torch.equal(torch.cat([part.micro.positions_N for part in parts]), micro.positions_N)


@pytest.mark.parametrize("family", spread(dispatched()))
def test_what_a_plan_lets_go_by_ranges_is_built_so(family: str, tmp_path: Path) -> None:
    """A run is not refused after its weights are loaded, unless no other layout can run the family either."""
    with _skipped():
        write_config(tmp_path, family)
        dims = dims_from_config(json.loads((tmp_path / "config.json").read_text()), name=family)
    if without_ranges(dims, make_config()):
        pytest.skip("the plan refuses it")
    with _skipped():
        save_whole(tmp_path)
        make_stages(tmp_path, (0, dims.num_layers), LORA)
    make_stages(tmp_path, (0, dims.num_layers), LORA, activations="ranges", head_ranges=range_counts(dims)[0])


@contextmanager
def _skipped() -> Iterator[None]:
    """Where a family does not run."""
    try:
        yield
    except Exception as error:  # of transformers' own, too
        pytest.skip(f"does not run: {error}")
