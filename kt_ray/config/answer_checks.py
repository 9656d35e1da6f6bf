"""Checks of generate, serve, eval, report and compare: keys that must go together."""

from __future__ import annotations

import re

from kt_ray.config.key_errors import fault, value_of
from kt_ray.config.schema import Config


def check_generate(config: Config) -> None:
    generate = config.generate
    if generate.min_new_tokens > generate.max_new_tokens:
        raise fault(
            "generate.min_new_tokens",
            generate.min_new_tokens,
            f"is more than generate.max_new_tokens={generate.max_new_tokens}",
            f"at most {generate.max_new_tokens}",
            "set generate.min_new_tokens=0 or raise generate.max_new_tokens",
        )
    if generate.adapter == "" or not all(generate.stop):
        key = "generate.adapter" if generate.adapter == "" else "generate.stop"
        raise fault(
            key, "''", "is empty", "a directory" if key.endswith("adapter") else "strings", "leave it out"
        )
    if generate.adapter is None and generate.answer in ("adapter", "both"):
        raise fault(
            "generate.answer",
            generate.answer,
            "needs an adapter, but generate.adapter=null",
            "an adapter directory",
            "set generate.adapter=<directory>, or generate.answer=base",
        )
    held_out = config.data.eval_fraction or config.data.eval_path is not None
    if config.mode == "predict" and generate.split == "eval" and not held_out:
        raise fault(
            "generate.split",
            generate.split,
            "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
            "held-out rows, or all",
            "set generate.split=all or data.eval_path=<file>",
        )


def check_serve(config: Config) -> None:
    serve = config.serve
    for key in ("host", "name", "api_key"):
        value = getattr(serve, key)
        if value is not None and not value.strip():
            raise fault(f"serve.{key}", "''", "is empty", "text", f"leave serve.{key} out")
    if config.mode == "serve" and config.generate.adapter is not None:
        raise fault(
            "generate.adapter",
            config.generate.adapter,
            "has no meaning with mode=serve, where requests name adapters",
            "serve.adapters",
            f"set serve.adapters={{NAME: {config.generate.adapter}}}",
        )
    for name, directory in (serve.adapters or {}).items():
        if not name.strip() or not directory or name == (serve.name or config.model.name):
            what = (
                "an adapter has the base model's name" if name.strip() and directory else "something is empty"
            )
            raise fault(
                "serve.adapters",
                f"{{{name}: {directory}}}",
                f"is no list of adapters: {what}",
                "{NAME: DIRECTORY}, each name another one",
                "correct serve.adapters, or give the base model another name: serve.name=NAME",
            )


def check_results(config: Config) -> None:
    """What eval, report and compare read and write."""
    for key in ("eval.adapter", "eval.base", "eval.out", "report.run", "report.out", "compare.out"):
        value = value_of(config, key)
        if value is not None and not value.strip():
            raise fault(key, "''", "is empty", "a path", f"set {key}=null")
    there = next((key for key in ("eval.adapter", "eval.base") if value_of(config, key) is not None), None)
    if config.mode == "eval" and config.generate.adapter is not None and there:
        raise fault(
            there,
            value_of(config, there),
            f"names answers that there are, but generate.adapter={config.generate.adapter} asks for new ones",
            "one of the two",
            f"leave out {there} or generate.adapter",
        )
    held_out = config.data.eval_fraction or config.data.eval_path is not None
    if config.mode == "train" and config.eval.after_training and not held_out:
        raise fault(
            "eval.after_training",
            config.eval.after_training,
            "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
            "0, or held-out rows",
            "set eval.after_training=0, data.eval_fraction or data.eval_path",
        )
    if config.mode == "train" and config.eval.after_training and config.lora.init.startswith("pissa"):
        raise fault(
            "eval.after_training",
            config.eval.after_training,
            f"asks the model without its adapter, whose weights lora.init={config.lora.init} changes",
            "0 with lora.init=pissa",
            "set eval.after_training=0, and run mode=eval generate.adapter=<run> afterwards",
        )
    letters = config.eval.letters
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]{2,}", letters):
        raise fault(
            "eval.letters",
            letters or "''",
            "names no options",
            "at least two different capital letters",
            "set eval.letters=ABCD",
        )
    if not all(run.strip() for run in config.compare.runs):
        raise fault("compare.runs", config.compare.runs, "has an empty name", "run directories or names")
