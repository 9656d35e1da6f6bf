"""Every check of a configuration that needs neither files nor hardware.

Two tables (kt_ray/config/limits.py: allowed words, numeric bounds) cover single keys; the functions
below, and those of the other *_checks.py files, cover keys that must go together. The first fault found is
raised; each names the key, the value, the reason and what to write instead.
"""

from __future__ import annotations

import re
from typing import Any

from kt_ray.config.answer_checks import check_generate, check_results, check_serve
from kt_ray.config.data_checks import check_data
from kt_ray.config.fields import closest, show
from kt_ray.config.key_errors import fault, value_of
from kt_ray.config.layer_checks import DEVICE, check_layers
from kt_ray.config.limits import BOUNDS, WORDS
from kt_ray.config.schema import Config, ExpertsRule
from kt_ray.config.training_checks import check_lora, check_optim, check_trainer

# Seeds are 64-bit counters of the random streams; the sign bit stays free.
SEED_LIMIT = 2**63

_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/:]+:\d+")


def check(config: Config) -> None:
    """Raises UserError for the first value, or combination of values, that cannot work."""
    for key, words in WORDS.items():
        _check_word(key, value_of(config, key), words)
    for key, bound in BOUNDS.items():
        value = value_of(config, key)
        if value is not None and not isinstance(value, str) and not bound.holds(value):
            raise fault(key, value, "is out of range", str(bound))
    for key in ("seed", "model.seed"):
        if not 0 <= value_of(config, key) < SEED_LIMIT:
            raise fault(key, value_of(config, key), "is out of range", "at least 0 and less than 2**63")
    parts = (
        *(_model, _rule, check_layers, _data, check_lora, check_optim, check_trainer),
        *(check_generate, check_serve, _cluster, check_results, _run),
    )
    for part in parts:
        part(config)


