"""One stage's share of a Hugging Face model: built on meta, experts cut out, own weights loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kt_ray.errors import UserError
from kt_ray.model import hook
from kt_ray.model.formula import check_trainable
from kt_ray.model.lora import linear_names
from kt_ray.model.recording import LayerStub, Passthrough, Recorder
from kt_ray.model.spec import StageSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class StageModel:
    """A stage's modules.

    Attributes:
        causal: the ...ForCausalLM with foreign layers stubbed and routed experts without parameters.
        base: its inner model.
        layers: own decoder layers by index.
        names: Hugging Face name of each own layer.
        experts: context of each own MoE layer.
        recorder: gives the layers' call arguments.
        lora_names: linear modules of the whole model that LoRA may adapt (all layers).
        dtype: compute type.
        num_experts: routed experts per MoE layer.
        top_k: experts per token.
        hidden_size: H.
        vocab_size: V.
    """

    causal: Any  # PreTrainedModel: torch's stubs type every attribute of a Module as Tensor | Module
    base: Any
    layers: dict[int, nn.Module]
    names: dict[int, str]
    experts: dict[int, hook.LayerContext]
    recorder: Recorder
    lora_names: list[str]
    dtype: torch.dtype
    num_experts: int
    top_k: int
    hidden_size: int
    vocab_size: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers that this stage holds."""
        held = [*self.causal.parameters(), *self.causal.buffers()]
        return sum({id(t): t.numel() * t.element_size() for t in held}.values())


def build_stage_model(spec: StageSpec) -> StageModel:
    """Build, cut, load. Nothing that this stage does not own is ever materialised.

    Raises:
        UserError: a family, a formula or a checkpoint that cannot be run, by name, before loading.
    """
    model = build_on_meta(spec)
    causal, base = model.causal, model.base
    start, stop = spec.layers
    # the stubs keep the meta layers reachable for attributes, outside the module tree
    for number in range(spec.num_layers):
        if not start <= number < stop:
            base.layers[number] = LayerStub(base.layers[number])
    for layer in model.layers.values():
        for module in layer.modules():
            if hook.is_experts(module):
                for name in list(module._parameters):
                    module.register_parameter(name, None)
    from kt_ray.checkpoint.index import CheckpointIndex
    from kt_ray.checkpoint.non_experts import load_non_experts, materialize_buffers

    device = torch.device(spec.device)
    index = CheckpointIndex.open(Path(spec.model_dir))
    load_non_experts(
        index,
        causal,
        layers=spec.layers,
        dtype=model.dtype,
        device=device,
        need_embedding=spec.first,
        need_head=spec.last,
    )
    _drop_unused(causal, base, spec)
    materialize_buffers(causal, device)
    left = [name for name, t in [*causal.named_parameters(), *causal.named_buffers()] if t.is_meta]
    if left:
        raise UserError(
            "the checkpoint lacks weights of this model",
            where=spec.model_dir,
            observed="no value for "
            + ", ".join(left[:4])
            + (f" and {len(left) - 4} more" if len(left) > 4 else ""),
            remedy="download the checkpoint again, or check that config.json belongs to it",
        )
    causal.requires_grad_(False)
    causal.eval()
    return model


