"""The command line: `python launch.py …` and the installed command `kt-ray`.

Hydra composes, `kt_ray.config` checks, and only then the module of the chosen mode is imported, so
that `--help`, `--cfg job` and a wrong key answer without loading torch or Ray.

Exit codes: 0 done; 1 a fault in kt_ray (with a traceback), a plan that does not fit, or a check of
mode=doctor or mode=accept that failed; 2 bad input (one line `error: …` on stderr); 75 training was
stopped by a signal, or lost an actor for good: it may be resumed; 130 interrupted.
KT_RAY_DEBUG=1 prints the traceback of bad input, too.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import kt_ray
from kt_ray import torch_environment
from kt_ray.config.schema import Config
from kt_ray.errors import BAD_INPUT, OK, Stopped, UserError, exit_code, guard
from kt_ray.runs.model_hub import located
from kt_ray.runs.resume_command import ResumeCommand
from kt_ray.runs.rundir import job_of_multirun
from kt_ray.supervisor import as_child, supervise
from kt_ray.terminal import lasting, open_streams, visible

# Hydra's flags (and ours, --version).
FLAGS = (
    *("--help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--config-dir"),
    *("--config-name", "--config-path", "--info", "--hydra-help", "--shell-completion"),
)

# Of these and their short forms, those followed by a value.
TAKES_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-dir", "-cd"),
    *("--config-name", "-cn", "--config-path", "-cp", "--info", "-i"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: arguments after the program's name; None = those of this process.
    """
    open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(f"kt_ray {version()}")
        return OK
    code = guard(lambda: _run_hydra(arguments))
    return code if argv is not None else _told(code)


def _told(code: int) -> int:
    """The exit code of this process, which has said all: a late Ctrl-C would only break into the end of the
    interpreter, with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def version() -> str:
    """The version of the installed package, or of the source tree."""
    try:
        return importlib.metadata.version("kt_ray")
    except importlib.metadata.PackageNotFoundError:
        return kt_ray.__version__


def dispatch(config: Config) -> int:
    """Looks at what the command names, then imports the module of `config.mode` and runs it."""
    from kt_ray.runs.first_look import first_look

    first_look(config)
    if not os.path.exists("/dev/nvidiactl"):
        # deepspeed, where installed, otherwise prints that it looked for a GPU in vain. Actors inherit this.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if config.mode == "train":
        # The first word of a run: torch alone takes seconds to load, plan and rows may take a minute.
        print("reading the model and the rows", file=lasting(), flush=True)
    if config.mode in ("train", "serve") and config.trainer.restarts:
        return supervise(config)
    return run(config)


def run(config: Config) -> int:
    """Runs the mode in this process."""
    torch_environment.apply()  # no torch is imported yet
    config = located(config)
    try:
        return int(importlib.import_module(f"kt_ray.modes.{config.mode}").run(config))
    except ModuleNotFoundError as error:
        if error.name != "kt_ray.native._native":
            raise
        # pip install . builds them into the environment, where the source tree hides them.
        raise UserError(
            "the C++ kernels are not built in this source tree",
            where=kt_ray.__path__[0],
            remedy="build them here: pip install -e . ; or, after pip install . , write kt-ray in the place "
            "of python launch.py",
        ) from error


def supervised() -> int:
    """The driver that a supervisor started (trainer.restarts). Returns its exit code."""
    open_streams()
    return _told(as_child(lambda config: guard(lambda: run(config))))


def _run_hydra(arguments: list[str]) -> int:
    """Composes the configuration and runs every job; the first non-zero exit code counts."""
    import hydra
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from kt_ray.config.compose import HYDRA_VERSION_BASE, conf_dir, expand, register_resolvers, translate
    from kt_ray.config.secret_values import hidden_arguments
    from kt_ray.recipe import refuse_peer_options, with_recipe

    _check_flags(arguments)
    register_resolvers()
    flags, keys = _flags_and_keys(arguments)
    printed, sweep = {"--cfg", "-c", "--info", "-i"} & set(flags), bool({"--multirun", "-m"} & set(flags))
    resume = ResumeCommand.of(keys)
    if resume is not None and (printed or sweep):
        raise UserError(
            f"resume= goes on with one run, and {'prints nothing' if printed else 'is no sweep'}",
            observed=" ".join(flags),
            remedy=f"leave out {flags[0]}" + (f"; see {resume.run / 'config.yaml'}" if printed else ""),
        )
    keys = list(keys if resume is None else resume.changes)
    refuse_peer_options(keys)
    # What is asked to be printed as YAML stays alone on standard output.
    keys = with_recipe(keys, lasting(stderr=bool(printed)))
    # Flags first: argparse takes keys in one place only and would refuse `seed=1 -m lora.rank=4,8`.
    arguments = flags + expand(keys, sweep=sweep, implied=resume is None)

    def each_job(action: Callable[[Any], int]) -> list[int]:
        """The exit codes of `action` on every job's composition."""
        codes: list[int] = []

        # Hydra prints lines of its own about exceptions that leave a job; none does.
        def job(composed: Any) -> None:
            sys.argv = hidden_arguments(sys.argv)  # W&B keeps it as well; Hydra has read it
            codes.append(exit_code(lambda: action(composed)))

        with _as_process_arguments(arguments):
            try:
                hydra.main(str(conf_dir()), "config", HYDRA_VERSION_BASE)(job)()
                if printed:
                    sys.stdout.flush()  # a full disk is told
            except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
                raise translate(error, [a for a in arguments if not a.startswith("-")]) from error
            except SystemExit as stop:  # --help, and argparse about an unknown flag
                codes.append(stop.code if isinstance(stop.code, int) else BAD_INPUT if stop.code else OK)
        return codes

    began = datetime.datetime.now()
    if sweep and (
        refused := sum(map(bool, checked := each_job(lambda composed: _check_job(composed, began))))
    ):
        print(f"{refused} of {len(checked)} jobs are refused; none was started", file=sys.stderr)
        return BAD_INPUT
    codes = each_job(lambda composed: _run_job(composed, resume, began))
    return next((code for code in codes if code), OK)


