"""The command line: exit codes, one error line with key, value and remedy, and what is (not) imported."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray import cli
from kt_ray.config.fields import fields, groups
from kt_ray.config.limits import WORDS
from kt_ray.config.schema import Config
from kt_ray.errors import BAD_INPUT, BUG, INTERRUPTED, STOPPED, Stopped, UserError

pytestmark = pytest.mark.usefixtures("clean")

REPO = Path(__file__).resolve().parents[2]

# (arguments, what the one error line must hold: key, value, remedy)
BAD: list[tuple[list[str], list[str]]] = [
    # unknown keys
    (
        ["trainer.max_step=5"],
        ["unknown key trainer.max_step", "trainer.max_step=5", "write trainer.max_steps=5"],
    ),
    (["rank=4"], ["unknown key rank", "rank=4", "write lora.rank=4"]),
    (["trianer.max_steps=5"], ["trianer.max_steps=5", "write trainer.max_steps=5"]),
    (["+lora.rnk=5"], ["unknown key lora.rnk", "lora.rnk=5", "write lora.rank=5"]),
    (["++lora.rnk=5"], ["unknown key lora.rnk", "lora.rnk=5", "write lora.rank=5"]),
    (["+lora.rank=5"], ["lora.rank exists", "+lora.rank=5", "write lora.rank=5"]),
    (["lora.rank.x=5"], ["lora.rank is a value", "lora.rank.x=5", "write lora.rank=5"]),
    (["run={nam: x}"], ["unknown key run.nam", "run.nam=x", "write run.name=x"]),
    (["rule.experts.socket=2"], ["rule.experts.socket=2", "write rule.experts.sockets=2"]),
    (["zzzz=1"], ["unknown key zzzz", "zzzz=1", "the keys are mode, seed, model"]),
    (["tracking.wandb.mode=disabled"], ["unknown key tracking.wandb.mode", "tracking has name, project"]),
    (
        ["model=deepseek_v3", "model.config.hiden_size=3"],
        ["model.config.hiden_size=3", "write +model.config.hiden"],
    ),
    # unknown groups and options
    (["modle=demo"], ["unknown group modle", "modle=demo", "write model=demo"]),
    (
        ["model=deepseek_v9"],
        ["model=deepseek_v9", "did you mean model=deepseek_v3?", "write model=deepseek_v3"],
    ),
    (["rule=amx4gpu"], ["rule=amx4gpu", "write rule=amx_4gpu"]),
    (["experiment=null"], ["experiment=null is not an option", "leave experiment=null out"]),
    (["+model=null"], ["model=null is not an option", "leave model=null out"]),
    (["experiment=smok"], ["experiment=smok", "write experiment=smoke"]),
    (
        ["experiment=olmoe_laptop_16gb"],
        ["experiment=olmoe_laptop_16gb", "write mode=plan model=olmoe plan.hardware=laptop_16gb"],
    ),
    (["+model=mini"], ["model has an option already", "+model=mini", "write model=mini"]),
    (["model=/data/DeepSeek"], ["model=/data/DeepSeek", "write model.path=/data/DeepSeek"]),
    (["data=my.jsonl"], ["data=my.jsonl", "write data.path=my.jsonl"]),
    (["lora=5"], ["lora=5", "one of default, no_experts", "choose one of these"]),
    # malformed arguments
    (["trainer"], ["malformed argument trainer", "KEY=VALUE", "write trainer=<value>"]),
    (["data.path=a=b.jsonl"], ["malformed argument data.path=a=b.jsonl", "'data.path=\"a=b.jsonl\"'"]),
    (
        ["lora.rank_pattern={'q_proj':16}"],
        ["malformed", "'lora.rank_pattern={NAME:VALUE}'", "without quotes"],
    ),
    (["trainer={max_steps:"], ["malformed", "'trainer={NAME:VALUE}'"]),
    (["lora.rank_pattern.q_proj=16"], ["one mapping", "write 'lora.rank_pattern={q_proj:16}'"]),
    (["lora.rank_pattern={q_proj:16.5}"], ["wrong type", "'lora.rank_pattern={NAME:VALUE}'"]),
    (["lora.rank_pattern={}"], ["lora.rank_pattern={} is empty", "set lora.rank_pattern=null"]),
    (["lora.rank=8,16"], ["lora.rank=8,16 gives several values", "write lora.rank=8, or add -m"]),
    (["optim.lr=1e-4,1e-3"], ["optim.lr=1e-4,1e-3 gives several values", "write optim.lr=1e-4, or add -m"]),
    (["rule=cpu,auto"], ["rule=cpu,auto gives several values", "write rule=cpu, or add -m"]),
    (["rule.layers=2,2"], ["rule.layers=2,2 gives several values", "write rule.layers=[2,2] for a list, or"]),
    (["data.path=a,b"], ["data.path=[a,b] for a list, 'data.path=\"a,b\"' for a text, or"]),
    (["data.system=It's"], ["quote the value: 'data.system=\"It'\"'\"'s\"'"]),
    (["serve.adapters=runs/a"], ["mapping | null", "write for example 'serve.adapters={NAME:VALUE}'\n"]),
    (["rule.experts.backend=AMXBF16,AMXINT8"], ["several values", "write rule.experts.backend=AMXBF16, or"]),
    (
        ["mode=serve", "generate.adapter='runs/a b'"],
        ["generate.adapter=runs/a b has no meaning", "write 'serve.adapters={NAME: \"runs/a b\"}'\n"],
    ),
    (["--lora.rank=8"], ["unknown flag --lora.rank=8", "write lora.rank=8, without dashes"]),
    (["--multi-run"], ["unknown flag --multi-run", "write --multirun"]),
    (["--model", "demo"], ["unknown flag --model", "write model=<value>, without dashes"]),
    (["mode=infer"], ["mode=infer is not known; required train or", "To fix: set mode to one of these"]),
    (["mode=merge"], ["mode=merge is not known; required", "To fix: run python -m kt_ray.tools merge ("]),
    (["--config-dir", "/nowhere"], ["/nowhere", "give --config-dir an existing directory"]),
    (["--config-name", "other"], ["'other'", "leave out --config-name"]),
    (["experiment=nekoqa_mini"], ["KT_RAY_TEST_DATA", "export KT_RAY_TEST_DATA="]),
    # wrong types
    (
        ["mode=compare", 'compare.runs="my run"'],
        ["wrong type", "list of str", """'compare.runs=["my run"]'"""],
    ),
    (["lora.rank=big"], ["lora.rank=big", "required int", "lora.rank=8"]),
    (["lora.rslora=maybe"], ["lora.rslora=maybe", "required bool", "lora.rslora=false"]),
    (["optim.betas=[0.9]"], ["optim.betas=[0.9]", "list of 2 float", "optim.betas=[0.9,0.999]"]),
    (
        ["trainer.max_steps=1.5"],
        ["trainer.max_steps=1.5", "int | null", "write trainer.max_steps=<int>, or leave it out"],
    ),
    (["trainer.resume=true"], ["trainer.resume=true", "str | null", "To fix"]),
    # wrong values
    (["trainer.stage=simpo"], ["trainer.stage=simpo", "set trainer.stage=dpo preference.loss=simpo"]),
    *(
        (["trainer.stage=dpo", f"preference.loss={w}"], [f"set trainer.stage={w} preference.loss=sigmoid"])
        for w in ("orpo", "dpo")
    ),
    (["mode=plam"], ["mode=plam", "did you mean plan?", "set mode=plan"]),
    (["lora.rank=0"], ["lora.rank=0", "at least 1 and at most 256", "set lora.rank=8"]),
    (["lora.rank=512"], ["lora.rank=512", "at most 256", "set lora.rank=8"]),
    (["lora.dropout=1"], ["lora.dropout=1", "less than 1", "set lora.dropout=0.0"]),
    (["optim.lr=-1e-4"], ["optim.lr=-0.0001", "more than 0", "set optim.lr="]),
    (["optim.eps=1e-45"], ["optim.eps=", "at least 1e-30", "set optim.eps=1e-08"]),
    (["optim.betas=[0.9,1.0]"], ["optim.betas=[0.9,1.0]", "less than 1", "set optim.betas="]),
    (["optim.schedule=cosin"], ["optim.schedule=cosin", "did you mean cosine?", "set optim.schedule=cosine"]),
    (["optim.warmup=2.5"], ["optim.warmup=2.5", "whole number", "set optim.warmup=2"]),
    (
        ["optim.warmup=100", "trainer.max_steps=50"],
        ["optim.warmup=100", "trainer.max_steps=50", "set optim.warmup"],
    ),
    (["trainer.max_steps=0"], ["trainer.max_steps=0", "at least 1", "set trainer.max_steps=null"]),
    (["trainer.epochs=0"], ["trainer.epochs=0", "more than 0", "set trainer.epochs=1.0"]),
    (
        ["trainer.micro_batch_size=16"],
        ["trainer.micro_batch_size=16", "batch_size=8", "set trainer.micro_batch_size=8"],
    ),
    (
        ["trainer.micro_batch_tokens=1024", "trainer.micro_batch_size=2"],
        [
            "trainer.micro_batch_tokens=1024",
            "micro_batch_size=2, which counts rows",
            "micro_batch_tokens=auto",
        ],
    ),
    (
        ["trainer.micro_batch_tokens=1024", "trainer.stage=kto", "trainer.micro_batch_size=auto"],
        ["trainer.micro_batch_tokens=1024", "with trainer.stage=kto", "micro_batch_tokens=auto"],
    ),
    (
        ["generate.latent_keys=absorbed", "model.attn_implementation=eager"],
        ["generate.latent_keys=absorbed", "attn_implementation=eager", "set generate.latent_keys=auto"],
    ),
    (
        ["generate.latent_keys=absorbed", "lora.dora=true", "lora.experts=false"],
        ["generate.latent_keys=absorbed", "lora.dora=true", "set generate.latent_keys=auto"],
    ),
    (["trainer.preview=-1"], ["trainer.preview=-1", "at least 0", "set trainer.preview=0"]),
    (["trainer.resume=lastest"], ["trainer.resume=lastest", "latest", "set trainer.resume=latest"]),
    (
        ["trainer.resume=latest", "run.overwrite=true"],
        ["run.overwrite=true", "trainer.resume=latest", "set run.overwrite=false"],
    ),
    (["data.eval_fraction=1.5"], ["data.eval_fraction=1.5", "less than 1", "set data.eval_fraction=1 or"]),
    (
        ["data.eval_split=test"],
        ["data.eval_split=test names a split of data.eval_path", "set data.eval_path="],
    ),
    (["data.eval_fraction=0"], ["trainer.eval_every=60", "data.eval_fraction=0", "set trainer.eval_every=0"]),
    (
        ["data.format=sharegtp"],
        ["data.format=sharegtp", "auto or alpaca or sharegpt or messages", "set data.format=sharegpt"],
    ),
    *(
        (given, ["data.path=null", "mode=train needs rows", "set data.path=<file.jsonl> or data=demo"])
        for given in (["data=jsonl"], ["model.path=some/model"], ["model=org/name"])
    ),
    (
        ["model=deepseek_v3"],
        [
            "model.path=null",
            "deepseek_v3",
            "set model.path=<directory>, model.path=hf://ORG/NAME (downloads it), or mode=plan",
        ],
    ),
    (["model=custom", "mode=plan"], ["model.path=null", "nothing to plan", "set model.path=<directory>"]),
    (["mode=chat", "generate.stop=['']"], ["generate.stop=", "is empty", "strings that are not empty"]),
    (["+data.name=mine"], ["data.name was removed", "delete it"]),
    (["trainer.on_signal=exit"], ["trainer.on_signal was removed", "the second ends the run at once"]),
    (["rule.replicas=9"], ["rule.replicas=9", "trainer.batch_size=8", "set rule.replicas=8"]),
    (["rule.stages=0"], ["rule.stages=0", "at least 1", "set rule.stages=auto"]),
    (["rule.stages=many"], ["rule.stages=many", "auto or a number at least 1", "set rule.stages=auto"]),
    (["rule.groups=9"], ["rule.groups=9", "at most 8", "set rule.groups=auto"]),
    (
        ["rule.experts.backend=llamafile"],
        ["rule.experts.backend=llamafile", "set model.experts_path=<file.gguf>"],
    ),
    (
        ["model.path=x", "data=demo", "model.experts_path=a.gguf", "rule.experts.backend=AMXINT4"],
        ["rule.experts.backend=AMXINT4", "again", "set rule.experts.backend=llamafile"],
    ),
    (["model.experts_path=a.gguf"], ["model.experts_path=", "model=demo, which is built", "set model.path="]),
    (
        ["data=demo", "model=demo", "trainer.stage=dpo", "rule.experts.activations=int8"],
        ["rule.experts.activations=int8 clashes", "stage's reference", "set rule.experts.activations=auto"],
    ),
    (
        ["rule.experts.activations=keep"],
        ["rule.experts.activations=keep", "auto or retain or int8 or recompute"],
    ),
    (["rule.experts.backend=amxbf16"], ["rule.experts.backend=amxbf16", "did you mean AMXBF16?", "=AMXBF16"]),
    (
        ["rule.experts.isa=avx1024"],
        ["rule.experts.isa=avx1024", "did you mean avx", "set rule.experts.isa=avx"],
    ),
    (["rule.layers=[2,0]"], ["rule.layers=[2,0]", "without layers", "set rule.layers=null"]),
    (
        ["lora.target_modules='['"],
        ["lora.target_modules=[", "regular expression", "correct lora.target_modules"],
    ),
    (
        ["lora.target_modules=none", "lora.experts=false"],
        ["lora.target_modules=none", "nothing to train", "set lora.target_modules=auto or lora.experts=true"],
    ),
    (["run.name=a/b"], ["run.name=a/b", "without slashes", "run.root"]),
    (["run.name=.."], ["run.name=..", "cannot be a directory name", "set run.name"]),
    (["seed=-1"], ["seed=-1", "at least 0", "set seed=0"]),
    (["cluster.address=somewhere"], ["cluster.address=somewhere", "HOST:PORT", "set cluster.address=auto"]),
    (
        ["cluster.dashboard_port=99999"],
        ["cluster.dashboard_port=99999", "65535", "set cluster.dashboard_port=8265"],
    ),
    (["plan.hardware=box.yaml"], ["plan.hardware=box.yaml", "mode=train", "set mode=plan"]),
]


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replaces the modules of all modes; holds the configurations that they were run with."""
    seen: list[Config] = []

    def run(config: Config) -> int:
        seen.append(config)
        return 0

    for mode in ("train", "plan", "doctor", "preview", "predict", "chat", "serve"):
        module = types.ModuleType(f"kt_ray.modes.{mode}")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"kt_ray.modes.{mode}", module)
    return seen


