"""Where a checkpoint keeps its routed experts.

Two layouts cover the BF16 and F32 checkpoints that transformers writes and reads:

per_expert  ...layers.L.<moe>.experts.E.{gate_proj,up_proj,down_proj}.weight
            ...layers.L.<moe>.experts.E.{w1,w3,w2}.weight            (Mixtral, MiniMax, PhiMoE)
fused       ...layers.L.<moe>.experts.gate_up_proj [E, 2I, H] and down_proj [E, H, I]
            (rows of gate, then rows of up; or interleaved; or with the last two axes swapped)

Legend: E experts, I intermediate size of one expert, H hidden size.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.safetensors_file import TORCH_DTYPES, TensorInfo
from kt_ray.errors import UserError

PROJECTIONS = ("gate", "up", "down")
_LEAVES = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate": "w1", "up": "w3", "down": "w2"},
)
_LEAF_TO_PROJECTION = {leaf: projection for leaves in _LEAVES for projection, leaf in leaves.items()}
_PER_EXPERT = re.compile(
    r"^(?P<root>.*?)\blayers\.(?P<layer>\d+)\.(?P<moe>.*?\bexperts)\.(?P<expert>\d+)"
    r"\.(?P<leaf>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<suffix>[\w.]+)$"
)
_FUSED = re.compile(
    r"^(?P<root>.*?)\blayers\.(?P<layer>\d+)\.(?P<moe>.*?\bexperts)\.(?P<leaf>gate_up_proj|down_proj)(?P<suffix>[\w.]*)$"
)
# Which quantised format a key belongs to, by how its name ends.
_FORMATS = {
    "weight_scale_inv": "FP8 with 128x128 block scales",
    "weight_packed": "packed integers (compressed-tensors)",
    "qweight": "GPTQ/AWQ integers",
    "qzeros": "GPTQ/AWQ integers",
    "scales": "GPTQ/AWQ integers",
    "g_idx": "GPTQ integers",
    "_blocks": "MXFP4",
    "_scales": "MXFP4",
}
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CONVERT = "use a bfloat16 or float32 checkpoint of this model (from_pretrained(dtype=...), save_pretrained)"
_AGAIN = "download the checkpoint again, or check that config.json belongs to it"


@dataclass(frozen=True)
class ExpertLayout:
    """The routed experts of a checkpoint, all shapes and types already checked.

    Attributes:
        kind: "per_expert" or "fused".
        moe_layers: layers with routed experts, ascending.
        num_experts: E. hidden: H. intermediate: I of one expert.
        dtype: torch.bfloat16 or torch.float32.
        prefixes: layer -> "model.layers.3.mlp.experts".
        leaves: projection -> its name in the checkpoint ("gate" -> "gate_proj" or "w1").
        interleaved: fused only: rows of gate and up alternate instead of following each other.
        transposed: fused only: [E, H, 2I] and [E, I, H].
        keys: every tensor that belongs to a routed expert.
        skipped: expert tensors outside the model's layers (multi-token prediction), never loaded.
    """

    kind: str
    moe_layers: tuple[int, ...]
    num_experts: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    prefixes: dict[int, str]
    leaves: dict[str, str]
    interleaved: bool = False
    transposed: bool = False
    keys: frozenset[str] = field(default=frozenset(), repr=False)
    skipped: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def detect(
        cls, index: CheckpointIndex, *, interleaved: bool | None = None, transposed: bool | None = None
    ) -> ExpertLayout:
        """Find and check the experts.

        Args:
            index: the checkpoint.
            interleaved, transposed: layout of fused weights; None = as the family releases them
                (gpt_oss interleaves), and the orientation from the shapes.

        Raises:
            UserError: no experts, missing experts, mixed shapes or types, quantised weights.
        """
        return _detect(index, interleaved, transposed)

    def names(self, layer: int, expert: int) -> dict[str, str]:
        """Module names of one expert's projections, as released: {"gate": "...experts.5.gate_proj", ...}."""
        return {p: f"{self.prefixes[layer]}.{expert}.{self.leaves[p]}" for p in PROJECTIONS}

    def key(self, layer: int, expert: int, projection: str) -> str:
        """The tensor that holds one expert's projection (fused: the tensor of all experts)."""
        if self.kind == "per_expert":
            return f"{self.prefixes[layer]}.{expert}.{self.leaves[projection]}.weight"
        leaf = "down_proj" if projection == "down" else "gate_up_proj"
        plain = f"{self.prefixes[layer]}.{leaf}"
        return plain if plain in self.keys else f"{plain}.weight"

    def check(
        self,
        *,
        num_experts: int | None = None,
        hidden: int | None = None,
        intermediate: int | None = None,
        moe_layers: Iterable[int] | None = None,
        where: str = "config.json",
    ) -> None:
        """Compare with what the configuration promises. Raises UserError on the first difference."""
        expected: list[tuple[str, Any, Any]] = [
            ("number of routed experts", self.num_experts, num_experts),
            ("hidden size of the experts", self.hidden, hidden),
            ("intermediate size of the experts", self.intermediate, intermediate),
        ]
        for what, observed, required in expected:
            if required is not None and observed != required:
                raise UserError(
                    f"checkpoint and configuration disagree about the {what}",
                    where=where,
                    observed=f"{observed} in the weights",
                    required=required,
                    remedy=_AGAIN,
                )
        if moe_layers is not None:
            promised, found = set(moe_layers), set(self.moe_layers)
            if promised != found:
                raise UserError(
                    "checkpoint and configuration disagree about the layers that have routed experts",
                    where=where,
                    observed=f"without: {sorted(promised - found)}; unexpected: {sorted(found - promised)}",
                    required=f"{len(promised)} layers",
                    remedy=_AGAIN,
                )