def _flags_and_keys(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the rest."""
    flags: list[str] = []
    keys: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            keys.append(argument)
            continue
        flags += [argument, *itertools.islice(rest, int(argument in TAKES_VALUE))]
    return flags, keys


def _check_flags(arguments: Sequence[str]) -> None:
    """Refuses unknown --flags; whoever writes --lora.rank=8 learns to leave the dashes out."""
    from kt_ray.config.fields import closest, closest_key, fields, groups
    from kt_ray.recipe import refuse_peer_options

    unknown = [
        argument
        for argument in arguments
        if argument.startswith("--") and not any(f.startswith(argument.partition("=")[0]) for f in FLAGS)
    ]
    for argument in unknown:
        flag, _, value = argument.partition("=")
        name = flag[2:].replace("-", "_")
        key = name if name in fields() or name in groups() else closest_key(name)
        match = closest(flag, FLAGS)
        if name == "resume":
            remedy = f"write resume={value or 'runs/NAME'}, without dashes"
        elif match and name not in fields() and name not in groups():
            remedy = f"write {match}"
        else:
            refuse_peer_options(unknown)
            remedy = f"write {key or 'KEY'}={value or '<value>'}, without dashes"
        raise UserError(f"unknown flag {argument}", required="one of " + ", ".join(FLAGS), remedy=remedy)


def _job_number() -> int | None:
    """Of this job in a multirun; None outside one."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra_config = HydraConfig.get()
    return hydra_config.job.num if hydra_config.mode == RunMode.MULTIRUN else None


def _check_job(composed: Any, began: datetime.datetime) -> int:
    """What can be said of a job before the first one starts. began: the whole multirun."""
    from kt_ray.config.compose import to_mapping
    from kt_ray.config.mapping import load
    from kt_ray.runs.first_look import first_look

    first_look(job_of_multirun(load(to_mapping(composed), job=_job_number(), now=began)))
    return OK


def _run_job(composed: Any, resume: ResumeCommand | None, began: datetime.datetime) -> int:
    from hydra.core.hydra_config import HydraConfig

    from kt_ray.config.compose import to_mapping
    from kt_ray.config.mapping import load

    number = _job_number()
    if number is not None:
        task = " ".join(HydraConfig.get().overrides.task)
        print(f"== job {number}: {task}", file=lasting(), flush=True)
    mapping = to_mapping(composed)
    if resume is not None:
        mapping, lines = resume.configuration(mapping)
        print(visible("\n".join(lines)), file=lasting(), flush=True)
    config = load(mapping, job=number, now=began)
    if number is None:
        return dispatch(config)
    try:
        return dispatch(job_of_multirun(config))
    except Stopped as stopped:
        if config.mode != "train":
            raise
        name = shlex.quote(f"run.name={str(config.run.name).removesuffix(f'-{number}')}")
        way_on = f"The whole multirun: the same command with {name} trainer.resume=latest"
        raise Stopped(f"{stopped}. {way_on}") from stopped


@contextmanager
def _as_process_arguments(arguments: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and with HYDRA_FULL_ERROR lets exceptions through; both are put back."""
    argv, full = sys.argv, os.environ.pop("HYDRA_FULL_ERROR", None)
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR", None)  # a reward may have cleared them
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full