def test_the_table_is_long_enough() -> None:
    assert len(BAD) >= 40 and len({tuple(arguments) for arguments, _ in BAD}) == len(BAD)


@pytest.mark.parametrize(("arguments", "expected"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_line_with_the_remedy(
    arguments: list[str], expected: list[str], modes: list[Config], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == BAD_INPUT
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert [part for part in expected if part not in err] == [], err
    assert "To fix: " in err
    assert modes == []  # refused before any mode began


def test_modes_get_the_configuration(modes: list[Config]) -> None:
    assert cli.main([]) == 0
    assert cli.main(["mode=plan", "model=deepseek_v3", "rule=amx_4gpu", "lora.rank=16"]) == 0
    train, plan = modes
    assert (train.mode, train.model.build) == ("train", "demo_base")
    assert Path(train.run.root).is_absolute()
    assert (plan.mode, plan.model.name, plan.rule.gpus, plan.lora.rank) == ("plan", "deepseek_v3", 4, 16)


def test_multirun_runs_every_combination_under_its_own_name(
    modes: list[Config], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-m", "lora.rank=8,16", "seed=1,2", "run.name=sweep"]) == 0
    assert [(c.lora.rank, c.seed, c.run.name) for c in modes] == [
        (8, 1, "sweep-0"),
        (8, 2, "sweep-1"),
        (16, 1, "sweep-2"),
        (16, 2, "sweep-3"),
    ]
    assert "== job 3: lora.rank=16 seed=2 run.name=sweep" in capfd.readouterr().out


def test_jobs_of_a_multirun_without_a_name_have_one_in_common(modes: list[Config]) -> None:
    assert cli.main(["-m", "seed=1,2"]) == 0
    first, second = (str(config.run.name) for config in modes)
    assert first.removesuffix("-0") == second.removesuffix("-1") != first


def test_a_multirun_goes_on_where_it_was(modes: list[Config], tmp_path_factory: Any, capfd: Any) -> None:
    """The first job has a checkpoint, the second died before its first, the third has not begun; of the
    fourth only the adapter is left."""
    root = tmp_path_factory.mktemp("runs")
    saved = root / "s-0" / "checkpoints" / "step_000005"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    for job in (0, 1, 3):
        (root / f"s-{job}").mkdir(exist_ok=True)
        (root / f"s-{job}" / "config.yaml").write_text("{}")
    (root / "s-1" / "metrics.jsonl").write_text('{"step": 1}\n')
    (root / "s-1" / "checkpoints").mkdir()
    again = ["-m", "run.name=s", f"run.root={root}", "trainer.resume=latest"]
    assert cli.main([*again, "seed=1,2,3"]) == 0
    got = [(config.trainer.resume, config.run.overwrite) for config in modes]
    assert got == [("latest", False), (None, True), (None, False)]
    (root / "s-3" / "adapter").mkdir()
    assert cli.main([*again, "seed=1,2,3,4"]) == BAD_INPUT
    assert "there is nothing to resume" in capfd.readouterr().err and len(modes) == 3


@pytest.mark.parametrize(
    "arguments", [["seed=3", "-m", "lora.rank=8,16"], ["lora.rank=8,16", "seed=3", "--multirun"]]
)
def test_flags_may_stand_between_keys(arguments: list[str], modes: list[Config]) -> None:
    assert cli.main([*arguments, "run.name=a"]) == 0
    assert [(c.lora.rank, c.seed) for c in modes] == [(8, 3), (16, 3)]


@pytest.mark.parametrize("flags", [["--cfg", "job", "--package", "model"], ["-c", "job", "-p", "model"]])
def test_flags_beside_a_path(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """A path implies a group choice, which must not come between flags and keys."""
    assert cli.main(["model.path=m", *flags, "model.seed=3"]) == 0
    printed = yaml.safe_load(capfd.readouterr().out)
    assert (printed["path"], printed["seed"], printed["name"]) == ("m", 3, "custom")


def test_a_bad_value_of_a_multirun_is_told_before_the_first_job(
    modes: list[Config], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-m", "lora.rank=4,0", "data.path=absent.jsonl,null"]) == BAD_INPUT
    out, err = capfd.readouterr()
    assert modes == [] and out == ""
    assert (
        "lora.rank=0" in err
        and "absent.jsonl" in err
        and err.endswith("4 of 4 jobs are refused; none was started\n")
    )


def test_a_multirun_goes_on_after_a_job_that_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begun: list[int] = []

    def run(config: Config) -> int:
        begun.append(config.seed)
        if config.seed == 1:
            raise UserError("no room")
        return 0

    _mode_that(monkeypatch, run)
    assert cli.main(["-m", "seed=1,2"]) == BAD_INPUT
    assert begun == [1, 2] and "no room" in capfd.readouterr().err


def _mode_that(monkeypatch: pytest.MonkeyPatch, behaviour: Any) -> None:
    module = types.ModuleType("kt_ray.modes.train")
    module.run = behaviour  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kt_ray.modes.train", module)


def _raiser(error: BaseException) -> Any:
    def run(config: Config) -> int:
        raise error

    return run


def test_exit_code_of_the_mode_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole process nothing changes it any more."""
    _mode_that(monkeypatch, lambda config: 7)
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert cli.main() == 7 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert cli.main([]) == 7


def test_a_run_says_something_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _mode_that(monkeypatch, lambda config: len(capfd.readouterr().out.splitlines()))
    assert cli.main([]) == 1, "one line, before the mode is begun"


def test_bad_input_found_by_a_mode(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _mode_that(monkeypatch, _raiser(UserError("no config.json", where="/m", remedy="check model.path")))
    assert cli.main([]) == BAD_INPUT
    assert capfd.readouterr().err == "error: no config.json; at /m. To fix: check model.path\n"
    monkeypatch.setenv("KT_RAY_DEBUG", "1")
    assert cli.main([]) == BAD_INPUT
    assert "Traceback" in capfd.readouterr().err


def test_a_user_without_a_home_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one whose number is in no list, in a container, without HOME."""

    def no_user(number: int) -> Any:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_user)
    _mode_that(monkeypatch, lambda config: len(str(Path.home())))
    assert cli.main([]) == BAD_INPUT
    err = capfd.readouterr().err
    assert err.startswith("error: this user has no home directory; at HOME") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (MemoryError(), "memory; found MemoryError"),
        (OSError(errno.ENOMEM, "no room"), "memory; found [Errno 12] no room"),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate"),
            "memory; found can't allocate",
        ),
        (
            RuntimeError("can't start new thread"),
            "threads or processes; found can't start new thread",
        ),
        (RuntimeError(os.strerror(errno.EAGAIN)), "threads or processes; found Resource temporarily"),
    ],
)
def test_memory_or_threads_that_run_out_are_no_bug_and_may_be_there_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], raised: Exception, line: str
) -> None:
    _mode_that(monkeypatch, _raiser(raised))
    for limit, remedy in ((resource.RLIM_INFINITY, "end other programs"), (1 << 20, "ulimit -v is 1024 KiB")):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert cli.main([]) == STOPPED
        err = capfd.readouterr().err
        assert f"gets no more {line}" in err and "To fix: " in err and err.count("\n") == 1
        assert remedy in err or "--pids-limit" in err


