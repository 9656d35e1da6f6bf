"""Checks of `lora`: what is adapted, from what it starts, and what goes with what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kt_ray.config.faults import Fault, regex_faults, value_of
from kt_ray.config.limits import BOUNDS, GENERATING
from kt_ray.config.schema import Config


def lora_faults(c: Config) -> Iterator[Fault]:
    """Keys under lora that cannot be together, or with others."""
    lora, target = c.lora, c.lora.target_modules
    if target == []:
        yield Fault(
            "lora.target_modules",
            "names no module",
            "auto, none, names or a regex",
            "set lora.target_modules=auto, or none to leave the non-expert part frozen",
        )
    if isinstance(target, str) and target not in ("auto", "none"):
        yield from regex_faults("lora.target_modules", target)
    for name in ("rank", "alpha"):
        key, bound = f"lora.{name}_pattern", BOUNDS[f"lora.{name}"]
        if value_of(c, key) == {}:
            yield Fault(key, "is empty", "a mapping, or null", f"set {key}=null")
        for pattern, value in (value_of(c, key) or {}).items():
            yield from regex_faults(key, pattern)
            if not bound.holds(value):
                yield Fault(f"{key}.{pattern}={value:g}", "is out of range", str(bound), f"correct {key}")
    if lora.layers is not None and (not lora.layers or min(lora.layers) < 0):
        yield Fault("lora.layers", "names no layer, or one below 0", "numbers of layers, or null for all")
    if target == "none" and not lora.experts:
        yield Fault(
            "lora.target_modules",
            "with lora.experts=false leaves nothing to train",
            remedy="set lora.target_modules=auto or lora.experts=true",
        )
    if lora.dora:
        yield from _dora(c)
    if lora.adapter is not None:
        yield from _start(c, lora.adapter)
    if not lora.init.startswith("pissa"):
        return
    if lora.experts:
        yield Fault(
            "lora.init",
            "with lora.experts=true would take the largest singular values out of the routed experts, "
            "whose weights stay as stored: rounded to their format again, the rest is another model",
            remedy="set lora.init=default, or lora.experts=false",
        )
    if c.model.keep_quantized:
        yield Fault(
            "lora.init",
            "changes weights that model.keep_quantized=true leaves as stored",
            remedy="set lora.init=default, or model.keep_quantized=false",
        )
    if c.mode == "train" and c.eval.after_training:
        yield Fault(
            "eval.after_training",
            f"asks the model without its adapter, whose weights lora.init={lora.init} changes",
            remedy="set eval.after_training=0, and run resume=<run> mode=eval afterwards",
        )
    if c.has_reference:
        grpo = c.trainer.stage == "grpo"
        without = "grpo.kl_coef=0" if grpo else "trainer.stage=orpo or preference.loss=simpo"
        yield Fault(
            "trainer.stage",
            f"takes the model without adapters as its reference, which lora.init={lora.init} changes",
            remedy=f"set lora.init=default, or {without} (no reference)",
        )


def _dora(c: Config) -> Iterator[Fault]:
    if c.lora.experts:
        yield Fault(
            "lora.dora",
            "does not reach the routed experts: PEFT refuses DoRA on their fused weights, and could not load "
            "the adapter",
            remedy="set lora.experts=false, or lora.dora=false",
        )
    if c.lora.init.startswith("pissa"):
        yield Fault(
            "lora.dora",
            f"begins with the norms of weights that lora.init={c.lora.init} changes",
            remedy="set lora.init=default, or lora.dora=false",
        )
    if c.optim.name == "muon":
        yield Fault(
            "lora.dora",
            "trains vectors, and optim.name=muon turns matrices alone",
            remedy="set optim=adamw, or lora.dora=false",
        )
    if c.generate.latent_keys == "absorbed":
        yield Fault(
            "generate.latent_keys",
            "needs weights that are a matrix and an adapter, not those of lora.dora=true",
            "auto or expanded",
            "set generate.latent_keys=auto",
        )
    if c.rule.attention_output == "retain":
        yield Fault(
            "lora.dora",
            "multiplies again for backward: a magnitude's gradient needs more than is kept with "
            "rule.attention_output=retain",
            remedy="set rule.attention_output=auto, or lora.dora=false",
        )


def _start(c: Config, adapter: str) -> Iterator[Fault]:
    """The adapter that training starts from."""
    if c.mode in GENERATING and c.generate.adapter is None and c.serve.adapters is None:
        key = "'serve.adapters={NAME: DIRECTORY}'" if c.mode == "serve" else "generate.adapter=DIRECTORY"
        yield Fault(
            "lora.adapter",
            f"is what training starts from; mode={c.mode} takes an adapter otherwise",
            remedy=f"write {key} instead",
        )
    if c.lora.init.startswith("pissa"):
        yield Fault(
            "lora.init",
            "changes the weights for which the adapter of lora.adapter was made",
            remedy="set lora.init=default, or lora.adapter=null",
        )
    own = Path(c.run.root, c.run.name or "").absolute()
    if c.run.name is not None and own in (Path(adapter).absolute(), *Path(adapter).absolute().parents):
        yield Fault(
            "lora.adapter",
            f"lies in the directory of this run, {own}, which writes its own adapter there",
            remedy="set another run.name; to go on with an interrupted run, trainer.resume=latest",
        )
