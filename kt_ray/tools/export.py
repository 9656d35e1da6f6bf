"""`export ADAPTER OUT --form FORM`: the same adapter in the form that another program reads.

    peft-fused       experts as PEFT stores adapters of fused parameters; gate and up together at rank 2r
    peft-per-expert  one pair per expert and projection, as kt_ray writes it where PEFT merges them
    sglang-kt        OUT/sglang: everything but the routed experts, for SGLang's --lora-paths;
                     OUT/kt: the routed experts, for KTransformers' CPU side. Keys without PEFT's
                     "base_model.model.", as kvcache-ai/sglang's convert_lora.py writes them. Untested
                     against the servers.

Values are streamed: one layer's experts are held at a time.
Legend: E experts, r rank, H hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kt_ray.adapter.adapter_file import Lora, Pair, is_turned
from kt_ray.adapter.fused import Factors, FusedLayer, fuse_down, fuse_gate_up, turn, with_zero_experts
from kt_ray.adapter.peft_config import (
    CONFIG,
    PREFIX,
    TEMPLATE,
    WEIGHTS,
    AdapterInfo,
    adapter_config,
    expert_modules,
    in_full,
    plain_number,
    stored_name,
)
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.names import (
    LEAVES,
    PROJECTIONS,
    family,
    is_interleaved,
    is_mtp,
    layer_of,
    one_expert,
    zero_experts,
)
from kt_ray.checkpoint.safetensors_file import (
    NAMES,
    build_header,
    damaged,
    read_tensor,
    write_safetensors,
    writing,
)
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.parse import read_json


@dataclass(frozen=True)
class Item:
    """One pair of the result: module, rank, scale, shapes, and how it is made."""

    module: str
    rank: int
    scale: float
    a: tuple[int, int]
    b: tuple[int, int]
    make: Callable[[], Factors]
    pattern: str = ""  # what PEFT's patterns match, where that is not the module


def export(
    adapter: str | Path,
    out: str | Path,
    form: str,
    *,
    dtype: torch.dtype = torch.float32,
    base: str | Path | None = None,
) -> dict[str, int]:
    """Write the adapter in another form.

    Args:
        form: "peft-fused", "peft-per-expert" or "sglang-kt".
        dtype: float32 or bfloat16.
        base: the base model's directory; None = the one that the adapter names.

    Returns:
        Number of pairs in each written directory.

    Raises:
        UserError: an unreadable adapter, experts that a form cannot hold, a base that cannot be found.
    """
    lora, target = Lora.open(adapter), Path(out)
    if target.exists() and not target.is_dir():
        raise UserError("output is no directory", where=str(out), remedy="choose another directory")
    if present := sorted(p.name for p in target.iterdir()) if target.exists() else []:
        raise UserError(
            "output directory is not empty",
            where=str(out),
            observed=some(present, 3),  # hidden files, too: of an export that was killed, or is at work
            remedy="choose another directory, or remove this one",
        )
    source = _base(lora, base)
    config = _config(source)
    lora = Lora.open(adapter, family(config), len(zero_experts(config)))
    count = (0, 0) if source is None or not (lora.experts or lora.fused) else _check_experts(lora, source)
    if lora.dora:
        raise damaged(
            "a DoRA adapter has no other form",
            lora.path / CONFIG,
            "use_dora: true",
            "plain LoRA",
            "load it with PEFT, or merge it: python -m kt_ray.tools merge",
        )
    lora.check_finite()
    linear = [_item(pair) for pair in lora.linear.values()]

    def named(items: list[Item]) -> list[Item]:
        return [replace(item, module=stored_name(item.module, family(config))) for item in items]

    if form == "peft-fused":
        experts = _fused_items(lora, family(config), count)
        _write(target, lora, named([*linear, *experts]), dtype, PREFIX, _fused_config(lora, linear, experts))
        return {str(target): len(linear) + len(experts)}
    experts = _single_items(lora, source)
    if form == "peft-per-expert":
        items = [*linear, *experts]
        _write(target, lora, named(items), dtype, PREFIX, _single_config(lora, linear, experts, config))
        return {str(target): len(items)}
    written = {}
    for name, part in (("sglang", linear), ("kt", experts)):
        if part:
            _write(target / name, lora, named(part), dtype, "", _server_config(lora, part))
            written[str(target / name)] = len(part)
    return written


def merged_by_peft(adapter: str | Path, base: str | Path | None = None) -> bool:
    """Whether PEFT makes fused parameters of an adapter's single experts, if it has any."""
    lora = Lora.open(adapter)
    source = _base(lora, base) if lora.experts else None
    return source is None or lora.merged_by_peft(family(_config(source)))