def _detect(index: CheckpointIndex, interleaved: bool | None, transposed: bool | None) -> ExpertLayout:
    layers = index.text_config.get("num_hidden_layers")
    kept: dict[str, re.Match[str]] = {}
    skipped: list[str] = []
    foreign: dict[str, str] = {}  # key -> what its name says it is
    for name in index.tensors:
        match = _PER_EXPERT.match(name) or _FUSED.match(name)
        if match is None:
            continue
        outside = isinstance(layers, int) and int(match["layer"]) >= layers
        if outside or re.search(r"(^|\.)mtp\b", match["root"]):
            skipped.append(name)
        elif match["suffix"].lstrip(".") in ("weight", "") and not match["suffix"].startswith("_"):
            kept[name] = match
        else:
            foreign[name] = match["suffix"]
    if foreign:
        _refuse_foreign(index, foreign)
    if not kept:
        raise UserError(
            "checkpoint has no routed experts",
            where=str(index.path),
            observed=f"model_type {index.config.get('model_type')!r}, {len(index.tensors)} tensors",
            required="...experts.N.{gate,up,down}_proj.weight, ...experts.N.{w1,w2,w3}.weight "
            "or ...experts.{gate_up,down}_proj",
            remedy="choose a Mixture-of-Experts checkpoint (model.path)",
        )
    _check_dtypes(index, kept)
    prefixes = _prefixes(index, kept)
    fused = [name for name, match in kept.items() if "expert" not in match.groupdict()]
    if fused and len(fused) < len(kept):
        raise UserError(
            "checkpoint mixes fused and per-expert weights",
            where=str(index.path),
            observed=f"{some(sorted(fused), 2)} beside {some(sorted(set(kept) - set(fused)), 2)}",
            required="one layout",
            remedy=_AGAIN,
        )
    build = _fused if fused else _per_expert
    return build(index, kept, prefixes, tuple(sorted(skipped)), interleaved, transposed)


def _refuse_foreign(index: CheckpointIndex, foreign: dict[str, str]) -> None:
    biases = sorted(name for name, suffix in foreign.items() if "bias" in suffix)
    quantised = sorted(set(foreign) - set(biases))
    if quantised:
        suffix = foreign[quantised[0]]
        named = next((text for end, text in _FORMATS.items() if suffix.endswith(end)), f"unknown ({suffix})")
        raise UserError(
            "experts are in a quantised format that is not read from checkpoints yet",
            where=f"{index.path}, {some(quantised, 2)}",
            observed=named,
            required="BF16 or F32",
            remedy=_CONVERT,
        )
    raise UserError(
        "experts have biases, which are not read from checkpoints yet",
        where=f"{index.path}, {some(biases, 2)}",
        observed=f"model_type {index.config.get('model_type')!r}",
        required="experts of gate, up and down matrices only",
        remedy="choose another model",
    )