def build_on_meta(spec: StageSpec) -> StageModel:
    """The whole model on the meta device, checked for what this project can run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hook.register()
    start, stop = spec.layers
    if not 0 <= start < stop <= spec.num_layers:
        raise ValueError(f"layers {spec.layers} are no part of {spec.num_layers}")
    try:
        config = AutoConfig.from_pretrained(spec.model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            "transformers cannot read this model's configuration",
            where=str(Path(spec.model_dir) / "config.json"),
            observed=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="set model.path to a model of a family that the installed transformers knows",
        ) from error
    model_type = config.model_type
    if config.get_text_config() is not config:
        raise UserError(
            f"{model_type} is a multimodal model",
            where="config.json",
            required="a text-only ...ForCausalLM configuration",
            remedy="export the language part of the checkpoint as a model of its own",
        )
    dtype = _resolve_dtype(spec.dtype, config)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # no auxiliary loss: routers are frozen
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=spec.attn_implementation,
                experts_implementation=hook.NAME,
            )
    except (ValueError, ImportError, KeyError) as error:
        raise UserError(
            f"transformers cannot build {model_type} for text generation",
            where="config.json",
            observed=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="set model.attn_implementation=eager, or choose another model",
        ) from error
    base: Any = getattr(causal, causal.base_model_prefix, None)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != spec.num_layers:
        raise UserError(
            f"{model_type} keeps its decoder layers in a way the layer loop does not know",
            observed="no list of layers" if layers is None else f"{len(layers)} layers",
            required=f"{spec.num_layers} modules in {causal.base_model_prefix}.layers",
            remedy="choose another model family",
        )
    prefix = f"{causal.base_model_prefix}.layers"
    contexts = _check_experts(layers, prefix, config)
    own = {index: layers[index] for index in range(start, stop)}
    every_layer = {f"{prefix}.{index}": layer for index, layer in enumerate(layers)}
    return StageModel(
        causal=causal,
        base=base,
        layers=own,
        names={index: f"{prefix}.{index}" for index in own},
        experts={index: context for index, context in contexts.items() if index in own},
        recorder=Recorder(causal, base, list(layers)),
        lora_names=linear_names(every_layer),
        dtype=dtype,
        num_experts=max(context.num_experts for context in contexts.values()),
        top_k=_config_value(
            config, ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
        ),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def _check_experts(layers: nn.ModuleList, prefix: str, config: object) -> dict[int, hook.LayerContext]:
    """Attach a context to each MoE layer's experts; refuse experts that would stay on this device."""
    model_type = config.model_type  # type: ignore[attr-defined]
    contexts: dict[int, hook.LayerContext] = {}
    for index, layer in enumerate(layers):
        found = [(name, module) for name, module in layer.named_modules() if hook.is_experts(module)]
        if len(found) > 1:
            raise UserError(
                f"{model_type} has several sets of routed experts in one layer",
                where=f"{prefix}.{index}",
                observed=", ".join(name for name, _ in found),
                required="one",
                remedy="choose another model family",
            )
        for _, module in found:
            check_trainable(module, model_type)
            contexts[index] = module._kt_stage = hook.LayerContext(index, int(module.num_experts))
        experts = [name for name, _ in found]
        stray = [
            name
            for name, module in layer.named_modules()
            if ".experts." in f".{name}."
            and any(True for _ in module.parameters(recurse=False))
            and not any(name == e or name.startswith(e + ".") for e in experts)
        ]
        if stray:
            raise UserError(
                f"transformers does not dispatch the routed experts of {model_type}",
                where=f"{prefix}.{index}.{stray[0]}",
                remedy="choose another model family, or a transformers version that dispatches this one",
            )
    if not contexts:
        raise UserError(
            f"{model_type} has no routed experts that transformers dispatches",
            where="config.json",
            required="a Mixture-of-Experts language model",
            remedy="set model.path to a MoE model",
        )
    return contexts


def _resolve_dtype(name: str, config: object) -> torch.dtype:
    if name == "float16":
        name = "bfloat16"  # as below
    if name == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
        dtype = _DTYPES[dtype] if isinstance(dtype, str) else dtype
        # float16 trains badly and the engine has none
        return torch.bfloat16 if dtype == torch.float16 else dtype
    if name not in ("float32", "bfloat16"):
        raise UserError(
            "model.dtype is not one this project computes in",
            observed=repr(name),
            required="auto, bfloat16 or float32",
            remedy="set model.dtype=auto",
        )
    return _DTYPES[name]


def _config_value(config: object, names: Sequence[str]) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise UserError(
        f"{config.model_type} does not say how many experts a token takes",  # type: ignore[attr-defined]
        where="config.json",
        required="one of " + ", ".join(names),
        remedy="choose another model family",
    )


def _drop_unused(causal: Any, base: Any, spec: StageSpec) -> None:
    """Replace embedding, final norm and head where another stage has them."""
    if not spec.first:
        causal.set_input_embeddings(Passthrough())
    if not spec.last:
        causal.set_output_embeddings(Passthrough())
        for name, module in list(base.named_children()):
            if "norm" in name and any(True for _ in module.parameters()):
                setattr(base, name, Passthrough())
