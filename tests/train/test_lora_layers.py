"""lora.layers: the gradients of a model whose other layers have adapters of zeros, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kt_ray.checkpoint.names import layer_of
from kt_ray.config.schema import Config
from kt_ray.experts import LocalExperts
from tests.helpers.exhaustive import spread
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, relative, steps, waves_of
from tests.helpers.tiny_families import tiny_family

LAYERS = 5  # of which the first is dense
ROWS = random_rows(6)
COMMON = ("rule.device=cpu", "trainer.batch_size=6")
NO_OTHERS = "lora.target_modules=none"
LAYOUTS = {
    "one worker": [],
    "3 stages, of which the first has no backward": ["rule.stages=3"],
    "2 replicas, 2 expert actors, 3 groups": [
        *("rule.replicas=2", "rule.experts.sockets=2", "rule.groups=3"),
    ],
    "recompute, one micro-batch at a time": [
        *("rule.experts.activations=recompute", "rule.activations=micro_batch"),
    ],
    "layers retained": ["rule.activations=retain"],
    "hidden states on the host, streamed layers": ["rule.activations=host", "rule.resident_layers=0"],
    "ranges": ["rule.activations=ranges"],
    "a lane of the actors": ["rule.experts.stream=0.5", "rule.experts.lane_device=cpu"],
    "a lane of the workers": [
        *("rule.experts.stream=0.5", "rule.experts.stream_to=workers", "rule.experts.lane_device=cpu"),
        "rule.groups=2",
    ],
}
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3", num_hidden_layers=LAYERS)


def values_of(shapes: Mapping[str, tuple[int, ...]], trained: Iterable[str]) -> Gradients:
    """Random ones; where nothing trains B is zero."""
    generator = torch.Generator().manual_seed(5)
    values = {n: 0.1 * torch.randn(*shape, generator=generator) for n, shape in sorted(shapes.items())}
    wanted = set(trained)
    return {n: v if n in wanted or ".lora_A." in n else torch.zeros_like(v) for n, v in values.items()}


def run(
    path: Path, config: Config, values: Gradients | None, chosen: set[str]
) -> tuple[float, Any, Gradients]:
    """Loss, report and gradients of a pass. values: of the parameters; None = as `values_of` draws them."""
    with local_cluster(path, config) as cluster:
        shapes = cluster.parameter_shapes()
        values = values_of(shapes, chosen) if values is None else {n: values[n] for n in shapes}
        cluster.set_parameters(values)
        report = cluster.run_pass(one_pass(cluster, waves_of(ROWS, config, cluster.plan)))
        return report.loss, report, cluster.gradients()


def trained_by(path: Path, *overrides: str) -> set[str]:
    with local_cluster(path, config_for(path, *COMMON, *overrides)) as cluster:
        return set(cluster.parameter_shapes())


@cache
def in_the_whole(path: Path, *keys: str) -> tuple[set[str], Gradients, float, Gradients]:
    """Names of what a run with these keys trains, and values; loss and gradients where all is trained."""
    names, whole = trained_by(path, *keys), config_for(path, *COMMON)
    with local_cluster(path, whole) as cluster:
        values = values_of(cluster.parameter_shapes(), names)
    loss, _, expected = run(path, whole, values, names)
    return names, values, loss, expected


@pytest.mark.parametrize("layout", spread([*LAYOUTS], 2))
@pytest.mark.parametrize("chosen", ["[2, 4]", "[3]", "[0]"])
def test_gradients_are_those_of_the_whole(path: Path, chosen: str, layout: str) -> None:
    """All that is trained, and the experts alone."""
    for keys in ([f"lora.layers={chosen}"], [f"lora.layers={chosen}", NO_OTHERS]):
        if chosen == "[0]" and NO_OTHERS in keys:
            continue  # it has no experts
        names, values, loss, expected = in_the_whole(path, *keys)
        layers = {layer_of(name) for name in names}
        assert names and layers == {int(n) for n in chosen.strip("[]").split(",")}
        got_loss, report, gradients = run(
            path, config_for(path, *COMMON, *keys, *LAYOUTS[layout]), values, names
        )
        assert got_loss == pytest.approx(loss, rel=1e-6)
        errors = relative(gradients, {name: expected[name] for name in gradients})
        assert set(gradients) == names and max(errors.values()) < 1e-5, max(errors, key=errors.__getitem__)
        passed = sum(layer >= min(layers) for layer in range(1, LAYERS))
        counters = [e.counters for e in report.experts]
        forward, backward = (
            sum(getattr(c, f"{way}_slots") for c in counters) for way in ("forward", "backward")
        )
        assert backward * (LAYERS - 1) == forward * passed


def test_a_layer_without_adapters_below_trains_without_dx(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the lowest layer; those above hand their gradient down."""
    wanted: dict[int, bool] = {}
    backward = LocalExperts.backward

    def noted(
        self: LocalExperts, layer: int, *args: Any, input_grad: bool, **more: Any
    ) -> tuple[Tensor, Tensor]:
        wanted[layer] = input_grad
        dx, dw = backward(self, layer, *args, input_grad=input_grad, **more)
        assert (dx.shape[1] > 0) == input_grad
        return dx, dw

    monkeypatch.setattr(LocalExperts, "backward", noted)
    for keys, lowest, without in (
        (["lora.layers=[2,4]", NO_OTHERS], 2, [2]),
        (["lora.layers=[2,4]"], 2, []),
        ([NO_OTHERS], 1, [1]),
        (["lora.layers=[3]", r"lora.target_modules=.*layers\.1\..*o_proj"], 1, []),
    ):
        wanted.clear()
        run(path, config_for(path, *COMMON, *keys), None, set())
        assert wanted == {layer: layer not in without for layer in range(lowest, LAYERS)}, keys