def _check_dtypes(index: CheckpointIndex, kept: dict[str, re.Match[str]]) -> None:
    by_dtype: dict[str, list[str]] = defaultdict(list)
    for name in kept:
        by_dtype[index.tensors[name].dtype].append(name)
    unsupported = sorted(set(by_dtype) - {"BF16", "F32"})
    if unsupported:
        names = sorted(by_dtype[unsupported[0]])
        kind = "FP8" if unsupported[0].startswith("F8") else unsupported[0]
        raise UserError(
            "experts are in a format that is not read from checkpoints",
            where=f"{index.path}, {some(names, 2)}",
            observed=f"{kind} ({unsupported[0]})" if kind != unsupported[0] else kind,
            required="BF16 or F32",
            remedy=_CONVERT,
        )
    if len(by_dtype) > 1:
        few = min(by_dtype.values(), key=len)
        raise UserError(
            "experts have mixed types",
            where=f"{index.path}, {some(sorted(few), 2)}",
            observed=", ".join(f"{len(names)} of {dtype}" for dtype, names in sorted(by_dtype.items())),
            required="one type for all experts",
            remedy=_CONVERT,
        )


def _prefixes(index: CheckpointIndex, kept: dict[str, re.Match[str]]) -> dict[int, str]:
    found: dict[int, set[str]] = defaultdict(set)
    for match in kept.values():
        found[int(match["layer"])].add(f"{match['root']}layers.{match['layer']}.{match['moe']}")
    for layer, prefixes in sorted(found.items()):
        if len(prefixes) > 1:
            raise UserError(
                "a layer has more than one set of routed experts",
                where=f"{index.path}, layer {layer}",
                observed=", ".join(sorted(prefixes)),
                required="one",
                remedy="choose another model",
            )
    return {layer: next(iter(found[layer])) for layer in sorted(found)}


def _config_experts(index: CheckpointIndex) -> int | None:
    for key in _EXPERT_COUNTS:
        value = index.text_config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _mixed_shapes(index: CheckpointIndex, info: TensorInfo, required: tuple[int, ...]) -> UserError:
    return UserError(
        "experts have mixed shapes",
        where=f"{info.file}, tensor {info.name}",
        observed=list(info.shape),
        required=f"{list(required)} as in the first expert of {index.path.name}",
        remedy=_AGAIN,
    )


def _per_expert(
    index: CheckpointIndex,
    kept: dict[str, re.Match[str]],
    prefixes: dict[int, str],
    skipped: tuple[str, ...],
    interleaved: bool | None,
    transposed: bool | None,
) -> ExpertLayout:
    used = {match["leaf"] for match in kept.values()}
    leaves = next((ls for ls in _LEAVES if used <= set(ls.values())), None)
    if leaves is None:
        raise UserError(
            "experts have mixed names",
            where=str(index.path),
            observed=", ".join(sorted(used)),
            required="gate_proj, up_proj, down_proj or w1, w2, w3",
            remedy=_AGAIN,
        )
    count = _config_experts(index) or 1 + max(int(match["expert"]) for match in kept.values())
    expected = {
        f"{prefix}.{expert}.{leaf}.weight": projection
        for prefix in prefixes.values()
        for expert in range(count)
        for projection, leaf in leaves.items()
    }
    missing, extra = sorted(set(expected) - set(kept)), sorted(set(kept) - set(expected))
    if missing or extra:
        raise UserError(
            "checkpoint lacks experts" if missing else "checkpoint has more experts than its configuration",
            where=str(index.path),
            observed=f"{'missing' if missing else 'unexpected'}: {some(missing or extra)}",
            required=f"{count} experts in each of {len(prefixes)} layers",
            remedy=_AGAIN,
        )
    first = index.tensors[next(name for name, p in expected.items() if p == "gate")]
    if len(first.shape) != 2:
        raise _mixed_shapes(index, first, (0, 0))
    intermediate, hidden = first.shape
    for name, projection in expected.items():
        shape = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
        if index.tensors[name].shape != shape:
            raise _mixed_shapes(index, index.tensors[name], shape)
    _check_hidden(index, hidden)
    return ExpertLayout(
        kind="per_expert",
        moe_layers=tuple(prefixes),
        num_experts=count,
        hidden=hidden,
        intermediate=intermediate,
        dtype=TORCH_DTYPES[first.dtype],
        prefixes=prefixes,
        leaves=dict(leaves),
        keys=frozenset(kept),
        skipped=skipped,
    )


