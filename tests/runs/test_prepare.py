"""Checks of mode=train that need no actor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kt_ray import cli
from kt_ray.checkpoint import CheckpointIndex, ExpertLayout
from kt_ray.data.row_types import Row
from kt_ray.data.token_counts import DataReport, SplitReport
from kt_ray.errors import UserError
from kt_ray.hardware.describe import this_host
from kt_ray.native import ExpertFormula
from kt_ray.runs import prepare as preparing
from kt_ray.runs.prepare import _as_stored, _check_formulas
from tests.checkpoint.conftest import expert_tensors, write_checkpoint
from tests.helpers.composing import compose
from tests.placement.configs import make_hardware, small_dims

# of a plan
SIZES = {"micro_batch_rows": 1, "replicas": 1, "groups": 1, "wave": None, "micro_batch_tokens": None}


def test_experts_of_the_files_are_those_of_the_model(tmp_path: Path) -> None:
    layout = ExpertLayout.detect(CheckpointIndex.open(write_checkpoint(tmp_path, expert_tensors())))
    plain = ExpertFormula()
    _check_formulas(layout, {1: plain, 2: plain})
    with pytest.raises(UserError, match=r"without: \[3\]"):
        _check_formulas(layout, {1: plain, 2: plain, 3: plain})
    with pytest.raises(UserError, match="no gate for relu2"):
        _check_formulas(layout, {1: plain, 2: ExpertFormula("relu2")})


def test_a_file_of_the_experts_counts_by_its_bytes(tmp_path: Path) -> None:
    """Also in the format that config.json says: llamafile without a known size is planned at Q8_0's."""
    path = write_checkpoint(tmp_path, expert_tensors(torch.bfloat16))
    layout, dims = ExpertLayout.detect(CheckpointIndex.open(path)), small_dims()
    assert dims.expert_format == "bf16" and _as_stored(dims, layout) == dims
    stored = _as_stored(dims, layout, own_file=True)
    assert stored.experts_file_bytes == 2 * 4 * 3 * (8 * 6) * 2 and stored.notes == dims.notes


def test_gpus_that_torch_cannot_use_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torch without CUDA, or for another driver, is no bug of kt_ray."""
    host = dataclasses.replace(this_host(), gpus=make_hardware(gpus=1).gpus)
    monkeypatch.setattr(preparing, "this_host", lambda: host)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for mode in ("train", "chat"):
        assert cli.main(["cluster=local", "run.name=a", f"mode={mode}"]) == 2
        error = capsys.readouterr().err
        assert "torch cannot use the GPUs of this host" in error and "set rule.device=cpu" in error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("settings", "steps"),
    [([], 4), (["trainer.stage=grpo", "reward=regex", "grpo.group_size=4", "data.max_length=512"], 16)],
)
def test_a_warm_up_of_more_steps_than_the_rows_give(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], steps: int
) -> None:
    row = np.ones(4, np.int64)
    data = SimpleNamespace(train=[Row(row, row, i) for i in range(32)], eval=[], pad_id=0)
    data.report = DataReport(4)
    monkeypatch.setattr(preparing, "load_data", lambda *_, **__: data)
    monkeypatch.setattr(preparing, "resumed_load", lambda *_: None)
    monkeypatch.setattr(preparing, "resolve_targets", lambda *_, **__: None)
    monkeypatch.setattr(preparing, "Prepared", SimpleNamespace)

    def total(warmup: int, manifest: Any = None) -> int:
        config = compose(
            [
                "data.eval_fraction=auto",
                "trainer.eval_every=0",
                "trainer.max_steps=null",
                f"optim.warmup={warmup}",
                *settings,
            ]
        )
        plan = SimpleNamespace(**SIZES, dims=SimpleNamespace(context=0))
        model = SimpleNamespace(config=config, model_dir="", plan=plan, module_names=())
        monkeypatch.setattr(preparing, "prepare_model", lambda *_, **__: model)
        return preparing.prepare(config, manifest).batches.total_steps

    started = object()  # the manifest of a run that began so
    assert total(steps) == total(steps + 1, started) == steps
    said = (
        rf"optim.warmup={steps + 1}.0 .*trainer.epochs=1.0 \(the run has {steps}: 32 rows\).*trainer.epochs"
    )
    with pytest.raises(UserError, match=said):
        total(steps + 1)


@pytest.mark.parametrize(
    ("kept", "context", "settings", "said"),
    [
        (300, 256, [], "up to 300 tokens, and the model was made for 256"),
        (512, 256, [], "up to 512 tokens"),
        (256, 256, [], ""),
        (512, 0, [], ""),  # the model does not say
        (512, 256, ["trainer.stage=grpo", "reward=regex"], ""),
    ],
)
def test_rows_beyond_the_models_context_are_told(
    kept: int, context: int, settings: list[str], said: str
) -> None:
    config = compose(["data.max_length=512", *settings])
    report = DataReport(512, train=SplitReport(longest=900, longest_kept=kept))  # others are dropped or cut
    data: Any = SimpleNamespace(report=report)
    notes = preparing._beyond_context(config, context, data)
    assert len(notes) == bool(said) and said in "".join(notes)


@pytest.mark.parametrize("stage", ["sft", "kto", "dpo"])
def test_without_padding(stage: str) -> None:
    """Also wanted and unwanted rows, which stand for themselves; pairs stay as they are."""
    rows = [Row(np.ones(n, np.int64), np.ones(n, np.int64), i) for i, n in enumerate((7, 7, 5, 7))]
    names = dict.fromkeys(field.name for field in dataclasses.fields(preparing.Prepared))
    config = compose([f"trainer.stage={stage}", "data.shuffle=false"])
    data = SimpleNamespace(train=rows, eval=[], pad_id=0)
    plan = SimpleNamespace(**{**SIZES, "micro_batch_rows": 4})
    fields: Any = {**names, "config": config, "plan": plan, "data": data}
    before = preparing.Prepared(**fields)
    after, line = preparing.without_padding(before, "layer 1")
    assert ("pairs" in line) is (after is before) is (stage == "dpo")
    if stage != "dpo":
        assert after.batches.cut is not None
        for waves in (after.batches.train(0), after.batches.cut(rows)):
            micro = [m for wave in waves for replica in wave for group in replica for m in group]
            assert [m.sample_ids.tolist() for m in micro] == [[0, 1], [2], [3]]
