"""lora.adapter by the command line: continued runs, resumed ones, and adapters that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from kt_ray import cli
from kt_ray.adapter.from_peft import digest_of
from kt_ray.adapter.peft_config import TEMPLATE
from kt_ray.checkpoint.manifest import Manifest
from kt_ray.errors import UserError
from kt_ray.placement.plan_types import Plan
from kt_ray.runs.prepare import Prepared, prepare
from kt_ray.runs.start_adapter import DIGEST, open_start
from tests.helpers.composing import compose
from tests.helpers.exhaustive import exhaustive
from tests.helpers.hf_reference import build_chat_checkpoint, build_checkpoint
from tests.helpers.random_adapter import random_adapter

RUN = (
    *(
        "cluster=local",
        "data.limit=24",
        "trainer.batch_size=4",
        "trainer.eval_every=0",
        "model.dtype=float32",
    ),
    *("eval.after_training=0", "tracking.plot=false", "rule=cpu_2workers_2sockets", "optim.lr=0.01"),
    *("trainer.max_steps=4", "trainer.save_every=2", "optim.warmup=0", "optim.schedule=constant"),
    "rule.worker_threads=1",
)
ATTENTION = ("q_a_proj", "kv_b_proj", "o_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [{"prompt": f"{n}?", "chosen": "Tilda " * (1 + n % 3), "rejected": "Nobody."} for n in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of supervised fine-tuning with settings that are no defaults."""
    root = tmp_path_factory.mktemp("first")
    settings = ["lora.rank=4", "lora.alpha=12", "lora.rslora=true"]
    assert (
        cli.main([*RUN, *settings, f"model.path={model}", "data=demo", f"run.root={root}", "run.name=a"]) == 0
    )
    return root / "a"


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def weights(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def test_training_goes_on_where_the_adapter_ended(
    model: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*RUN, f"model.path={model}", "data=demo", f"run.root={tmp_path}"]
    assert cli.main([*common, "run.name=b", f"lora.adapter={first}"]) == 0
    out = capsys.readouterr().out
    # Eight steps of one run: AdamW's moments begin anew, the weights do not.
    assert losses(first)[-1] < losses(first)[0] and losses(tmp_path / "b")[-1] < losses(tmp_path / "b")[0]
    assert losses(tmp_path / "b")[0] < losses(first)[0]
    assert cli.main([*common, "run.name=c", "lora.rank=4", "lora.alpha=12"]) == 0
    assert losses(tmp_path / "c")[0] == pytest.approx(losses(first)[0], rel=1e-6)
    # What it started from is told everywhere.
    adapter = first / "adapter"
    assert f"LoRA starts from {adapter} (" in out and "all routed experts): rank 4, alpha 24" in out
    assert f"- started from the adapter {adapter}\n" in (tmp_path / "b" / "adapter" / "README.md").read_text()
    lora = yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())["lora"]
    assert (lora["adapter"], lora["rank"], lora["alpha"]) == (str(adapter), 4, 24.0)
    assert len(lora["target_modules"]) < 12  # short names
    capsys.readouterr()
    assert (
        cli.main(["mode=plan", f"model.path={model}", f"lora.adapter={first}", "rule=cpu_1worker_1socket"])
        == 0
    )
    assert "LoRA rank 4" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [exhaustive("sft"), "dpo"])
