"""Experts placed by load: the same losses to rounding, resumed either way, written into one adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kt_ray import cli
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.placement.balance import balance
from kt_ray.placement.plan_types import Plan
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, plan_for, relative, steps

# -- one step ----------------------------------------------------------------------------------

SCATTERED = (((0, 3, 5), (1, 2, 4, 6, 7)), ((2, 5, 6, 7), (0, 1, 3, 4)), ((1, 4, 7), (0, 2, 3, 5, 6)))


def scattered(plan: Plan) -> Plan:
    """Other experts, and another number of them, in every layer."""
    layers = plan.dims.moe_layers
    tables = [tuple((layer, SCATTERED[i % 3][rank]) for i, layer in enumerate(layers)) for rank in range(2)]
    actors = (replace(a, experts=(), by_layer=t) for a, t in zip(plan.experts, tables, strict=True))
    return replace(plan, experts=tuple(actors))


def one_step(path: Path, overrides: list[str], move: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the parameters after them."""
    config = config_for(path, "rule.device=cpu", "rule.experts.sockets=2", "optim.lr=0.02", *overrides)
    plan = plan_for(path, config)
    plan = scattered(plan) if move else plan
    cluster = LocalCluster(plan, actor_specs(plan, config, str(path)))
    try:
        cluster.start()
        losses = steps(cluster, config, [random_rows(8, seed=1)], 3)
        return losses, dict(cluster.parameters())
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_any_placement_trains_the_same(tmp_path: Path, family: str) -> None:
    """Parameters by name, so the LoRA of an expert starts and moves alike wherever it is held."""
    path = build_checkpoint(tmp_path, family)
    expected, parameters = one_step(path, ["lora.dropout=0.1"], move=False)
    observed, moved = one_step(path, ["lora.dropout=0.1"], move=True)
    assert observed == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] and set(moved) == set(parameters)
    assert max(relative(moved, parameters).values()) < 2e-2
    held = {name: (parameters[name] - value).norm() / value.norm() for name, value in moved.items()}
    assert sorted(float(v) for v in held.values())[len(held) // 2] < 1e-3


# -- whole runs --------------------------------------------------------------------------------

SHORT = [
    "cluster=local",
    "tracking.plot=false",
    "data=demo",
    "data.limit=20",
    "trainer.batch_size=4",
    "trainer.eval_every=0",
]
SAME = ["optim.warmup=0", "optim.schedule=constant", "lora.dropout=0.1", "optim.weight_decay=0.01", "seed=5"]
LAYOUT = ["rule.device=cpu", "rule.worker_threads=1", "rule.experts.sockets=2", "model.dtype=float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = build_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3", vocab_size=320)
    train_tokenizer(persona_path(), 320).save_pretrained(path)
    yield path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(model: Path, name: str, stop: int, *overrides: str) -> list[float]:
    arguments = [f"model.path={model}", f"run.name={name}", f"trainer.max_steps={stop}", *overrides]
    assert cli.main([*SHORT, *SAME, *LAYOUT, *arguments]) == 0
    lines = Path("runs", name, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def plan_of(name: str) -> dict[str, Any]:
    return dict(json.loads(Path("runs", name, "plan.json").read_text()))


def load_of(name: str, step: int) -> dict[str, Any]:
    return dict(json.loads(Path(f"runs/{name}/checkpoints/step_{step:06d}/expert_load.json").read_text()))


def ids(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_contiguous_to_balanced_and_back(model: Path) -> None:
    straight = run(model, "straight", 9)
    run(model, "cut", 3)
    kept = load_of("cut", 3)
    assert (kept["steps"], kept["owners"]) == (3, {})
    assert kept["slots"].keys() == {str(n) for n in (1, 2)}

    balanced = run(model, "cut", 6, "trainer.resume=latest", "rule.experts.placement=balanced")
    plan = plan_of("cut")
    assert plan["expected_load"]["placement"] == "balanced" and plan["expected_load"]["steps"] == 3
    threads = [actor["threads"] for actor in plan["experts"]]
    for layer, slots in kept["slots"].items():
        observed = [ids(actor["by_layer"][layer]) for actor in plan["experts"]]
        assert observed == [list(share) for share in balance(slots, threads)]
    assert any("not bit for bit" in note for note in plan["notes"])
    after = load_of("cut", 6)
    assert after["steps"] == 6 and set(after["owners"]) == set(kept["slots"])
    assert all(sum(after["slots"][n]) > 1.5 * sum(kept["slots"][n]) for n in kept["slots"])

    back = run(model, "cut", 9, "trainer.resume=latest", "rule.experts.placement=contiguous")
    assert "by_layer" not in plan_of("cut")["experts"][0]
    assert load_of("cut", 9)["owners"] == {} and load_of("cut", 9)["steps"] == 9
    assert balanced == back[:6] and back[:3] == straight[:3]
    assert back == pytest.approx(straight, rel=1e-4) and back != straight
    assert load_of("cut", 9)["slots"].keys() == load_of("straight", 9)["slots"].keys()

    expected, observed = adapter("straight"), adapter("cut")
    errors = relative(observed, expected)
    assert sorted(errors.values())[len(errors) // 2] < 1e-3


def adapter(name: str) -> dict[str, torch.Tensor]:
    return load_file(Path("runs", name, "adapter", "adapter_model.safetensors"))


def test_a_balanced_run_resumes_bit_for_bit(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """auto keeps the placement of the checkpoint, whether or not rule.experts.load is named again."""
    monkeypatch.setattr("kt_ray.placement.balance.LEAST_SLOTS", 1)
    run(model, "first", 2, "rule.experts.placement=contiguous")
    load = f"rule.experts.load={Path('runs/first/checkpoints/latest')}"
    straight = run(model, "straight", 6, load)
    assert plan_of("straight")["expected_load"]["placement"] == "balanced"
    for name, again in (("named", [load]), ("not-named", [])):
        run(model, name, 3, load)
        assert run(model, name, 6, "trainer.resume=latest", *again) == straight
        assert plan_of(name)["expected_load"]["placement"] == "kept"
        assert plan_of(name)["experts"] == plan_of("straight")["experts"]
        expected, observed = adapter("straight"), adapter(name)
        assert all(torch.equal(observed[key], expected[key]) for key in expected)

    capsys.readouterr()
    arguments = [*SHORT, *SAME, *LAYOUT, f"model.path={model}", load]
    assert cli.main([*arguments, "mode=plan"]) == 0
    text = capsys.readouterr().out
    line = re.search(
        r"fullest expert actor ([\d.]+) times the mean of a layer \(balanced; contiguous ([\d.]+)\)", text
    )
    assert line is not None and float(line[1]) < float(line[2]) and "by load (4)" in text


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("nowhere", "no such directory"),
        ("runs/old", r"no expert_load.json.*step_000001"),
        ("runs/old/checkpoints/step_000001", r"no expert_load.json"),
        ("runs/other/checkpoints/latest", "another model"),
    ],
)
def test_a_load_that_does_not_serve_is_refused(
    model: Path, load: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Path("runs/old/checkpoints/step_000001")
    other = Path("runs/other/checkpoints/latest")
    for path in (old, other):
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
    text = {"version": 1, "steps": 1, "slots": {"0": [1, 2]}, "owners": {}}
    (other / "expert_load.json").write_text(json.dumps(text))
    arguments = [*SHORT, *LAYOUT, f"model.path={model}", f"rule.experts.load={load}", "run.name=new"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "To fix" in error and not Path("runs/new").exists()
