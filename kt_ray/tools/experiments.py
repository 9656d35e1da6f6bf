"""conf/experiment/<model>_<hardware>.yaml: for each family and described machine, settings that fit it.

    python -m kt_ray.tools.experiments [MODEL ...]     writes those files; all models where none is named

Settings are tried in order, the most precise first; the first whose plan fits is written, with memory and
time as `mode=plan` predicts them. A model that does not fit a machine in any of them gets no file, nor does
one that kt_ray can plan but not train. Nothing is measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from kt_ray.config.compose import compose
from kt_ray.config.files import conf_dir, hardware_file, option_names
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.rate_files import rates_for
from kt_ray.modes.plan import model_dims
from kt_ray.placement.plan_types import Budget, Plan
from kt_ray.placement.render import gib
from kt_ray.timing.choose import choose_plan
from kt_ray.timing.prediction import Prediction, predict

# Not of the released families: built here, or whatever is given.
_OTHERS = ("custom", "demo", "demo_random", "mini")


@dataclass(frozen=True)
class Settings:
    """One attempt: how experts are stored, and the size of a step."""

    backend: str
    max_length: int
    batch_size: int


ATTEMPTS = (
    Settings("auto", 1024, 8),
    Settings("AMXINT8", 1024, 8),
    Settings("AMXINT4", 1024, 8),
    Settings("AMXINT4", 512, 8),
    Settings("AMXINT4", 256, 8),
)
_WHY = {
    "auto": "experts as the checkpoint stores them",
    "AMXINT8": "experts quantised to int8 while they load: as stored they do not fit",
    "AMXINT4": "experts quantised to int4 while they load: in int8 they do not fit",
}


def models() -> list[str]:
    """Options of conf/model that stand for a released model."""
    return [name for name in option_names("model") if name not in _OTHERS]


def machines() -> list[str]:
    """Files of conf/hardware, by name."""
    return sorted(path.stem for path in (conf_dir() / "hardware").glob("*.yaml"))


def plan_of(config: Config) -> Plan:
    """The plan of a configuration that names plan.hardware.

    Raises:
        UserError: the rule cannot be laid out there at all.
    """
    hardware = hardware_for(config)
    dims = model_dims(config.model)
    return choose_plan(dims, config, hardware)


def find(model: str, machine: str) -> tuple[Settings, Plan, Prediction] | None:
    """The first settings that fit, with plan and prediction; None = none does, or it cannot be trained."""
    for settings in ATTEMPTS:
        config = compose(
            [
                *(f"model={model}", "data=jsonl", "optim=adamw", "trainer=default", "mode=plan"),
                *(f"plan.hardware={machine}", f"rule.device={_device(machine)}"),
                f"rule.experts.backend={settings.backend}",
                f"data.max_length={settings.max_length}",
                f"trainer.batch_size={settings.batch_size}",
            ]
        )
        try:
            plan = plan_of(config)
        except UserError:
            continue
        if plan.dims.refusal:
            return None
        if plan.fits:
            return settings, plan, predict(plan, config, rates_for(config, plan.hardware))
    return None


def render(model: str, machine: str, settings: Settings, plan: Plan, prediction: Prediction) -> str:
    """The text of the experiment's file."""
    name = f"{model}_{machine}"
    memory = ", ".join(f"{b.device} {gib(b.total)} of {gib(b.capacity)}" for b in _fullest(plan))
    rate = prediction.tokens_per_s
    figure = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    lines = [
        "# @package _global_",
        f"# {_title(model)} on {machine}: predicted, not measured: {figure} tokens/s "
        f"({prediction.simulated.seconds:.3g} s per step of {plan.tokens_per_step:,} tokens).",
        f"# Memory where it is fullest, predicted: {memory}.",
        f"#   python launch.py experiment={name} mode=plan plan.hardware={machine}",
        f"#   python launch.py experiment={name} model.path=DIR data.path=FILE.jsonl",
        "# Figures by the first of these commands; written by `python -m kt_ray.tools.experiments`.",
        "defaults:",
        f"  - override /model: {model}",
        "  - override /data: jsonl",
        "  - override /rule: auto",
        "  - override /optim: adamw",
        "  - override /trainer: default",
        "rule:",
        f"  device: {_device(machine):<14}# attention, norms, routers and shared experts",
        "  experts:",
        f"    backend: {settings.backend:<11}# {_WHY[settings.backend]}",
        "data:",
        f"  max_length: {settings.max_length:<10}# tokens per row",
        "trainer:",
        f"  batch_size: {settings.batch_size:<10}# rows per step",
        "  micro_batch_size: 1   # rows per forward",
        "  save_every: 50        # steps between checkpoints",
        "  eval_every: 50        # steps between evaluations",
    ]
    return "\n".join(lines) + "\n"


def _device(machine: str) -> str:
    file = hardware_file(machine)
    assert file is not None
    return "cuda" if yaml.safe_load(file.read_text(encoding="utf-8")).get("gpus") else "cpu"


def _fullest(plan: Plan) -> list[Budget]:
    """The budget that is used most, of the sockets and of the GPUs."""
    kinds = [[b for b in plan.budgets if b.is_socket is kind] for kind in (False, True)]
    return [max(kind, key=lambda b: b.total / b.capacity) for kind in kinds if kind]


def _title(model: str) -> str:
    """The model's name, as its option's first line has it."""
    line = (conf_dir() / "model" / f"{model}.yaml").read_text(encoding="utf-8").splitlines()[0]
    return line.lstrip("# ").partition(":")[0].partition(",")[0]


def main(arguments: list[str]) -> int:
    """Writes the files of the named models (all, where none is named)."""
    unknown = [name for name in arguments if name not in models()]
    if unknown:
        print(f"error: no model {', '.join(unknown)}; there are {', '.join(models())}", file=sys.stderr)
        return 2
    for model in arguments or models():
        for machine in machines():
            path = Path(conf_dir()) / "experiment" / f"{model}_{machine}.yaml"
            found = find(model, machine)
            if found is None:
                path.unlink(missing_ok=True)
                print(f"{model} does not fit {machine}", flush=True)
            else:
                path.write_text(render(model, machine, *found), encoding="utf-8")
                print(f"wrote {path.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