def test_kept_activations_are_those_of_the_layers_passed(path: Path) -> None:
    """Of layers whose experts have no adapters x is not kept."""

    def kept(*keys: str) -> int:
        _, report, _ = run(path, config_for(path, *COMMON, "rule.groups=1", *keys), None, set())
        return int(report.experts[0].counters.kept_bytes_peak)

    whole, some, last = kept(), kept("lora.layers=[1,2]"), kept("lora.layers=[4]")
    assert last * (LAYERS - 1) == whole
    assert whole * 0.5 < some < whole
    assert kept("lora.layers=[0]") < some


def test_modules_with_layers_of_their_own_names_are_not_held_to_it(path: Path) -> None:
    names = trained_by(path, "lora.layers=[3]", r'lora.target_modules=".*layers\.[12]\..*o_proj"')
    outside = {name for name in names if "experts." not in name}
    assert {layer_of(name) for name in outside} == {1, 2}
    assert {layer_of(name) for name in names - outside} == {3}
    names = trained_by(
        path, "lora.layers=[3]", "lora.target_modules=[o_proj,model.layers.1.self_attn.o_proj]"
    )
    assert {layer_of(n) for n in names if n.endswith("o_proj.lora_A.weight")} == {1, 3}


def test_it_resumes(path: Path, tmp_path: Path) -> None:
    config = config_for(path, *COMMON, "lora.layers=[2,3]", "optim.lr=0.05", "lora.dropout=0.1")
    batches = [random_rows(6, seed=s) for s in range(2)]
    with local_cluster(path, config) as cluster:
        expected = steps(cluster, config, batches, 4)
    assert expected[2] < 0.99 * expected[0]
    with local_cluster(path, config) as cluster:
        steps(cluster, config, batches, 4, stop=2)
        (tmp_path / "c").mkdir()
        cluster.save_shards(str(tmp_path / "c"))
    with local_cluster(path, config) as cluster:
        cluster.restore(str(tmp_path / "c"), 2)
        assert steps(cluster, config, batches, 4, first=2) == expected[2:]


def test_a_layer_that_is_not_affine_in_its_experts(tmp_path: Path) -> None:
    """Its dy is known once it is recomputed, also where no dx comes back."""
    path = tiny_family(tmp_path, "deepseek_v4")
    for keys in (["lora.layers=[2]"], ["lora.layers=[2]", NO_OTHERS]):
        names = trained_by(path, *keys)
        assert names and {layer_of(name) for name in names} == {2}
        with local_cluster(path, config_for(path, *COMMON)) as cluster:
            values = values_of(cluster.parameter_shapes(), names)
        _, _, expected = run(path, config_for(path, *COMMON), values, names)
        config = config_for(path, *COMMON, *keys, "rule.activations=micro_batch")
        _, _, gradients = run(path, config, values, names)
        errors = relative(gradients, {name: expected[name] for name in gradients})
        assert set(gradients) == names and max(errors.values()) < 1e-4, max(errors, key=errors.__getitem__)
