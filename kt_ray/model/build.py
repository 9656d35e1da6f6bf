"""One stage's share of a Hugging Face model: built on meta, experts cut out, own weights loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kt_ray.errors import UserError
from kt_ray.model.family import Family, build_causal, drop_towers, read_family
from kt_ray.model.formula import ExpertFormula, check_trainable
from kt_ray.model.fused_norms import fuse_norms
from kt_ray.model.layer_calls import (
    BlankEmbedding,
    LayerCallCapture,
    LayerContext,
    LayerStub,
    Passthrough,
    is_experts,
)
from kt_ray.model.lora import linear_names
from kt_ray.model.mamba_steps import exact_steps
from kt_ray.model.stage_spec import StageSpec
from kt_ray.model.streamed_weights import StreamedWeights

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "moe_top_k")


@dataclass
class StageModel:
    """A stage's modules."""

    # the ...ForCausalLM with foreign layers stubbed and routed experts without parameters;
    # PreTrainedModel: torch's stubs type every attribute of a Module as Tensor | Module
    causal: Any
    base: Any  # its inner language model
    root: str  # module name of `base`; its layers are root + ".layers.3"
    layers: dict[int, nn.Module]  # own decoder layers by index
    names: dict[int, str]  # their Hugging Face names
    experts: dict[int, LayerContext]  # context of each own MoE layer
    expert_modules: dict[int, str]  # MoE layer of the whole model -> name of its experts' module
    formulas: dict[int, ExpertFormula]  # what the experts of each MoE layer of the whole model compute
    capture: LayerCallCapture  # gives the layers' call arguments
    lora_names: list[str]  # linear modules of the whole model that LoRA may adapt (all layers)
    other_names: list[str]  # linear modules outside the decoder layers: head, other towers
    device: torch.device
    dtype: torch.dtype  # compute type
    num_experts: int  # routed experts per MoE layer
    top_k: int  # experts per token
    hidden_size: int
    vocab_size: int
    streamed: StreamedWeights | None = None  # of the layers that do not stay on the device

    def add_streamed(self, layer: int) -> None:
        """A streamed layer's tensors are loaded."""
        assert self.streamed is not None
        self.streamed.add(layer, self.layers[layer])


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
            if is_experts(module):
                for name in list(module._parameters):
                    module.register_parameter(name, None)
    from kt_ray.checkpoint.index import CheckpointIndex, check_unchanged, some
    from kt_ray.checkpoint.non_experts import load_non_experts, materialize_buffers
    from kt_ray.checkpoint.safetensors_file import damaged

    if spec.streamed:
        model.streamed = StreamedWeights(spec.streamed, spec.slots, model.device, spec.weights_file)
    embedding = causal.get_input_embeddings()
    # Others compute, too: a norm, a scale.
    looked_up = spec.embedding_on_host and type(embedding) is nn.Embedding
    index = CheckpointIndex.open(Path(spec.model_dir))
    if spec.fingerprint:
        check_unchanged(index.fingerprint, spec.fingerprint, spec.model_dir)
    load_non_experts(
        index,
        causal,
        layers=spec.layers,
        dtype=model.dtype,
        device=model.device,
        need_embedding=spec.first,
        need_head=spec.last,
        keep_quantized=spec.keep_quantized,
        on_host=spec.streamed,
        embedding_on_host=looked_up,
        ready=model.add_streamed,
    )
    _drop_unused(model, spec)
    if looked_up:
        _look_up_on_host(embedding, model.device)
    materialize_buffers(causal, model.device)
    missing = [name for name, t in [*causal.named_parameters(), *causal.named_buffers()] if t.is_meta]
    if missing:
        observed = f"no value for {some(missing, 4)}"
        raise damaged("the checkpoint lacks weights of this model", spec.model_dir, observed)
    causal.requires_grad_(False)
    causal.eval()
    exact_steps(model.layers.values())
    if model.device.type == "cuda":
        fuse_norms(model.layers.values())
    return model