def _fused(
    index: CheckpointIndex,
    kept: dict[str, re.Match[str]],
    prefixes: dict[int, str],
    skipped: tuple[str, ...],
    interleaved: bool | None,
    transposed: bool | None,
) -> ExpertLayout:
    by_layer: dict[int, dict[str, TensorInfo]] = {layer: {} for layer in prefixes}
    for name, match in kept.items():
        by_layer[int(match["layer"])][match["leaf"]] = index.tensors[name]
    missing = sorted(
        f"{prefixes[layer]}.{leaf}"
        for layer, held in by_layer.items()
        for leaf in ("gate_up_proj", "down_proj")
        if leaf not in held
    )
    if missing:
        raise UserError(
            "checkpoint lacks experts",
            where=str(index.path),
            observed=f"missing: {some(missing)}",
            required="gate_up_proj and down_proj in every layer with experts",
            remedy=_AGAIN,
        )
    first = next(iter(by_layer.values()))
    up, down = first["gate_up_proj"], first["down_proj"]
    if len(up.shape) != 3 or len(down.shape) != 3:
        raise _mixed_shapes(index, up if len(up.shape) != 3 else down, (0, 0, 0))
    count = _config_experts(index) or up.shape[0]
    if transposed is None:
        transposed = _is_transposed(index, up.shape, down.shape)
    hidden, intermediate = (down.shape[2], down.shape[1]) if transposed else (down.shape[1], down.shape[2])
    shapes = {
        "gate_up_proj": (count, hidden, 2 * intermediate)
        if transposed
        else (count, 2 * intermediate, hidden),
        "down_proj": (count, intermediate, hidden) if transposed else (count, hidden, intermediate),
    }
    for held in by_layer.values():
        for leaf, info in held.items():
            if info.shape != shapes[leaf]:
                raise _mixed_shapes(index, info, shapes[leaf])
    _check_hidden(index, hidden)
    return ExpertLayout(
        kind="fused",
        moe_layers=tuple(prefixes),
        num_experts=count,
        hidden=hidden,
        intermediate=intermediate,
        dtype=TORCH_DTYPES[up.dtype],
        prefixes=prefixes,
        leaves=dict(_LEAVES[0]),
        interleaved=index.text_config.get("model_type") == "gpt_oss" if interleaved is None else interleaved,
        transposed=transposed,
        keys=frozenset(kept),
        skipped=skipped,
    )


def _is_transposed(index: CheckpointIndex, up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Orientation from the shapes: [E,2I,H] with [E,H,I], or [E,H,2I] with [E,I,H]."""
    plain = up[1] == 2 * down[2] and up[2] == down[1]
    swapped = up[2] == 2 * down[1] and up[1] == down[2]
    if not plain and not swapped:  # (both cannot hold: it would take H = 2H)
        raise UserError(
            "fused expert weights have shapes that do not fit together",
            where=str(index.path),
            observed=f"gate_up_proj {list(up)}, down_proj {list(down)}",
            required="[E, 2I, H] with [E, H, I], or [E, H, 2I] with [E, I, H]",
            remedy=_AGAIN,
        )
    return swapped


def _check_hidden(index: CheckpointIndex, hidden: int) -> None:
    required = index.text_config.get("hidden_size")
    if isinstance(required, int) and required != hidden:
        raise UserError(
            "checkpoint and configuration disagree about the hidden size of the experts",
            where=str(index.path / "config.json"),
            observed=f"{hidden} in the weights",
            required=required,
            remedy=_AGAIN,
        )