def test_a_bug_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _mode_that(monkeypatch, _raiser(ZeroDivisionError("oops")))
    assert cli.main([]) == BUG
    err = capfd.readouterr().err
    assert "Traceback" in err and "oops" in err and "this is a bug in kt_ray" in err.splitlines()[-1]


def test_kernels_that_are_not_built_here_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _mode_that(monkeypatch, _raiser(ModuleNotFoundError("no", name="kt_ray.native._native")))
    assert cli.main([]) == BAD_INPUT
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "To fix: build them here: pip install -e ." in err and str(REPO) in err
    _mode_that(monkeypatch, _raiser(ModuleNotFoundError("no", name="numpy")))
    assert cli.main([]) == BUG and "Traceback" in capfd.readouterr().err


def _while(first: BaseException) -> KeyboardInterrupt:
    """An interrupt that comes while `first` ends everything."""
    second = KeyboardInterrupt()
    second.__context__ = first
    return second


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
        (
            Stopped("SIGTERM: stopped"),
            STOPPED,
            "SIGTERM: stopped. The whole multirun: the same command with run.name=s trainer.resume=latest\n",
        ),
        (_while(Stopped("SIGTERM: saved")), STOPPED, "SIGTERM: saved\n"),
    ],
)
def test_an_interrupt_ends_a_whole_multirun(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    raised: KeyboardInterrupt,
    code: int,
    told: str,
) -> None:
    begun: list[int] = []

    def run(config: Config) -> int:
        begun.append(config.seed)
        raise raised

    _mode_that(monkeypatch, run)
    assert cli.main(["-m", "seed=1,2,3", "run.name=s"]) == code
    assert begun == [1] and capfd.readouterr().err == told