def _check_word(key: str, value: Any, words: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value in words:
        return
    match = closest(value, words)
    numeric = key in BOUNDS
    allowed = " or ".join([*words, f"a number {BOUNDS[key]}"] if numeric else words)
    reason = "is not known" + (f"; did you mean {match}?" if match else "")
    raise fault(key, value, reason, allowed, f"set {key}={match or words[0]}")


def _model(config: Config) -> None:
    model = config.model
    if not model.name:
        raise fault("model.name", "''", "is empty", "a label", "set model.name=custom")
    if model.path == "":
        raise fault("model.path", "''", "is empty", "a directory", "set model.path=<directory>")
    if model.experts_path == "":
        raise fault(
            "model.experts_path", "''", "is empty", "a GGUF file", "set model.experts_path=<file.gguf>"
        )
    if model.experts_path is not None and model.build is not None:
        raise fault(
            "model.experts_path",
            model.experts_path,
            f"has no meaning for model={model.name}, which is built with experts of its own",
            "a checkpoint in model.path beside it",
            "set model.path=<directory>, or model.experts_path=null",
        )
    if model.path is None and model.build == "demo_base":
        for key, given in (("seed", model.seed or None), ("tokenizer", model.tokenizer)):
            if given is not None:
                raise fault(
                    f"model.{key}",
                    given,
                    f"has no meaning for model={model.name}, which is pretrained with a tokenizer of its own",
                    "its default",
                    f"leave model.{key} out, or take random weights: model=demo_random",
                )
    if model.path is None and model.build is None:
        if config.mode in ("train", "predict", "chat", "serve") or (
            config.mode == "preview" and model.tokenizer is None
        ):
            raise fault(
                "model.path",
                None,
                f"but mode={config.mode} needs the checkpoint of model={model.name}",
                "a Hugging Face directory with config.json, *.safetensors and a tokenizer",
                "set model.path=<directory>"
                + (", or mode=plan to see the placement without weights" if model.config else ""),
            )
        if config.mode == "plan" and model.config is None:
            raise fault(
                "model.path",
                None,
                "and model.config is empty, so there is nothing to plan",
                "a checkpoint directory or a model with known dimensions",
                "set model.path=<directory> or model=deepseek_v3",
            )


def _rule(config: Config) -> None:
    rule, backend, file = config.rule, config.rule.experts.backend, config.model.experts_path
    if backend == "llamafile" and file is None:
        raise fault(
            "rule.experts.backend",
            backend,
            "reads the routed experts from a GGUF file, but model.experts_path=null",
            "a GGUF file of the same model",
            "set model.experts_path=<file.gguf>, or rule.experts.backend=auto (the checkpoint's own format)",
        )
    if file is not None and backend in ("AMXINT8", "AMXINT4"):
        raise fault(
            "rule.experts.backend",
            backend,
            f"would quantise the quantised experts of model.experts_path={file} again",
            "auto or llamafile with a GGUF file",
            "set rule.experts.backend=llamafile, or model.experts_path=null",
        )
    placed = rule.experts
    if placed.load == "":
        raise fault(
            "rule.experts.load", "''", "is empty", "a checkpoint directory", "set rule.experts.load=null"
        )
    if placed.placement == "balanced" and placed.load is None and config.trainer.resume is None:
        raise fault(
            "rule.experts.placement",
            placed.placement,
            "needs a load, but rule.experts.load=null and nothing is resumed",
            "a checkpoint of an earlier run, which holds a histogram",
            "set rule.experts.load=<checkpoint directory>, or rule.experts.placement=auto",
        )
    _lane(placed, backend)
    if rule.replica_count > config.trainer.batch_size:
        raise fault(
            "rule.replicas",
            rule.replicas,
            f"is more than trainer.batch_size={config.trainer.batch_size}: a replica would never have a row",
            f"at most {config.trainer.batch_size}",
            f"set rule.replicas={config.trainer.batch_size} or trainer.batch_size={rule.replicas}",
        )


def _lane(rule: ExpertsRule, backend: str) -> None:
    """Experts on a GPU: where, and what it cannot compute."""
    if rule.lane_device != "auto" and not DEVICE.fullmatch(rule.lane_device):
        raise fault(
            "rule.experts.lane_device",
            rule.lane_device or "''",
            "is not a device",
            "auto, cuda:0, cuda:1, … or cpu",
            "set rule.experts.lane_device=auto",
        )
    for key, value, off in (("gpu_resident", rule.gpu_resident, 0), ("stream", rule.stream, "off")):
        if value != off and backend == "AMXINT8":
            raise fault(
                f"rule.experts.{key}",
                value,
                "clashes with rule.experts.backend=AMXINT8: the engine then multiplies in int8, a GPU would "
                "multiply the same experts in bfloat16",
                "a backend that computes in bfloat16 or float32",
                f"set rule.experts.backend=auto (weights stored as int8 stay so), or "
                f"rule.experts.{key}={show(off)}",
            )


def _data(config: Config) -> None:
    data = config.data
    check_data(config)
    if (
        config.mode == "train"
        and config.trainer.eval_every
        and not data.eval_fraction
        and data.eval_path is None
    ):
        raise fault(
            "trainer.eval_every",
            config.trainer.eval_every,
            "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
            "held-out rows, or 0",
            "set trainer.eval_every=0 or data.eval_fraction=0.05",
        )


def _cluster(config: Config) -> None:
    address = config.cluster.address
    if not _ADDRESS.fullmatch(address):
        match = closest(address, ("auto", "local"))
        raise fault(
            "cluster.address",
            address,
            "is no address" + (f"; did you mean {match}?" if match else ""),
            "auto, local or HOST:PORT",
            f"set cluster.address={match or 'auto'}",
        )
    if config.cluster.namespace == "":
        raise fault("cluster.namespace", "''", "is empty", "a name or null")
    if config.tracking.name == "wandb" and not config.tracking.project:
        raise fault("tracking.project", "''", "is empty", "a W&B project name")


def _run(config: Config) -> None:
    name = config.run.name
    if name is not None and (not name.strip() or re.search(r"[/\\\x00-\x1f]", name) or name in (".", "..")):
        raise fault(
            "run.name",
            name or "''",
            "cannot be a directory name",
            "a name without slashes",
            "set run.name=<name> and put the directory into run.root",
        )
    if not config.run.root:
        raise fault("run.root", "''", "is empty", "a directory")
    if config.plan.hardware is not None and config.mode != "plan":
        raise fault(
            "plan.hardware",
            config.plan.hardware,
            f"has no meaning with mode={config.mode}",
            "mode=plan",
            "set mode=plan, or plan.hardware=null",
        )