def test_a_resumed_run_is_the_same_run(
    model: Path, first: Path, pairs: Path, tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """...without the adapter, too, unless it is the reference."""
    adapter = tmp_path / "start"
    shutil.copytree(first / "adapter", adapter)
    data = ["data=demo"] if stage == "sft" else [f"data.path={pairs}", "trainer.stage=dpo"]
    common = [*RUN, f"model.path={model}", *data, f"run.root={tmp_path}", f"lora.adapter={adapter}"]
    assert cli.main([*common, "run.name=whole"]) == 0
    whole = losses(tmp_path / "whole")
    resume = f"trainer.resume={tmp_path}/whole/checkpoints/step_000002"
    assert cli.main([*common, "run.name=on", resume]) == 0
    assert losses(tmp_path / "on") == whole[2:] and weights(tmp_path / "on") == weights(tmp_path / "whole")
    capsys.readouterr()
    # Another adapter, then none.
    file = adapter / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    changed = cli.main([*common, "run.name=changed", resume])
    error = capsys.readouterr().err
    shutil.rmtree(adapter)
    gone = cli.main([*common, "run.name=gone", resume])
    if stage == "sft":
        assert (changed, gone) == (2, 0) and losses(tmp_path / "gone") == whole[2:]
        assert "the run to be resumed started from another adapter" in error
        assert weights(tmp_path / "gone") == weights(tmp_path / "whole")
    else:
        assert (changed, gone) == (2, 2)
        assert "checkpoint was written with other settings" in error and "lora.adapter (digest" in error
        assert "not an adapter directory" in capsys.readouterr().err
    assert cli.main([*common[:-1], "lora.rank=4", "run.name=without", resume]) == 2
    assert "lora.adapter (digest of its weights)" in capsys.readouterr().err


def test_a_resumed_run_refuses_another_adapter(tmp_path: Path) -> None:
    adapter = tmp_path / "start"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    manifest = Manifest(2, 0, {}, "", {DIGEST: digest_of(adapter), "lora.rank": 4}, ())
    config = compose(["data=demo", f"lora.adapter={adapter}"])
    resumed, reader = open_start(config, None, manifest)
    assert (resumed.lora.rank, reader) == (4, None)
    (adapter / "adapter_model.safetensors").write_bytes(b"others")
    with pytest.raises(UserError, match=r"started from another adapter; at lora\.adapter=.*start"):
        open_start(config, None, manifest)
    shutil.rmtree(adapter)
    assert open_start(config, None, manifest) == (resumed, None)


Make = Callable[..., Prepared]


@pytest.fixture
def prepared(model: Path, tmp_path: Path) -> Iterator[Make]:
    """`prepared(adapter, *overrides)`."""

    def make(adapter: Path, *overrides: str) -> Prepared:
        settings = [*RUN, f"model.path={model}", "data=demo", f"run.root={tmp_path}/runs"]
        return prepare(compose([*settings, f"lora.adapter={adapter}", *overrides]))

    return make


def test_what_an_adapter_has_and_what_begins_anew(model: Path, tmp_path: Path, prepared: Make) -> None:
    attention = random_adapter(model, tmp_path / "attention", ATTENTION, rank=3, alpha=6.0, experts=False)
    made = prepared(attention)
    lora = made.config.lora
    assert (lora.rank, lora.alpha, lora.experts, lora.rslora) == (3, 6.0, True, False)
    assert lora.target_modules == sorted(ATTENTION)
    assert any(line.endswith("rank 3, alpha 6; new: routed experts") for line in made.notes)
    assert not prepared(attention, "lora.experts=false").config.lora.experts
    # Of an adapter of the experts alone nothing else is trained, unless it is asked for.
    everything = random_adapter(model, tmp_path / "all", ATTENTION, rank=3, alpha=6.0, experts=True)
    file = everything / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if ".experts." in name}, file)
    made = prepared(everything)
    assert made.config.lora.target_modules == "none"
    assert any("(all routed experts): rank 3, alpha 6" in line for line in made.notes)
    made = prepared(everything, "lora.target_modules=[q_a_proj]")
    assert any("; new: 3 other modules" in line for line in made.notes)


def test_another_chat_template_than_the_adapters_is_told(model: Path, tmp_path: Path, prepared: Make) -> None:
    adapter = random_adapter(model, tmp_path / "a", ATTENTION, rank=3, alpha=6.0, experts=False)
    file = adapter / TEMPLATE
    file.write_text(str(prepared(adapter).data.tokenizer.chat_template))
    assert not any(str(file) in note for note in prepared(adapter).data.report.notes)
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    option = f"model.chat_template={file}"
    assert any(note.endswith(option) for note in prepared(adapter).data.report.notes)
    assert not any(str(file) in note for note in prepared(adapter, option).data.report.notes)


def test_options_that_disagree_are_named(model: Path, first: Path, prepared: Make) -> None:
    match = r"options disagree.*found lora\.rank=16, lora\.experts=false; required rank 4, routed experts"
    with pytest.raises(UserError, match=match):
        prepared(first, "lora.rank=16", "lora.experts=false")
    with pytest.raises(UserError, match=r"found lora\.rank_pattern=\{o_proj: 2\}; required null"):
        prepared(first, "lora.rank_pattern={o_proj: 2}")
    with pytest.raises(UserError, match=r"found lora\.alpha=32; required alpha 24"):
        prepared(first, "lora.alpha=32")
    with pytest.raises(
        UserError, match=r"leaves out modules of the adapter.*found lora\.target_modules=\[o_proj\]"
    ):
        prepared(first, "lora.target_modules=[o_proj]")
    # Layers without routed experts are none of the adapter's experts' layers.
    assert prepared(first, "lora.layers=[0,1,2]").config.lora.layers == [0, 1, 2]
    # The same scale in another form is no disagreement.
    lora = prepared(first, "lora.rank=4", "lora.alpha=12", "lora.rslora=true").config.lora
    assert lora.scale == pytest.approx(6.0)