def test_version(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out == f"kt_ray {cli.version()}\n"

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert cli.version()[0].isdigit()


def test_malformed_yaml_of_the_user_is_located(tmp_path_factory: pytest.TempPathFactory, capfd: Any) -> None:
    own = tmp_path_factory.mktemp("own")
    (own / "lora").mkdir()
    (own / "lora" / "bad.yaml").write_text("defaults: [default, _self_]\nrank: [8\n")
    assert cli.main(["--config-dir", str(own), "lora=bad"]) == BAD_INPUT
    err = capfd.readouterr().err
    assert "malformed YAML" in err and "bad.yaml line" in err and err.count("\n") == 1


def test_help_is_one_screen_with_the_commands_and_the_groups(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capfd.readouterr().out
    assert "cpu_2workers_2sockets" in out and "experiment: " in out
    assert sum(1 + (len(line) - 1) // 100 for line in out.splitlines()) <= 45
    modes = next(line for line in out.splitlines() if line.startswith("mode="))
    assert modes.split()[1:] == list(WORDS["mode"])
    words = out.partition("often set")[2].partition("flags")[0].split()
    assert [word for word in words if word not in fields() and word.partition("=")[0] not in groups()] == []


RECIPE = REPO / "tests" / "recipe" / "qwen3moe_lora_sft_kt.yaml"  # whose mapping is printed with arrows


def test_a_full_disk_behind_what_it_says_ends_no_training(
    modes: list[Config], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        ours = ["model=demo", "data=demo", "eval.after_training=0", "seed=1,2", "run.name=a"]
        assert cli.main(["-m", f"recipe={RECIPE}", *ours]) == 0
        assert full.write("x") and full.flush() is None  # nothing is left that fails when Python ends
    assert len(modes) == 2 and capfd.readouterr().err == ""
