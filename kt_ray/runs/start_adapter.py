"""The adapter that a run starts from (lora.adapter): its LoRA settings, whether it fits, what actors read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kt_ray.adapter.from_peft import AdapterReader, adapter_directory, digest_of
from kt_ray.adapter.peft_config import CONFIG, EXPERT_LEAVES
from kt_ray.checkpoint import ExpertLayout
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.manifest import Manifest
from kt_ray.checkpoint.names import layer_of
from kt_ray.config.checks import check
from kt_ray.config.fields import show
from kt_ray.config.lora_patterns import shortest_patterns
from kt_ray.config.mapping import from_dict
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.model.build import StageModel
from kt_ray.model.lora import resolve_targets
from kt_ray.model.stage_spec import StartAdapter
from kt_ray.placement.render import counted

DIGEST = "lora.adapter (digest of its weights)"  # field of a checkpoint's manifest
_DEFAULT = LoraConfig()
_SETTINGS = (
    "rank",
    "alpha",
    "rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "experts",
    "layers",
    "dora",
)


def open_start(
    config: Config, model_dir: str | None, manifest: Manifest | None = None
) -> tuple[Config, AdapterReader | None]:
    """The configuration with the LoRA settings of the adapter that the run starts from, and its reader.

    Reads names and shapes alone. A key with its default value counts as not set.

    Args:
        model_dir: of the model; None = not known (mode=plan).
        manifest: of the checkpoint that the run continues. Its state is what came of the adapter, so the
            files are read only if the reference of a preference loss is in them: else the reader is None,
            and they may be gone, but not be another adapter's.

    Raises:
        UserError: no adapter; another one than the checkpoint's; no plain LoRA; several scales; settings that
            are not the adapter's.
    """
    if config.lora.adapter is None:
        return config, None
    if manifest is not None and DIGEST in manifest.fields and not config.keeps_reference:
        _check_same(config.lora.adapter, str(manifest.fields[DIGEST]))
        return replace(config, lora=_as_before(config.lora, manifest)), None
    reader = AdapterReader(adapter_directory(config.lora.adapter, "lora.adapter"), model_dir)
    layers = None if model_dir is None else dims_from_dir(model_dir).moe_layers
    config = replace(config, lora=_of_adapter(config.lora, reader, layers))
    if config.lora.dora:
        check(config)  # what does not go together with it
    return config, reader


def _check_same(named: str, digest: str) -> None:
    """Refuse an adapter that the run did not start from; one that is gone is not missed.

    Args:
        digest: of the weights that it started from.
    """
    try:
        directory = adapter_directory(named, "lora.adapter")
    except UserError:
        return
    found = digest_of(directory)
    if found != digest:
        raise UserError(
            "the run to be resumed started from another adapter",
            where=f"lora.adapter={named}",
            observed=f"weights with digest {found[:12]}",
            required=f"{digest[:12]}, as in the checkpoint",
            remedy="name the adapter that it started from (it may be deleted: the checkpoint goes on without "
            "it), or leave out trainer.resume for a new run from this one",
        )


def _as_before(given: LoraConfig, manifest: Manifest) -> LoraConfig:
    unset = {key for key in _SETTINGS if getattr(given, key) == getattr(_DEFAULT, key)}
    before: dict[str, Any] = {
        key: dict(value) if key.endswith("_pattern") else value
        for key in unset
        if (value := manifest.fields.get(f"lora.{key}")) is not None
    }
    return replace(given, **{key: getattr(from_dict({"lora": before}).lora, key) for key in before})


def _of_adapter(given: LoraConfig, reader: AdapterReader, moe_layers: Sequence[int] | None) -> LoraConfig:
    if still := [pair.module for pair in reader.lora.pairs() if not pair.scale]:
        raise UserError(
            "the adapter holds modules of scale 0 (alpha / rank), which cannot be trained further",
            where=str(reader.lora.path / CONFIG),
            observed=some(still, 4),
            required="lora_alpha and alpha_pattern other than 0",
            remedy="set them to what the adapter was trained with, or leave out lora.adapter for a new one",
        )
    kinds = reader.expert_kinds
    scales = sorted({scale for _, scale in kinds})
    if scales and not math.isclose(scales[0], scales[-1], rel_tol=1e-6):
        seen = [f"{module}: rank {rank}, scale {scale:g}" for (rank, scale), module in kinds.items()]
        raise UserError(
            "the adapter's routed experts have several scales (alpha / rank)",
            where=str(reader.lora.path),
            observed=some(seen, 4),
            required="one scale; ranks may differ",
            remedy="merge it into the model first (python -m kt_ray.tools merge) and train a new adapter",
        )
    rslora = given.rslora or bool(reader.lora.config.get("use_rslora"))

    def setting(rank: int, scale: float) -> tuple[int, float]:
        alpha = scale * (rank**0.5 if rslora else rank)
        return rank, float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=1e-9) else alpha

    modules = {pair.module: setting(pair.rank, pair.scale) for pair in reader.lora.linear.values()}
    experts = [setting(reader.expert_rank, scales[0])] if scales else []
    usual = rank, alpha = Counter([*modules.values(), *experts]).most_common(1)[0][0]
    patterns: dict[str, Any] = {}
    for i, key in enumerate(("rank_pattern", "alpha_pattern")):
        own = shortest_patterns({name: value[i] for name, value in modules.items()}, usual[i], EXPERT_LEAVES)
        first = {"experts": experts[0][i]} if experts and experts[0][i] != usual[i] else {}
        patterns[key] = {**first, **own} or None
    wrong = [
        (f"lora.{key}={show(value)}", show(own))
        for key, own in patterns.items()
        if (value := getattr(given, key)) not in (None, own)
    ]
    if given.rank not in (_DEFAULT.rank, rank):
        wrong.append((f"lora.rank={given.rank}", f"rank {rank}"))
    if given.alpha != _DEFAULT.alpha and not math.isclose(given.alpha, alpha, rel_tol=1e-6):
        wrong.append((f"lora.alpha={given.alpha:g}", f"alpha {alpha:g}{' with rsLoRA' if rslora else ''}"))
    if given.dora and not reader.lora.dora:
        wrong.append(("lora.dora=true", "plain LoRA"))
    if reader.adapts_experts and not given.experts:
        wrong.append(("lora.experts=false", "routed experts"))
    layers = reader.expert_layers
    asked = set(given.layers or ())
    if moe_layers is not None:
        asked &= set(moe_layers)
    agreed = given.layers is not None and layers == sorted(asked)
    if given.layers is not None and layers and not agreed:
        wrong.append((f"lora.layers={show(given.layers)}", f"routed experts of layers {show(layers)}"))
    if wrong:
        raise UserError(
            "options disagree with the adapter that the run starts from",
            where=f"lora.adapter={given.adapter}",
            observed=", ".join(option for option, _ in wrong),
            required=", ".join(value for _, value in wrong),
            remedy=f"leave out {', '.join(option.partition('=')[0] for option, _ in wrong)}: the adapter's "
            "are taken",
        )
    targets = given.target_modules
    return replace(
        given,
        adapter=str(reader.lora.path),
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        **patterns,
        dora=reader.lora.dora,
        # DoRA is of other modules alone; true is the default, so nobody need have asked for it.
        experts=given.experts and not reader.lora.dora,
        layers=given.layers if agreed or not layers or layers == list(moe_layers or ()) else layers,
        target_modules=(sorted(reader.lora.linear) or "none") if targets == "auto" else targets,
    )


def require_fit(reader: AdapterReader, whole: StageModel, layout: ExpertLayout, dims: ModelDims) -> None:
    """Refuse an adapter of another model, by names and shapes alone.

    Args:
        whole: the model on the meta device. layout, dims: of its experts.

    Raises:
        UserError: it is one.
    """
    linear = {name: whole.causal.get_submodule(name) for name in whole.lora_names}
    shapes = {name: (int(m.in_features), int(m.out_features)) for name, m in linear.items()}
    width, inner = dims.expert_width, dims.expert_intermediate
    for layer in layout.moe_layers:
        for expert in range(layout.num_experts):
            for role, name in layout.names(layer, expert, whole.root).items():
                shapes[name] = (inner, width) if role == "down" else (width, inner)
    reader.require_fit(shapes, layout.num_experts)


def fitted(
    config: Config, reader: AdapterReader, whole: StageModel, layout: ExpertLayout, dims: ModelDims
) -> tuple[Config, str]:
    """The same configuration with short names of the target modules, and a line about the start.

    Args:
        whole: the model on the meta device. layout, dims: of its experts.

    Raises:
        UserError: an adapter of another model, or of modules that lora.target_modules leave out.
    """
    require_fit(reader, whole, layout, dims)
    lora, own = config.lora, set(reader.lora.linear)
    chosen = set(resolve_targets(lora.target_modules, whole.lora_names, lora.layers, experts=lora.experts))
    if left_out := sorted(own - chosen):
        raise UserError(
            "lora.target_modules leaves out modules of the adapter that the run starts from",
            where=f"lora.adapter={lora.adapter}",
            observed=f"lora.target_modules={show(lora.target_modules)}",
            required=f"also {some(left_out, 4)}",
            remedy="leave out lora.target_modules: the adapter's are taken",
        )
    if chosen == own and own:
        lora = replace(lora, target_modules=_short(own, whole.lora_names, lora))
    anew = [f"{len(chosen - own)} other modules"] if chosen - own else []
    anew += ["routed experts"] if lora.experts and not reader.adapts_experts else []
    parts = [f"{len(own)} modules"] if own else []
    if reader.adapts_experts:
        count = len(reader.expert_layers)
        whole_model = count == len(layout.moe_layers)
        parts.append(
            "all routed experts" if whole_model else "the routed experts of " + counted(count, "layer")
        )
    line = (
        f"LoRA starts from {lora.adapter} ({' and '.join(parts)}): rank {lora.rank}, alpha {lora.alpha:g}"
        + (" with rsLoRA" if lora.rslora else "")
        + (f", other ranks {show(lora.rank_pattern)}" if lora.rank_pattern else "")
        + (f"; new: {' and '.join(anew)}" if anew else "")
        + ("; it is DoRA: routed experts stay as they are" if lora.dora else "")
        + ("; model and adapter are the reference" if config.keeps_reference else "")
    )
    return replace(config, lora=lora), line


def _short(modules: set[str], names: list[str], lora: LoraConfig) -> list[str]:
    """The modules by the last parts of their names, where these mean them and no others in lora.layers."""
    last = {name: name.rpartition(".")[2] for name in names}
    reached = {name for name in names if lora.reaches(layer_of(name) or 0)}
    partly = {last[name] for name in reached - modules}
    return sorted({last[n] if n in reached and last[n] not in partly else n for n in modules})


def start_of(config: Config, reader: AdapterReader | None, manifest: Manifest | None) -> StartAdapter | None:
    """What actors are told of the adapter; reads all of its values.

    Raises:
        UserError: some are not finite.
    """
    if config.lora.adapter is None:
        return None
    if reader is None:
        assert manifest is not None
        return StartAdapter(config.lora.adapter, str(manifest.fields[DIGEST]), initial=False)
    reader.lora.check_finite()
    return StartAdapter(str(reader.lora.path), reader.digest, reference=config.keeps_reference)
