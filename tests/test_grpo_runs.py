"""trainer.stage=grpo by the command line: from prompts and a reward to an adapter, resumed, and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kt_ray import cli
from kt_ray.errors import BAD_INPUT

COMMON = (
    *(
        "trainer.stage=grpo",
        "cluster=local",
        "tracking.plot=false",
        "rule=cpu_1worker_1socket",
        "rule.worker_threads=1",
    ),
    *("data.path=prompts.jsonl", "data.eval_fraction=4", "data.max_length=96", "trainer.batch_size=8"),
    *(
        "grpo.group_size=4",
        "grpo.steps_per_rollout=2",
        "generate.max_new_tokens=12",
        "optim.lr=1e-3",
        "optim.schedule=constant",
    ),
    "optim.warmup=0",
    *("trainer.save_every=3", "trainer.keep_checkpoints=0", "tracking.progress=false"),
)
REWARD = """
def reward(prompts, completions, completion_ids, answer, **columns):
    assert all(isinstance(text, str) for text in prompts) and set(columns) == {"id"}
    return [len(ids) / 12 if text else None for text, ids in zip(completions, completion_ids)]
"""


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Who keeps light {n}?", "answer": "Tilda", "id": n} for n in range(12)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("lengths.py").write_text(REWARD)


def run(*arguments: str) -> None:
    assert cli.main([*COMMON, *arguments]) == 0


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_resumed_amid_a_round_and_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("reward=lengths.py", "trainer.eval_every=2", "grpo.kl_coef=0.05")
    run(*own, "trainer.max_steps=4", "run.name=straight")
    out = capfd.readouterr().out
    assert "4 steps of 2 prompts, 4 answers each, 8 rows in all" in out
    assert "step 0/4  held-out reward" in out and "held-out reward 0." in out.split("trained ")[1]

    straight = records("straight")
    steps = [r for r in straight if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert all({"policy_reward", "policy_entropy", "policy_kl", "policy_clipped"} <= r.keys() for r in steps)
    assert ["policy_sampler_gap" in r for r in steps] == [True, False, True, False]
    assert all(r["policy_sampler_gap"] < 0.01 for r in steps if "policy_sampler_gap" in r)
    assert [r["step"] for r in straight if "eval_reward" in r] == [0, 2, 4]
    assert not any("eval_loss" in r for r in straight)
    drawn = [json.loads(line) for line in Path("runs/straight/rollouts.jsonl").read_text().splitlines()]
    assert [(line["step"], len(line["answers"])) for line in drawn] == [(0, 4), (2, 4)]
    assert all(0 < a["reward"] <= 1 and a["tokens"] <= 12 for line in drawn for a in line["answers"])

    run(*own, "trainer.max_steps=3", "run.name=cut")
    assert (Path("runs/cut/checkpoints/step_000003/rollouts.npz")).is_file()
    manifest = Path("runs/cut/checkpoints/step_000003/manifest.json")
    manifest.write_text(
        manifest.read_text().replace('"lengths.py"', '"./lengths.py"')
    )  # of an earlier version
    rows = Path("prompts.jsonl").read_text()
    Path("prompts.jsonl").write_text(rows.replace('"answer": "', '"answer": "not '))
    assert cli.main(["resume=runs/cut", "trainer.max_steps=4"]) == BAD_INPUT
    assert "data (digest of the columns that the reward reads)" in capfd.readouterr().err
    Path("prompts.jsonl").write_text(rows)
    Path("other").mkdir()
    with monkeypatch.context() as elsewhere:  # where the reward's file is not
        elsewhere.chdir("other")
        assert cli.main(["resume=../runs/cut", "trainer.max_steps=4"]) == 0
    last, same = records("cut")[-1], ("loss", "grad_norm", "policy_reward", "eval_reward")
    expected = {k: v for r in straight if r["step"] == 4 for k, v in r.items()}
    observed = {k: v for r in records("cut") if r["step"] == 4 for k, v in r.items()}
    assert last["step"] == 4 and {k: observed[k] for k in same} == {k: expected[k] for k in same}
    one, other = (load_file(f"runs/{name}/adapter/adapter_model.safetensors") for name in ("straight", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)

    answered = ("generate.temperature=0.5", "generate.max_new_tokens=4", "generate.answer=adapter")
    assert cli.main(["resume=runs/straight", "mode=predict", "generate.limit=2", *answered]) == 0
    assert cli.main(["resume=runs/straight", "mode=eval"]) == BAD_INPUT
    assert "prompts without answers" in capfd.readouterr().err

    assert cli.main(["mode=report", "report.run=runs/straight"]) == 0
    page = Path("runs/straight/report.html").read_text()
    assert "training reward" in page and "held-out reward" in page and "training loss" not in page
    assert cli.main(["mode=compare", "compare.runs=[straight,cut]"]) == 0
    assert "held-out reward, best" in capfd.readouterr().out


def test_what_a_row_or_a_function_lacks_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMON, "reward=numeric", "run.name=a"]) == BAD_INPUT
    line = capfd.readouterr().err.splitlines()[-1]
    assert "prompts.jsonl, line" in line and not Path("runs/a").exists()
    assert cli.main([*COMMON, "reward=lengths.py:other", "run.name=a"]) == BAD_INPUT
    assert "has no function other" in capfd.readouterr().err
    Path("breaks.py").write_text("def reward(completions):\n    return [0.5] * len(completions) + [1]\n")
    assert cli.main([*COMMON, "reward=breaks.py", "trainer.max_steps=2", "run.name=a"]) == BAD_INPUT
    assert "breaks.py" in capfd.readouterr().err
    for keys in (("mode=preview", "reward=lengths.py"), ("mode=plan", "reward=lengths.py")):
        assert cli.main([*COMMON, *keys]) == 0
    out = capfd.readouterr().out
    assert "Who keeps light" in out