def build_on_meta(spec: StageSpec) -> StageModel:
    """The whole model on the meta device, checked for what this project can run.

    Raises:
        UserError: a family that cannot be trained, by name and reason.
    """
    start, stop = spec.layers
    if not 0 <= start < stop <= spec.num_layers:
        raise ValueError(f"layers {spec.layers} are no part of {spec.num_layers}")
    family = read_family(spec.model_dir)
    config, label = family.config, family.label
    dtype = _resolve_dtype(spec.dtype, config, family.whole)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # no auxiliary loss: routers are frozen
    causal, base, root = build_causal(family, dtype, spec.attn_implementation)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != spec.num_layers:
        raise UserError(
            f"{label} keeps its decoder layers in a way the layer loop does not know",
            observed="no list of layers" if layers is None else f"{len(layers)} layers",
            required=f"{spec.num_layers} modules in {root or type(causal).__name__}.layers",
            remedy="choose another model family",
        )
    prefix = f"{root}.layers"
    contexts, expert_modules, formulas = _check_experts(layers, prefix, family)
    others = [
        name
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(f"{prefix}.")
    ]
    drop_towers(causal, root)
    names = [f"{prefix}.{index}" for index in range(len(layers))]
    own = range(start, stop)
    return StageModel(
        causal=causal,
        base=base,
        root=root,
        layers={index: layers[index] for index in own},
        names={index: names[index] for index in own},
        experts={index: context for index, context in contexts.items() if index in own},
        expert_modules=expert_modules,
        formulas=formulas,
        capture=LayerCallCapture(causal, base, list(layers)),
        lora_names=linear_names(dict(zip(names, layers, strict=True)), family.text_type),
        other_names=others,
        device=torch.device(spec.device),
        dtype=dtype,
        num_experts=max(context.num_experts for context in contexts.values()),
        top_k=_top_k(config, label),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def _check_experts(
    layers: nn.ModuleList, prefix: str, family: Family
) -> tuple[dict[int, LayerContext], dict[int, str], dict[int, ExpertFormula]]:
    """Attach a context to each MoE layer's experts; refuse experts that would stay on this device."""
    label = family.label
    contexts: dict[int, LayerContext] = {}
    names: dict[int, str] = {}
    formulas: dict[int, ExpertFormula] = {}
    for index, layer in enumerate(layers):
        modules = [(name, module) for name, module in layer.named_modules() if is_experts(module)]
        if len(modules) > 1:
            raise UserError(
                f"{label} has several sets of routed experts in one layer",
                where=f"{prefix}.{index}",
                observed=", ".join(name for name, _ in modules),
                required="one",
                remedy="choose another model family",
            )
        for name, module in modules:
            names[index] = f"{prefix}.{index}.{name}"
            formulas[index] = check_trainable(module, label, family.config.hidden_size)
            contexts[index] = module._kt_stage = LayerContext(index, int(module.num_experts))
        experts = tuple(f"{name}." for name, _ in modules)
        stray = [
            name
            for name, _ in layer.named_parameters()
            if ".experts." in f".{name}" and not name.startswith(experts)
        ]
        if stray:
            raise UserError(
                f"transformers does not dispatch the routed experts of {label}",
                where=f"{prefix}.{index}.{stray[0].rpartition('.')[0]}",
                remedy="choose another model family, or a transformers version that dispatches this one",
            )
    if not contexts:
        raise UserError(
            f"{label} has no routed experts that transformers dispatches",
            where="config.json",
            required="a Mixture-of-Experts language model",
            remedy="set model.path to a MoE model",
        )
    return contexts, names, formulas


def _resolve_dtype(name: str, *configs: object) -> torch.dtype:
    """model.dtype, or what the first configuration says that says something."""
    stated = [getattr(config, "dtype", None) for config in configs] if name == "auto" else [name]
    dtype = next((value for value in stated if value is not None), torch.float32)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return torch.bfloat16 if dtype == torch.float16 else dtype  # float16 trains badly, the engine has none


def _top_k(config: object, label: str) -> int:
    stated = [value for name in _TOP_K if (value := getattr(config, name, None)) is not None]
    for value in stated:
        if isinstance(value, list) and len({*value}) == 1:  # a number per layer: Hunyuan
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    raise UserError(
        f"{label} does not say how many experts a token takes in every layer",
        where="config.json",
        observed=stated[0] if stated else None,
        required="one number in one of " + ", ".join(_TOP_K),
        remedy="choose another model family",
    )


def _look_up_on_host(embedding: nn.Module, device: torch.device) -> None:
    """Token ids go to the embedding, and what it gives to the device."""
    embedding.register_forward_pre_hook(lambda module, inputs: tuple(ids.cpu() for ids in inputs))
    embedding.register_forward_hook(lambda module, inputs, embedded: embedded.to(device))


def _drop_unused(model: StageModel, spec: StageSpec) -> None:
    """Replace the embedding and the modules after the layers where another stage has them."""
    causal, base = model.causal, model.base
    if not spec.first:
        causal.set_input_embeddings(BlankEmbedding(model.hidden_size, model.dtype))
    if not spec.last:
        causal.set_output_embeddings(Passthrough())
        embedding = causal.get_input_embeddings()
        for name, module in list(base.named_children()):
            if module is not embedding and name != "layers" and any(p.is_meta for p in module.parameters()):
                setattr(base, name, Passthrough())
        path = model.root.split(".")
        for depth in range(1, len(path)):  # a multimodal model's own numbers, of pictures
            owner = causal.get_submodule(".".join(path[:depth]))
            for name in list(owner._parameters):
                owner.register_parameter(name, None)