def test_adapters_that_do_not_fit(model: Path, first: Path, tmp_path: Path, prepared: Make) -> None:
    other = build_checkpoint(tmp_path, "qwen3_moe")
    foreign = random_adapter(other, tmp_path / "foreign", ("q_proj",), rank=3, alpha=6.0, experts=False)
    with pytest.raises(
        UserError, match=r"the adapter does not fit this model.*self_attn\.q_proj.*set model\.path"
    ):
        prepared(foreign)

    def changed(name: str, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
        copy = tmp_path / name
        shutil.copytree(first / "adapter", copy)
        tensors, settings = load_file(copy / "adapter_model.safetensors"), copy / "adapter_config.json"
        config = json.loads(settings.read_text())
        change(tensors, config)
        save_file(tensors, copy / "adapter_model.safetensors")
        settings.write_text(json.dumps(config))
        return copy

    def narrower(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        name = next(n for n in tensors if "q_a_proj.lora_A" in n)
        tensors[name] = tensors[name][:, :-1].contiguous()

    def fewer(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".experts.7." in n]:
            del tensors[name]

    def routers(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        name = next(n for n in tensors if ".mlp.experts." in n).partition(".experts.")[0]
        tensors |= {f"{name}.gate.lora_A.weight": torch.ones(4, 64)}
        tensors |= {f"{name}.gate.lora_B.weight": torch.ones(8, 4)}

    def gates(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".mlp.experts." in n and ".down_proj." in n]:
            del tensors[name]

    def broken(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        next(iter(tensors.values()))[0, 0] = float("nan")

    def scaled(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        config["alpha_pattern"] = {r"experts\.3\.down_proj": 99}

    def still(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        config["alpha_pattern"] = {"q_a_proj": 0}

    for name, change, match in (
        ("narrower", narrower, r"does not fit this model.*q_a_proj \d+→\d+"),
        ("fewer", fewer, r"does not fit this model.*nothing for .*experts\.7\..*every routed expert"),
        ("routers", routers, r"other parts of the model.*found \S+mlp\.gate; required .*tools merge"),
        ("gates", gates, r"other parts of the model.*nothing for .*down_proj.*tools merge"),
        ("broken", broken, r"not finite"),
        ("scaled", scaled, r"routed experts have several scales.*experts\.3\.down_proj.*one scale"),
        ("still", still, r"scale 0.*adapter_config\.json; found .*q_a_proj.*lora_alpha"),
    ):
        with pytest.raises(UserError, match=match):
            prepared(changed(name, change))
    with pytest.raises(UserError, match=r"not an adapter directory.*lora\.adapter=.*none"):
        prepared(tmp_path / "none")


def test_a_reference_takes_memory(first: Path, pairs: Path, prepared: Make) -> None:
    """Four bytes for each parameter, beside the eight of the one that is trained."""

    def held(plan: Plan) -> int:
        return sum(budget.items["LoRA"] for budget in plan.budgets)

    data = [f"data.path={pairs}", "trainer.stage=dpo"]
    dpo = prepared(first, *data)
    orpo = prepared(first, f"data.path={pairs}", "trainer.stage=orpo")
    trained = sum(t.numel() for t in load_file(first / "adapter" / "adapter_model.safetensors").values())
    assert held(dpo.plan) - held(orpo.plan) == 4 * trained
    simpo = prepared(first, f"data.path={pairs}", "trainer.stage=dpo", "preference.loss=simpo")
    assert held(simpo.plan) == held(orpo.plan)
    assert any(line.endswith("; model and adapter are the reference") for line in dpo.notes)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["mode=predict", "lora.adapter=x"], r"mode=predict takes an adapter otherwise.*generate\.adapter="),
        (
            ["lora.adapter=x", "lora.init=pissa", "lora.experts=false"],
            r"lora\.init=pissa changes the weights",
        ),
        (["lora.adapter=runs/a/adapter", "run.name=a"], r"lies in the directory of this run"),
        (["lora.adapter=''"], r"is empty"),
    ],
)
def test_what_cannot_go_together(overrides: list[str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        compose(["data=demo", *overrides])
    compose(["mode=chat", "lora.adapter=x", "generate.adapter=y"])  # as resume=RUN mode=chat does