def _item(pair: Pair, module: str = "", pattern: str = "") -> Item:
    """A pair as it is; `module`: under another name."""
    make: Callable[[], Factors] = lambda: (read_tensor(pair.a), read_tensor(pair.b))  # noqa: E731
    (a, a2), (b, b2) = pair.a.shape, pair.b.shape
    return Item(module or pair.module, pair.rank, pair.scale, (a, a2), (b, b2), make, pattern)


def _base(lora: Lora, base: str | Path | None) -> Path | None:
    """The base model's directory: it tells the order of gate and up rows and released names of modules."""
    path = lora.base_directory() if base is None else Path(base)
    if path is None:
        if not (lora.experts or lora.fused):
            return None
        observed, required = f"base_model_name_or_path {lora.base!r}", "a directory, or in the hub's cache"
        what = "the adapter's base model is not here"
        raise damaged(what, lora.path / CONFIG, observed, required, "name it: --base DIR")
    return path


def _config(base: Path | None) -> dict[str, Any]:
    remedy = "name the base model's directory: --base DIR"
    return {} if base is None else read_json(base / "config.json", "the base model's config.json", remedy)


def _check_experts(lora: Lora, base: Path) -> tuple[int, int]:
    """E of the base, by its config.json, and zero experts.

    Raises:
        UserError: the adapter has routed experts that the base does not have.
    """
    prefixes = {prefix for prefix, _, _ in lora.experts} | {prefix for prefix, _ in lora.fused}
    dims = dims_from_dir(base)
    H, I, E = dims.expert_width, dims.expert_intermediate, dims.num_experts
    rows = {"gate": I, "up": I, "gate_up": 2 * I, "down": H}
    moe = {*dims.moe_layers}
    faults = [f"{prefix}, no MoE layer" for prefix in prefixes if layer_of(prefix) not in moe]
    parts = [(expert + 1, role, pair) for (_, expert, role), pair in lora.experts.items()]
    parts += [(pair.experts, role, pair) for (_, role), pair in lora.fused.items()]
    for experts, role, pair in parts:
        shape = (pair.out_features, pair.in_features)
        if shape != (rows[role], I if role == "down" else H):
            faults.append(f"{pair.module} {list(shape)}")
        elif experts > E or (pair.experts and experts < E):
            faults.append(f"{pair.module} of {experts} experts")
    if faults:
        raise damaged(
            "adapter's routed experts do not fit the base",
            f"{lora.path}, {base / 'config.json'}",
            some(sorted(faults), 3),
            f"modules of the {len(moe)} layers with experts, for {E} experts with gate and up "
            f"[{I}, {H}], down [{H}, {I}]",
            "name the model that the adapter was trained on: --base DIR",
        )
    return E, dims.zero_experts


# -- experts together


def _fused_items(lora: Lora, model_type: str, count: tuple[int, int]) -> list[Item]:
    items: list[Item] = []
    for (prefix, role), pair in lora.fused.items():
        module = f"{prefix}.base_layer" if role != "down" and (prefix, "down") in lora.fused else prefix
        items.append(_item(pair, module, f"{prefix}.{role}_proj"))
    for prefix in dict.fromkeys(p for p, _, _ in lora.experts):
        items += _fuse(lora, prefix, model_type, *count)
    return items


