"""Run directories and checkpoints that cannot be used, or not with these settings."""

from __future__ import annotations

from tests.helpers.bad_input.place import ROWS, TINY, Case, flip, truncate

RESUME = TINY + " lora.rank=2 seed=1 run.name=done trainer.resume=latest trainer.max_steps=3"

RUN: list[Case] = [
    Case(
        "resume without a run",
        TINY + " trainer.resume=latest",
        ["no run of model 'model' has a checkpoint", "{dir}/runs", "leave out trainer.resume"],
    ),
    Case(
        "resume of a run that is not there",
        TINY + " trainer.resume=latest run.name=x",
        ["nothing to resume", "{dir}/runs/x", "check run.name"],
    ),
    Case(
        "resume from a path that is not there",
        TINY + " trainer.resume={dir}/runs/x/checkpoints/step_000001",
        ["names no complete checkpoint", "step_000001", "see runs/<name>/checkpoints"],
    ),
    Case(
        "resume with another model",
        RESUME,
        ["belongs to another model", "{dir}/runs/done/checkpoints/step_000002", "set model.path"],
        lambda p: (p.run, p.tensor("lm_head.weight", lambda t: t + 1)),
    ),
    Case(
        "a directory where the run's log was",
        RESUME,
        ["a directory lies where the run has a file", "{dir}/runs/done/train.log", "move it away"],
        lambda p: ((p.run / "train.log").unlink(), (p.run / "train.log").mkdir()),
    ),
    Case(
        "resume with another rank",
        RESUME + " lora.rank=4",
        [
            "written with other settings",
            "found lora.rank=4",
            "required lora.rank=2",
            "set these keys as required",
        ],
        lambda p: p.run,
    ),
    Case(
        "resume with another seed",
        RESUME + " seed=2",
        ["written with other settings", "seed=2", "seed=1", "set these keys as required"],
        lambda p: p.run,
    ),
    Case(
        "resume with other data",
        RESUME,
        [
            "written with other settings",
            "digest of the tokenised training rows",
            "the same rows",
            "lora.adapter",
        ],
        lambda p: (p.run, p.rows(*ROWS[:-1], {"instruction": "new", "output": "row"})),
    ),
    Case(
        "resume without expert LoRA",
        RESUME + " lora.experts=false",
        [
            "written with other settings",
            "lora.experts=False",
            "lora.experts=True",
            "set these keys as required",
        ],
        lambda p: p.run,
    ),
    Case(
        "resume from a truncated shard",
        RESUME,
        ["damaged", "experts-0.safetensors", "bytes; required", "choose another checkpoint"],
        lambda p: truncate(p.checkpoint / "experts-0.safetensors"),
    ),
    Case(
        "resume from a shard with a flipped bit",
        RESUME,
        ["damaged", "worker-0.safetensors", "checksum", "choose another checkpoint"],
        lambda p: flip(p.checkpoint / "worker-0.safetensors"),
    ),
    Case(
        "resume with a shard missing",
        RESUME,
        ["damaged", "worker-0.safetensors", "no such file", "choose another checkpoint"],
        lambda p: (p.checkpoint / "worker-0.safetensors").unlink(),
    ),
    Case(
        "resume from a corrupt manifest",
        RESUME,
        ["manifest cannot be read", "manifest.json", "choose another checkpoint"],
        lambda p: (p.checkpoint / "manifest.json").write_text("{"),
    ),
    Case(
        "resume from a manifest of another version",
        RESUME,
        ["another format", "manifest.json", "the version of kt_ray that wrote it"],
        lambda p: (p.checkpoint / "manifest.json").write_text("{}"),
    ),
    Case(
        "resume beyond the last step",
        RESUME + " trainer.max_steps=1",
        ["beyond the last step", "found step 2", "at most step 1", "set trainer.max_steps to more than 2"],
        lambda p: p.run,
    ),
    Case(
        "run name that is taken",
        TINY + " run.name=done",
        ["already holds a run", "{dir}/runs/done", "run.overwrite=true", "resume="],
        lambda p: p.run,
    ),
    Case(
        "run name of a directory with other files",
        TINY + " run.name=thesis",
        ["holds other files", "{dir}/runs/thesis", "choose another run.name"],
        lambda p: p.write("runs/thesis/a.txt", "mine"),
    ),
    Case(
        "run.root is a file",
        TINY + " run.root={dir}/file",
        ["run directory cannot be written", "{dir}/file is no directory", "set run.root"],
        lambda p: p.write("file", "x"),
    ),
    Case(
        "run.root below a file",
        TINY + " run.root={dir}/file/deeper run.name=x",
        [
            "run directory cannot be written",
            "{dir}/file/deeper/x",
            "{dir}/file is no directory",
            "set run.root",
        ],
        lambda p: p.write("file", "x"),
    ),
    Case(
        "run.root is a link to nothing",
        TINY + " run.root={dir}/away",
        ["run directory cannot be written", "found {dir}/away, a link to /nowhere, which is not there"],
        lambda p: (p.path / "away").symlink_to("/nowhere"),
    ),
    Case(
        "resume below a run.root that is a file",
        TINY + " run.root={dir}/file trainer.resume=latest",
        ["run directory cannot be written", "{dir}/file is no directory", "set run.root"],
        lambda p: p.write("file", "x"),
    ),
]
