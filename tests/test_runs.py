"""Whole runs by the command line in one process: files, resume, multirun, tracking, preview, plan."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kt_ray import cli
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.errors import STOPPED
from kt_ray.native import available_isas
from kt_ray.tracking.console import ConsoleHandler
from tests.helpers.hf_reference import build_checkpoint

REPO = Path(__file__).resolve().parents[1]
SHORT = [
    *("cluster=local", "data.limit=20", "trainer.batch_size=4", "optim.warmup=0"),
    *("trainer.eval_every=0", "eval.after_training=0", "tracking.plot=false"),
]
FIELDS = {  # what the issue lists, and how the records spell it
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "loss_tokens",
    "tokens_per_s",
    "seconds",
    "seconds_attention",
    "seconds_experts",
    "seconds_transport",
    "seconds_optimizer",
    "expert_tflops_forward",
    "expert_tflops_backward",
    "expert_tflops_forward_reference",
    "expert_tflops_backward_reference",
    "host_rss_bytes_driver",
    "expert_load_imbalance",
    "actor_load_imbalance",
}
SAME = ("step", "epoch", "loss", "grad_norm", "lr", "tokens", "loss_tokens")  # not times, not memory


@pytest.fixture(scope="module", autouse=True)
def alone(own_cache: pytest.MonkeyPatch) -> None:
    for name in ("KT_RAY_ISA", "KT_RAY_DEBUG", "WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        own_cache.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """runs/ is in the working directory."""
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> None:
    assert cli.main([*SHORT, *arguments]) == 0


def records(name: str) -> list[dict[str, Any]]:
    lines = Path("runs", name, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(name: str) -> list[tuple[Any, ...]]:
    return [tuple(record[key] for key in SAME) for record in records(name) if "loss" in record]


def adapter(name: str) -> dict[str, torch.Tensor]:
    return load_file(Path("runs", name, "adapter", "adapter_model.safetensors"))


def test_files_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster=local", "trainer.max_steps=3", "trainer.preview=3", "run.name=a"]) == 0
    out, err = capfd.readouterr()
    path = Path("runs/a")
    assert sorted(str(f.relative_to(path)) for f in path.rglob("*") if not f.is_dir()) == [
        ".lock",
        "adapter/README.md",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "adapter/chat_template.jinja",
        "checkpoints/step_000003/expert_load.json",
        "checkpoints/step_000003/experts-0.safetensors",
        "checkpoints/step_000003/manifest.json",
        "checkpoints/step_000003/worker-0.safetensors",
        "config.yaml",
        "env.json",
        "eval.json",
        "eval.md",
        "loss.png",
        "metrics.jsonl",
        "plan.json",
        "predictions.json",
        "predictions.jsonl",
        "train.log",
    ]
    assert os.readlink(path / "checkpoints/latest") == "step_000003"
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert config["trainer"]["max_steps"] == 3 and config["run"]["root"] == str(Path("runs").absolute())
    plan = json.loads((path / "plan.json").read_text())
    assert [w["layers"] for w in plan["workers"]] == [[0, 4]]
    assert [e["experts"] for e in plan["experts"]] == [list(range(16))]
    assert (path / "loss.png").read_bytes().startswith(b"\x89PNG")
    log = (path / "train.log").read_text()
    assert "step 3 loss" in log and "held-out loss" in log
    loggers = logging.getLogger(), logging.getLogger("kt_ray")
    left = [handler for logger in loggers for handler in logger.handlers]
    assert not any(str(path.absolute()) in getattr(handler, "baseFilename", "") for handler in left)
    assert not any(isinstance(handler, ConsoleHandler) for handler in left)
    manifest = json.loads((path / "checkpoints/step_000003/manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["data"] == {"next_step": 3, "epoch": 0, "step_in_epoch": 3}

    # what the user saw
    assert err == ""
    assert out.count("question 1") == 0 and "Talk to it:" in out and str(path.absolute()) in out
    assert "held-out loss" in out and "275 rows" in out


def test_preview_shows_what_is_trained(capfd: pytest.CaptureFixture[str]) -> None:
    run("trainer.max_steps=1", "trainer.preview=3", "run.name=a")
    out = capfd.readouterr().out
    shown = re.findall(r"row (\d+): (\d+) tokens, (\d+) trained\n(.*?)\n\n", out, flags=re.DOTALL)
    assert len(shown) == 3
    for _, tokens, trained, text in shown:
        assert 0 < int(trained) < int(tokens)
        # the answer and the token that ends it, and nothing of the question
        assert re.search(r"<\|im_start\|>assistant\n\[\[.+<\|im_end\|>\]\]$", text, flags=re.DOTALL)
        assert text.count("[[") == 1 and text.index("<|im_start|>user") < text.index("[[")
    # before training, not among its lines
    assert out.index("row 2:") < out.index("step 1/1")


def test_metrics_hold_what_the_issue_lists() -> None:
    run("trainer.max_steps=3", "trainer.eval_every=2", "run.name=a")
    steps = [r for r in records("a") if "loss" in r]
    evaluations = [r for r in records("a") if "eval_loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3] and [r["step"] for r in evaluations] == [0, 2, 3]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    for record in steps:
        assert set(record) >= FIELDS, FIELDS - set(record)
        assert all(isinstance(record[key], int | float) for key in FIELDS)
        # Only waiting may take no time at all.
        assert all(record[key] > 0 for key in FIELDS - {"seconds_transport"})
        assert record["loss_tokens"] < record["tokens"]
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["seconds"])
        assert record["expert_load_imbalance"] > 1
        parts = [record[f"seconds_{part}"] for part in ("attention", "optimizer")]
        assert sum(parts) <= record["seconds"] * 1.01
        # The actual count is higher (LoRA), in the forward by 1 + r(H+I)/(HI); the reference's backward
        # counts 10 per weight and not 6, so the two directions bracket it.
        forward = record["expert_tflops_forward"] / record["expert_tflops_forward_reference"]
        backward = record["expert_tflops_backward"] / record["expert_tflops_backward_reference"]
        hidden, inner, rank = 128, 96, 8
        assert forward == pytest.approx(1 + rank * (hidden + inner) / (hidden * inner))
        assert backward == pytest.approx(
            (6 * hidden * inner + 12 * rank * (hidden + inner)) / (10 * hidden * inner)
        )
        assert record["expert_tflops_backward"] > record["expert_tflops_forward"] / 20


def test_by_default_what_is_held_out_is_evaluated(capfd: pytest.CaptureFixture[str]) -> None:
    """trainer.eval_every=auto with data.eval_fraction=auto: large sets give some rows, small ones none."""

    def train(count: int, *more: str) -> int:
        rows = [json.dumps({"instruction": f"Name {n}", "output": f"it is {n}"}) for n in range(count)]
        Path("rows.jsonl").write_text("\n".join(rows))
        given = ("data.path=rows.jsonl", "data.limit=null", "trainer.max_steps=6", "trainer.eval_every=auto")
        return cli.main([*SHORT, *given, f"run.name=of{count}", *more])

    assert train(120) == 0
    assert "114 rows in all" in (out := capfd.readouterr().out)
    assert "held-out loss of 6 rows at start and end\n" in out
    assert [r["step"] for r in records("of120") if "eval_loss" in r] == [0, 6]
    assert train(60) == 0
    assert "60 rows in all" in (out := capfd.readouterr().out) and "no held-out loss: no rows are held" in out
    assert not [r for r in records("of60") if "eval_loss" in r]
    figures = ("trainer.eval_every=2", "eval.after_training=3", "run.overwrite=true")
    assert train(60, *figures) == 0, "what a small set cannot give is said, and ends nothing"
    assert "no held-out loss and no questions at the end: no rows are held" in capfd.readouterr().out
    assert train(60, *figures, "data.eval_fraction=0") == 2
    assert "trainer.eval_every=2" in capfd.readouterr().err
    assert train(60, "trainer.save_best=true", "run.overwrite=true") == 2
    assert "trainer.save_best=true" in (err := capfd.readouterr().err) and "set data.eval_fraction=0.1" in err


def test_env_records_where_the_experts_ran() -> None:
    run("trainer.max_steps=1", "run.name=a", "rule=cpu_2workers_2sockets")
    env = json.loads(Path("runs/a/env.json").read_text())
    actors = {actor["actor"]: actor for actor in env["actors"]}
    assert sorted(actors) == ["experts-0", "experts-1", "worker-0", "worker-1"]
    assert {actor["pid"] for actor in actors.values()} == {os.getpid()}
    for name in ("experts-0", "experts-1"):
        assert actors[name]["isa"] == available_isas()[-1] and actors[name]["isa_reason"]
        # 3 MoE layers, forward and backward, at least one call each
        assert actors[name]["kernel_calls"] >= 6
    assert env["packages"]["torch"] == torch.__version__ and env["dashboard"] is None


RESUMED = ("optim.schedule=constant", "lora.dropout=0.1", "optim.weight_decay=0.01", "seed=5")


@pytest.fixture
def cut_and_straight() -> None:
    """runs/straight: six steps; runs/cut: the first three of them."""
    run(*RESUMED, "trainer.max_steps=6", "run.name=straight")
    run(*RESUMED, "trainer.max_steps=3", "run.name=cut")
    assert [r[0] for r in curve("cut")] == [1, 2, 3] and curve("cut") == curve("straight")[:3]
    # Three steps end within the first pass over the rows, six in the second.
    assert curve("cut")[-1][1] < 1 < curve("straight")[-1][1]


@pytest.mark.usefixtures("cut_and_straight")
def test_a_resumed_run_is_bit_identical_to_a_straight_one() -> None:
    run(*RESUMED, "trainer.max_steps=6", "run.name=cut", "trainer.resume=latest")
    assert curve("cut") == curve("straight")
    expected, observed = adapter("straight"), adapter("cut")
    assert set(observed) == set(expected)
    assert all(torch.equal(observed[name], expected[name]) for name in expected)
    assert "step 2 loss" in Path("runs/cut/train.log").read_text()  # the first half's log is kept


def test_a_run_may_resume_under_another_rule(tmp_path: Path) -> None:
    """To rounding, which float32 experts keep small: another layout adds up in another order."""
    model = build_checkpoint(tmp_path, "deepseek_v3", vocab_size=320)
    train_tokenizer(persona_path(), 320).save_pretrained(model)
    common = [*RESUMED, "data=demo", f"model.path={model}", "model.dtype=float32"]
    run(*common, "trainer.max_steps=6", "run.name=straight")
    run(*common, "trainer.max_steps=3", "run.name=cut")
    before = {file: file.read_bytes() for file in Path("runs/cut").rglob("*") if file.is_file()}

    layout = ("rule=cpu_2workers_2sockets", "rule.replicas=2", "trainer.micro_batch_size=1")
    checkpoint = Path("runs/cut/checkpoints/step_000003").absolute()
    run(*common, *layout, "trainer.max_steps=6", "run.name=other", f"trainer.resume={checkpoint}")
    plan = json.loads(Path("runs/other/plan.json").read_text())
    assert len(plan["workers"]) == 4 and len(plan["experts"]) == 2
    observed = [(r["step"], r["loss"]) for r in records("other")]
    expected = [(r["step"], r["loss"]) for r in records("straight")][3:]
    assert [step for step, _ in observed] == [4, 5, 6]
    for (_, loss), (_, reference) in zip(observed, expected, strict=True):
        assert loss == pytest.approx(reference, rel=1e-4)
    after = {file: file.read_bytes() for file in Path("runs/cut").rglob("*") if file.is_file()}
    assert after == before, "the run that it began with is left as it was"


def test_an_interrupted_run_goes_on_where_its_last_checkpoint_was() -> None:
    steps = ("trainer.max_steps=10", "trainer.save_every=2", "trainer.keep_checkpoints=0")
    run(*RESUMED, *steps, "run.name=straight")
    command = [sys.executable, str(REPO / "launch.py"), *SHORT, *RESUMED, *steps, "run.name=cut"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = Path("runs/cut/metrics.jsonl")
    deadline = time.monotonic() + 240
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    taken = len(curve("cut"))
    assert process.returncode == STOPPED, err
    assert err.splitlines()[-1].startswith(f"SIGTERM: stopped after step {taken} of 10, saved"), err
    assert 3 <= taken < 10 and not Path("runs/cut/adapter").exists()

    run(*RESUMED, *steps, "run.name=cut", "trainer.resume=latest")
    assert [r["step"] for r in records("cut")] == list(range(1, 11)), "each step once"
    assert curve("cut") == curve("straight")
    expected, observed = adapter("straight"), adapter("cut")
    assert all(torch.equal(observed[name], expected[name]) for name in expected)


def test_multirun_makes_a_run_for_each_value() -> None:
    run("-m", "lora.rank=4,8", "trainer.max_steps=1")
    runs = sorted(Path("runs").iterdir())
    assert len(runs) == 2
    for path, rank in zip(runs, (4, 8), strict=True):
        assert yaml.safe_load((path / "config.yaml").read_text())["lora"]["rank"] == rank
        assert json.loads((path / "adapter/adapter_config.json").read_text())["r"] == rank
        assert [r["step"] for r in records(path.name)] == [1]
        assert "finished" in (path / "train.log").read_text()
    # The jobs of a sweep differ in what was swept, and in nothing that they share by accident.
    first, second = (records(path.name)[0] for path in runs)
    assert first["tokens"] == second["tokens"] and first["loss"] == pytest.approx(second["loss"], rel=1e-6)


def test_wandb_keeps_one_id_over_a_resume() -> None:
    import wandb

    tracked = ("tracking=wandb", "tracking.mode=offline", "run.name=a")
    try:
        run(*tracked, "trainer.max_steps=1", *RESUMED)
        chosen = Path("runs/a/wandb_id").read_text().strip()
        run(*tracked, "trainer.max_steps=2", *RESUMED, "trainer.resume=latest")
    finally:
        wandb.teardown()
    assert chosen and Path("runs/a/wandb_id").read_text().strip() == chosen
    offline = sorted(Path("runs/a/wandb").glob("offline-run-*"))
    assert len(offline) == 2 and all(path.name.endswith(chosen) for path in offline)
    assert [r["step"] for r in records("a")] == [1, 2]  # metrics.jsonl is written, too


def test_plan_of_deepseek_v3_says_what_every_device_holds(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mode=plan", "model=deepseek_v3", "rule=amx_4gpu"]) == 0
    lines = capfd.readouterr().out.splitlines()
    head = next(line.split() for line in lines if "cuda:0" in line and "socket" in line)
    assert head == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "socket", "0", "socket", "1"]
    rows = lines[lines.index(next(line for line in lines if "Memory per device" in line)) :]
    table = {line[:22].strip(): line[22:].split() for line in rows}
    for row in ("weights", "LoRA", "optimizer", "kept activations", "staging", "runtime", "sum", "capacity"):
        assert row in table, row
    spans = [tuple(map(int, layers.split("-"))) for layers in table["layers"][:4]]
    held = Counter(layer for first, last in spans for layer in range(first, last + 1))
    assert held.keys() == set(range(61)) and len(set(held.values())) == 1, "each layer once per replica"
    assert table["experts per layer"][4:] == ["128", "128"]
    assert table["capacity"][:2] == ["22.42", "GiB"] and table["used"].count("%") == 6
    assert not Path("runs").exists()