def _fuse(lora: Lora, prefix: str, model_type: str, count: int, zero: int) -> list[Item]:
    gated = any(p == prefix and role == "gate" for p, _, role in lora.experts)
    keys = [(prefix, e, p) for e in range(count) for p in (PROJECTIONS if gated else PROJECTIONS[1:])]
    missing = [f"{prefix}.{e}.{LEAVES[p]}" for _, e, p in keys if (prefix, e, p) not in lora.experts]
    settings = {(lora.experts[k].rank, lora.experts[k].scale) for k in keys if k in lora.experts}
    if missing or len(settings) > 1:
        raise damaged(
            "adapter's experts cannot be fused",
            f"{lora.path}, {prefix}",
            f"missing: {some(missing)}" if missing else f"ranks and scales {sorted(settings)}",
            "every projection of every expert, of one rank and scale",
            "export it as peft-per-expert",
        )
    rank, scale = settings.pop()
    up = lora.experts[prefix, 0, "up"]
    H, I, wide = up.in_features, up.out_features, 2 if gated else 1

    def pairs(projection: str) -> list[Factors]:
        own = [lora.experts[prefix, e, projection].factors() for e in range(count)]
        return own if projection == "down" else with_zero_experts(own, zero)

    def inner() -> Factors:
        if not gated:
            return fuse_down(pairs("up"))
        return fuse_gate_up(pairs("gate"), pairs("up"), interleaved=is_interleaved(model_type))

    def item(module: str, role: str, r: int, n_in: int, n_out: int, make: Callable[[], Factors]) -> Item:
        all_ = count if role == "down" else count + zero
        if is_turned(model_type):
            n_in, n_out, plain = n_out, n_in, make
            make = lambda: turn(*plain(), all_)  # noqa: E731
        return Item(module, r, scale, (all_ * r, n_in), (n_out, r * all_), make, f"{prefix}.{role}_proj")

    return [
        item(f"{prefix}.base_layer", "gate_up" if gated else "up", wide * rank, H, wide * I, inner),
        item(prefix, "down", rank, I, H, lambda: fuse_down(pairs("down"))),
    ]


def _fused_config(lora: Lora, linear: list[Item], experts: list[Item]) -> dict[str, Any]:
    default = _common(linear or [i for i in experts if i.pattern.endswith("down_proj")] or experts)
    config = _plain_config(lora, linear, default)
    if experts:
        roles = sorted({i.pattern.rpartition(".")[2] for i in experts})
        ends = in_full([f"experts.{r}" for r in roles], _info(lora, linear, default))
        config["target_parameters"] = [*(config["target_parameters"] or []), *ends]
        for role in roles:
            own = [i for i in experts if i.pattern.endswith(f".{role}")]
            usual = _common(own)
            if usual != default:
                _add_pattern(config, rf".*\.experts\.{role}", usual)
            for item in own:
                if (item.rank, item.scale) != usual:  # before the general pattern: the first match counts
                    for key, value in (
                        ("rank_pattern", item.rank),
                        ("alpha_pattern", item.scale * item.rank),
                    ):
                        config[key] = {item.pattern: value, **config[key]}
    return config


# -- experts one by one


def _single_items(lora: Lora, base: Path | None) -> list[Item]:
    items = [_item(pair) for pair in lora.experts.values()]
    if not lora.fused:
        return items
    assert base is not None, "an adapter with experts has a base"
    source = CheckpointIndex.open(base)  # tells the released names
    released = {
        (parts.layer, parts.role): (parts.prefix, parts.leaf)
        for name in source.names
        if (parts := one_expert(name)) is not None and not is_mtp(name, source.layer_count)
    }
    interleaved = is_interleaved(family(source.config))
    prefixes = list(dict.fromkeys(prefix for prefix, _ in lora.fused))
    layers = [FusedLayer.of(lora, prefix, interleaved) for prefix in prefixes]
    rank = max(layer.rank for layer in layers)
    for layer in layers:
        for expert in range(layer.experts):
            for projection in layer.projections:
                usual = (layer.prefix, LEAVES[projection])
                prefix, leaf = released.get((layer_of(layer.prefix), projection), usual)
                prefix = _below(layer.prefix, prefix)
                rows, columns = layer.shape(projection)
                items.append(
                    Item(
                        f"{prefix}.{expert}.{leaf}",
                        rank,
                        layer.scale,
                        (rank, columns),
                        (rows, rank),
                        lambda layer=layer, e=expert, p=projection: layer.factors(e, p, rank),  # type: ignore[misc]
                    )
                )
    return items


