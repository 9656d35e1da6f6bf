"""Every damaged checkpoint: one clear error within seconds, and nothing of Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray import cli
from kt_ray.checkpoint import CheckpointIndex
from kt_ray.config.mapping import load
from kt_ray.errors import BAD_INPUT, UserError, guard
from kt_ray.runs.rundir import plain
from tests.helpers.composing import compose
from tests.helpers.corrupt import CASES, Case, Folder, make_bases
from tests.helpers.tiny_moe import fused, per_expert, save

ROOT = Path(__file__).parents[2]
RAY = ("ray", "kt_ray.actors.ray.ray_cluster", "kt_ray.actors.ray.ray_metrics")
SECONDS = 10  # of a core, which the user waits at most; a case takes well under one
ROWS = [{"instruction": f"What is {i}?", "output": f"A number: {i}."} for i in range(12)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    """The good checkpoints."""
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with data to train on, in which importing Ray fails."""
    monkeypatch.delenv("KT_RAY_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    for module in RAY:
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def _arguments(model: Path, place: Path) -> list[str]:
    arguments = f"model.path={model} data.path={place}/rows.jsonl trainer.max_steps=1 trainer.eval_every=0"
    # gpt-oss has no scaled_dot_product_attention in transformers
    return f"{arguments} model.attn_implementation=eager run.root={place}/runs tracking.plot=false".split()


def test_the_corpus_is_large_enough() -> None:
    assert len(CASES) >= 90 and len({case.slug for case in CASES}) == len(CASES)


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """The configuration of the command line; paths that are every case's own are put in later."""
    return plain(compose(_arguments(Path("/model"), Path("/place"))))


def _run(composed: dict[str, Any], model: Path, place: Path) -> int:
    """What `cli.main(_arguments(model, place))` does, without Hydra."""
    own = {
        "model": {**composed["model"], "path": str(model)},
        "data": {**composed["data"], "path": str(place / "rows.jsonl")},
        "run": {**composed["run"], "root": str(place / "runs")},
    }
    return guard(lambda: cli.dispatch(load({**composed, **own})))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_refused(
    case: Case,
    bases: dict[str, Folder],
    place: Path,
    composed: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first case by the command line, the others by the functions that it calls."""
    folder = case.make(bases, place)
    capfd.readouterr()
    begun = time.process_time()
    first = case is CASES[0]
    code = cli.main(_arguments(folder.path, place)) if first else _run(composed, folder.path, place)
    seconds = time.process_time() - begun
    told = capfd.readouterr().err.splitlines(keepends=True)
    err = "".join(line for line in told if not line.startswith("[transformers] "))  # its own warnings
    assert code == BAD_INPUT, err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert "To fix: " in err
    missing = [part for part in case.expected if part.replace("{model}", str(folder.path)) not in err]
    assert not missing, f"{missing} not in {err}"
    assert seconds < SECONDS
    assert not (place / "runs").exists()


@pytest.mark.parametrize("base", ["bf16", "fp8", "int4", "fused", "mxfp4"])
def test_what_the_cases_begin_with_is_trained(
    base: str, bases: dict[str, Folder], place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each case is refused for its own fault."""
    code = cli.main([*_arguments(bases[base].path, place), "cluster=local", "run.name=good"])
    assert code == 0, capfd.readouterr().err
    assert (place / "runs" / "good" / "adapter" / "adapter_model.safetensors").is_file()


def test_names_are_listed_sorted(
    bases: dict[str, Folder], place: Path, composed: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    case = next(case for case in CASES if case.name == "expert missing")
    folder = case.make(bases, place)
    _run(composed, folder.path, place)
    listed = capfd.readouterr().err.split("missing: ")[1].split("; required")[0].split(", ")
    assert listed == sorted(listed) and len(listed) == 3


def _launch(model: Path, place: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "launch.py", *_arguments(model, place)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_the_command_itself_starts_no_ray(bases: dict[str, Folder], place: Path) -> None:
    folder = bases["bf16"].copy(place / "cut")
    folder.cut(-1)
    done = _launch(folder.path, place)
    assert done.returncode == BAD_INPUT
    assert done.stderr.startswith("error: safetensors file is truncated") and done.stderr.count("\n") == 1
    assert "ray" not in done.stdout.lower() and not (place / "runs").exists()


def test_what_the_family_ignores_is_reported(
    bases: dict[str, Folder], place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A layer for multi-token prediction, and an index whose total size is not that of its tensors."""
    folder = bases["bf16"].copy(place / "mtp")
    folder.config(num_nextn_predict_layers=1)
    last = "model.layers.2."
    folder.weights(
        lambda t: t.update({n.replace(last, "model.layers.3."): v.clone() for n, v in t.items() if last in n})
    )
    content = json.loads(folder.index.read_text())
    content["metadata"]["total_size"] = 1
    folder.index.write_text(json.dumps(content))
    notes = CheckpointIndex.open(folder.path).notes
    assert len(notes) == 1 and "total_size 1," in notes[0]
    assert cli.main([*_arguments(folder.path, place), "cluster=local", "run.name=mtp"]) == 0
    log = (place / "runs" / "mtp" / "train.log").read_text()
    assert "ignores" in log and "model.layers.3.input_layernorm.weight" in log and notes[0] in log


def test_a_matrix_of_zeros_among_others_is_accepted(bases: dict[str, Folder], place: Path) -> None:
    """An expert that was cut out on purpose."""
    from kt_ray.checkpoint import check_content

    folder = bases["bf16"].copy(place / "zero")
    folder.tensor("model.layers.1.mlp.experts.0.up_proj.weight", lambda t: t * 0)
    check_content(CheckpointIndex.open(folder.path))


@pytest.mark.parametrize("layout", ["one by one", "fused"])
def test_a_shard_of_which_the_larger_part_arrived_is_refused(tmp_path: Path, layout: str) -> None:
    """And zeros written out for the rest, on a file system that does not tell of holes."""
    from kt_ray.checkpoint import check_content

    path = save(tmp_path / "model", per_expert(layers=4) if layout == "one by one" else fused())
    file = path / "model.safetensors"
    check_content(CheckpointIndex.open(path))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 6 // 10] + bytes(len(whole) - len(whole) * 6 // 10))
    with pytest.raises(UserError, match="zeros instead of weights"):
        check_content(CheckpointIndex.open(path))


@pytest.mark.parametrize(("zero", "refused"), [(slice(10, 16), True), (slice(29, 32), False)])
def test_zeros_in_the_middle_of_a_stack(tmp_path: Path, zero: slice, refused: bool) -> None:
    """Of a file that is fetched in pieces, one may not have arrived; single experts may be cut out."""
    from kt_ray.checkpoint import check_content

    stack = torch.ones(32, 8, 16)
    stack[zero] = 0
    path = save(tmp_path / "model", {"model.layers.0.mlp.experts.down_proj": stack})
    refusal = pytest.raises(UserError, match=r"side by side are zero: model\.layers\.0\.mlp\.experts")
    with refusal if refused else nullcontext():
        check_content(CheckpointIndex.open(path))


def test_few_experts_of_a_stack_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models have hundreds of layers times hundreds of experts."""
    from kt_ray.checkpoint import check_content
    from kt_ray.checkpoint.safetensors_file import TensorInfo

    index = CheckpointIndex.open(
        save(tmp_path / "model", {"model.layers.0.mlp.experts.down_proj": torch.ones(512, 2, 4)})
    )
    looked, one = [], TensorInfo.one
    monkeypatch.setattr(TensorInfo, "one", lambda info, e: looked.append(e) or one(info, e))
    check_content(index)
    assert looked == list(range(0, 512, 32))
