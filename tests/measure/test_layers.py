"""A model's own layers, run without experts: every kind once, with figures for each direction."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kt_ray.actors.specs import stage_specs
from kt_ray.config.schema import Config
from kt_ray.demo import resolve_model_dir
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.errors import UserError
from kt_ray.hardware.describe import this_host
from kt_ray.measure import measure_layers
from kt_ray.measure.layers import Zeros
from kt_ray.model.stage_spec import StageSpec
from kt_ray.placement.plan import make_plan
from kt_ray.timing.layer_rates import ends_signature, layer_signature
from kt_ray.timing.layer_work import LayerWork, layer_works
from tests.helpers.composing import compose


def demo() -> tuple[Config, StageSpec, tuple[LayerWork, ...]]:
    config = compose(["model=demo", "data=demo", "rule.device=cpu"])
    directory = resolve_model_dir(config.model)
    plan = make_plan(dims_from_dir(directory), config, this_host())
    return config, stage_specs(plan, config, directory)[0], layer_works(plan, config)


def test_every_kind_of_layer_and_both_ends_are_measured() -> None:
    _, spec, works = demo()
    said: list[str] = []
    rates = measure_layers(spec, works, (1, 2), (4, 8), said.append)
    found = {(r.signature, r.threads): r for r in rates}
    kinds = {layer_signature(w) for w in works}
    assert set(found) == {(s, n) for s in (*kinds, ends_signature(works[0])) for n in (1, 2)}
    for (signature, _), rate in found.items():
        names = (
            {"begin", "loss"}
            if signature == ends_signature(works[0])
            else {"forward", "recompute", "backward"}
        )
        assert set(rate.kinds) == names
        for curve in rate.kinds.values():
            assert curve.at == (4.0, 8.0) and min(curve.values) > 0
    assert len(said) == len(kinds), "one layer of each kind is loaded, no more"


def test_layers_of_a_plan_that_streams_are_measured() -> None:
    """Each alone on its device."""
    _, spec, works = demo()
    streaming = dataclasses.replace(spec, streamed=(0, 1), slots=2, embedding_on_host=True)
    assert measure_layers(streaming, works, (1,), (4,))


def test_threads_are_as_before_afterwards() -> None:
    _, spec, works = demo()
    before = torch.get_num_threads()
    measure_layers(spec, works, (1,), (4,))
    assert torch.get_num_threads() == before


def test_longer_rows_are_left_out_where_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.measure.layers.TOO_LONG", 0.0)
    _, spec, works = demo()
    rates = measure_layers(spec, works, (1,), (4, 8, 16))
    assert {curve.at for rate in rates for curve in rate.kinds.values()} == {(4.0,)}


def test_experts_that_answer_zeros_have_the_shapes_asked_for() -> None:
    zeros = Zeros()
    x, weights = zeros.alloc((3, 8), torch.bfloat16), torch.ones(3, 2)
    zeros.submit_forward(1, 0, x, torch.zeros(3, 2, dtype=torch.int32), weights, torch.arange(3), True)
    zeros.submit_backward(1, 0, torch.ones(3, 8))
    dx, dw = zeros.join_backward(1, 0)
    assert zeros.join_forward(1, 0).shape == dx.shape == (3, 8) and dw.shape == (3, 2)


def test_a_model_without_weights_is_an_error_of_the_user(tmp_path: Path) -> None:
    _, spec, works = demo()
    (tmp_path / "config.json").write_text((Path(spec.model_dir) / "config.json").read_text())
    with pytest.raises(UserError):
        measure_layers(dataclasses.replace(spec, model_dir=str(tmp_path)), works, (1,), (4,))