def _below(own: str, released: str) -> str:
    """Released names under the adapter's own root: "layers.3.ffn.experts" -> "model.layers.3.ffn.experts"."""
    return own[: own.index("layers.")] + released[released.index("layers.") :]


def _single_config(
    lora: Lora, linear: list[Item], experts: list[Item], base: Mapping[str, Any]
) -> dict[str, Any]:
    if not experts:
        return _plain_config(lora, linear, _common(linear))
    what, required = "adapter's experts have several ranks or scales", "one, as PEFT merges per-expert keys"
    rank, scale = _one(lora, experts, what, required, "train with one rank for all experts")
    names = [f"{i.module}.lora_{half}.weight" for i in (*linear, *experts) for half in "AB"]
    info = _info(lora, linear, (rank, scale), family(base), str(base.get("model_type")))
    return adapter_config(names, info)


def _server_config(lora: Lora, items: list[Item]) -> dict[str, Any]:
    what, required = (
        "adapter has several ranks or scales, which servers do not read",
        "one rank and one alpha",
    )
    only = _one(lora, items, what, required, "merge the adapter instead: python -m kt_ray.tools merge")
    config = _plain_config(lora, [], only)
    return config | {"target_modules": sorted({i.module.rpartition(".")[2] for i in items})}


# -- configuration and file


def _common(items: Iterable[Item]) -> tuple[int, float]:
    """Rank and scale that most of them have."""
    return Counter((i.rank, i.scale) for i in items).most_common(1)[0][0]


def _one(lora: Lora, items: Iterable[Item], what: str, required: str, remedy: str) -> tuple[int, float]:
    """Rank and scale that all of them have."""
    settings = {(i.rank, i.scale) for i in items}
    if len(settings) > 1:
        raise damaged(what, lora.path, sorted(settings), required, remedy)
    return settings.pop()


def _add_pattern(config: dict[str, Any], name: str, setting: tuple[int, float]) -> None:
    rank, scale = setting
    config["rank_pattern"][name], config["alpha_pattern"][name] = rank, plain_number(rank * scale)


def _info(
    lora: Lora, linear: list[Item], default: tuple[int, float], model_type: str = "", whole_type: str = ""
) -> AdapterInfo:
    others = {i.module: (i.rank, i.scale * i.rank) for i in linear if (i.rank, i.scale) != default}
    rank, scale = default
    more: dict[str, Any] = {"others": others, "expert_modules": expert_modules(lora.config)}
    more |= {"revision": lora.revision}
    return AdapterInfo(lora.base, model_type, rank, rank * scale, whole_type=whole_type, **more)


def _plain_config(lora: Lora, linear: list[Item], default: tuple[int, float]) -> dict[str, Any]:
    names = [f"{i.module}.lora_{half}.weight" for i in linear for half in "AB"]
    return adapter_config(names, _info(lora, linear, default))


def _write(
    target: Path, lora: Lora, items: list[Item], dtype: torch.dtype, prefix: str, config: dict[str, Any]
) -> None:
    """One safetensors file, streamed, its configuration, and the chat template of the adapter."""
    entries = [
        (f"{prefix}{i.module}.lora_{half}.weight", NAMES[dtype], shape)
        for i in items
        for half, shape in (("A", i.a), ("B", i.b))
    ]
    partial = target / f".{WEIGHTS}.partial"
    with writing("adapter", target, build_header(entries)[2], "free space, or choose another directory"):
        try:
            target.mkdir(parents=True, exist_ok=True)
            write_safetensors(partial, entries, (value.to(dtype) for item in items for value in item.make()))
            write_atomic(target / CONFIG, json.dumps(config, indent=2) + "\n")
            if (template := lora.path / TEMPLATE).is_file():
                shutil.copyfile(template, target / TEMPLATE)
            os.replace(partial, target / WEIGHTS)
        except BaseException:  # Ctrl-C, too: the file may have gigabytes
            partial.unlink(missing_ok=True)
            raise
