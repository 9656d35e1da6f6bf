"""Where a checkpoint keeps its routed experts, and as what: found, and checked for training.

names.py lists the layouts: experts one by one, or fused; each plain (BF16, F32) or quantised (stored.py),
gated or not (up and down alone), with or without biases. A *part* is what the checkpoint stores as one:
gate, up and down, or gate_up and down.

Legend: E experts, I intermediate size of one expert, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kt_ray.checkpoint.check_experts import (
    check_bias,
    check_formats,
    check_fused,
    check_part,
    check_size,
    expert_bytes_of,
    no_experts,
    part_shapes,
)
from kt_ray.checkpoint.expert_groups import ExpertGroup, find_groups
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.names import FUSED, LEAVES, ONE_BY_ONE, is_mtp
from kt_ray.checkpoint.safetensors_file import damaged

# What stands before the layers: "model.", the name of a multimodal checkpoint's language model, or nothing
# (DeepSeek-V4, whose keys begin with "layers.").
_ROOT = re.compile(r"^.*?\b(?=layers\.\d+\.)")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class ExpertLayout:
    """The routed experts of a checkpoint, all shapes and types already checked."""

    kind: str  # "per_expert" or "fused"
    moe_layers: tuple[int, ...]  # layers with routed experts, ascending
    num_experts: int  # E
    hidden: int  # H
    intermediate: int  # I of one expert
    prefixes: dict[int, str]  # layer -> "model.layers.3.mlp.experts"
    # projection -> its name as released ("gate" -> "gate_proj" or "w1"); no gate where experts have none
    leaves: dict[str, str]
    # layer -> part -> the parameters that hold it: one per expert, or one of all
    sources: dict[int, dict[str, tuple[str, ...]]] = field(repr=False)
    biases: dict[int, dict[str, tuple[str, ...]]] = field(repr=False)  # likewise; empty without biases
    # layer -> part -> "bf16", "f32" or one of `kt_ray.native.matrix.SCALED_FORMATS`
    formats: dict[int, dict[str, str]] = field(repr=False)
    # layer -> bytes of one expert, scales and biases included
    expert_bytes: dict[int, int] = field(repr=False)
    interleaved: bool = False  # fused only: rows of gate and up alternate instead of following each other
    transposed: bool = False  # fused only: [E, H, 2I] and [E, I, H]
    # every parameter and every tensor that belongs to a routed expert
    keys: frozenset[str] = field(default=frozenset(), repr=False)
    # those outside the model's layers (multi-token prediction, a speech model), or of zero experts: never
    # loaded
    skipped: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def detect(cls, index: CheckpointIndex) -> ExpertLayout:
        """Find and check the experts.

        Raises:
            UserError: no experts, missing experts, mixed shapes or types, formats that are not read.
        """
        groups, skipped = _trained_groups(index)
        fused, parts = _one_layout(index, groups)
        count = _count(index, groups[0])
        _check_complete(index, groups, parts, count, fused)
        experts: list[int | None] = [None] if fused else list(range(count))
        sources = {g.layer: {p: tuple(g.names[p, e] for e in experts) for p in parts} for g in groups}
        biased = any(group.biases for group in groups)
        biases = {
            g.layer: {p: tuple(g.biases[p, e] for e in experts) for p in parts} if biased else {}
            for g in groups
        }
        hidden, intermediate, transposed = groups[0].sizes
        formats, expert_bytes = {}, {}
        shapes = part_shapes(hidden, intermediate, transposed, count if fused else None)
        for layer, stored in sources.items():
            formats[layer] = {part: check_part(index, names, shapes[part]) for part, names in stored.items()}
            if fused:
                check_fused(index, stored, intermediate, transposed)
            for part, names in biases[layer].items():
                rows = {"down": hidden, "gate_up": 2 * intermediate}.get(part, intermediate)
                check_bias(index, names, (count, rows) if fused else (rows,))
            expert_bytes[layer] = expert_bytes_of(index, (*stored.values(), *biases[layer].values()), count)
        check_formats(index, sources, formats)
        what, required = "hidden size of the experts", index.text_config.get("hidden_size")
        check_size(what, index.path, hidden, required)
        parameters = [n for group in groups for n in (*group.names.values(), *group.biases.values())]
        return cls(
            kind="fused" if fused else "per_expert",
            moe_layers=tuple(sources),
            num_experts=count,
            hidden=hidden,
            intermediate=intermediate,
            prefixes={group.layer: group.prefix for group in groups},
            leaves={p: LEAVES[p] for p in groups[0].projections} if fused else parts,
            sources=sources,
            biases=biases,
            formats=formats,
            expert_bytes=expert_bytes,
            interleaved=fused and groups[0].interleaved,
            transposed=transposed,
            keys=frozenset(_with_stored(index, parameters)),
            skipped=tuple(sorted(set(_with_stored(index, skipped)))),
        )

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return "gate" in self.leaves

    @property
    def biased(self) -> bool:
        """Whether experts have biases."""
        return any(self.biases.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in the file."""
        return self.num_experts * sum(self.expert_bytes.values())

    @property
    def distinct_formats(self) -> tuple[str, ...]:
        """Formats that occur, sorted."""
        return tuple(sorted({f for parts in self.formats.values() for f in parts.values()}))

    def names(self, layer: int, expert: int, root: str = "model") -> dict[str, str]:
        """Module names of one expert's projections, as released: {"gate": "...experts.5.gate_proj", ...}.

        Args:
            layer, expert: which.
            root: module name of the language model where it is trained, in place of the checkpoint's own:
                "model", or "model.language_model" inside a multimodal model. PEFT leaves out other names.
        """
        prefix = _ROOT.sub(f"{root}.", self.prefixes[layer])
        return {p: f"{prefix}.{expert}.{leaf}" for p, leaf in self.leaves.items()}

    def check(
        self,
        *,
        moe_layers: Iterable[int],
        num_experts: int | None = None,
        hidden: int | None = None,
        intermediate: int | None = None,
        where: str = "config.json",
    ) -> None:
        """Compare with what the configuration promises. Raises UserError on the first difference."""
        check_size("number of routed experts", where, self.num_experts, num_experts)
        check_size("hidden size of the experts", where, self.hidden, hidden)
        check_size("intermediate size of the experts", where, self.intermediate, intermediate)
        promised, own = set(moe_layers), set(self.moe_layers)
        if promised != own:
            raise damaged(
                "checkpoint and configuration disagree about the layers that have routed experts",
                where,
                f"without: {sorted(promised - own)}; unexpected: {sorted(own - promised)}",
                f"{len(promised)} layers",
            )


def _with_stored(index: CheckpointIndex, names: Iterable[str]) -> Iterator[str]:
    """Parameters, and the tensors that hold those of them that are quantised."""
    for name in names:
        yield name
        if name in index.matrices:
            yield from index.matrices[name].keys


def _trained_groups(index: CheckpointIndex) -> tuple[list[ExpertGroup], list[str]]:
    """The groups of the model's own layers, ascending, and the names of others' experts."""
    groups, unknown, unused = find_groups(index)
    beside = [group for group in groups.values() if group.mtp]
    skipped = [n for group in beside for n in (*group.names.values(), *group.biases.values())] + [*unused]
    skipped += [name for name in unknown if is_mtp(name, index.layer_count)]
    unreadable = sorted(set(unknown) - set(skipped))
    if unreadable:
        raise damaged(
            "routed experts hold tensors of an unknown layout or format",
            index.path,
            some(unreadable),
            "...experts.N.{gate,up,down}_proj, ...experts.N.{w1,w2,w3} or ...experts.{gate_up,down}_proj",
        )
    trained = [group for group in groups.values() if not group.mtp and group.layer >= 0]
    if not trained:
        raise no_experts(index)
    for one, other in pairwise(trained):
        if one.layer == other.layer:
            raise damaged(
                "a layer has more than one set of routed experts",
                f"{index.path}, layer {one.layer}",
                f"{one.prefix}, {other.prefix}",
                "one",
                "choose another model",
            )
    return trained, skipped


def _one_layout(index: CheckpointIndex, groups: Sequence[ExpertGroup]) -> tuple[bool, dict[str, str]]:
    """Whether experts are fused, and their leaf name by part: the same in every layer."""
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for group in groups:
        for names in (group.names, group.biases):
            for (_, expert), name in names.items():
                kinds[expert is None].append(name)
    if all(kinds.values()):
        both = " beside ".join(some(sorted(names), 2) for names in kinds.values())
        raise damaged("checkpoint mixes fused and per-expert weights", index.path, both, "one layout")
    leaves = {leaf for group in groups for leaf in group.leaves}
    fused = bool(kinds[True])
    layouts = FUSED if fused else ONE_BY_ONE
    layout = next((names for names in layouts if leaves <= set(names.values())), None)
    if layout is None:
        required = "gate_proj, up_proj, down_proj or w1, w2, w3"
        raise damaged("experts have mixed names", index.path, ", ".join(sorted(leaves)), required)
    return fused, {part: leaf for part, leaf in layout.items() if part != "gate" or leaf in leaves}


def _count(index: CheckpointIndex, group: ExpertGroup) -> int:
    """Experts per layer: what the configuration says, else what the tensors hold."""
    values = (index.text_config.get(key) for key in _EXPERT_COUNTS)
    return next((value for value in values if isinstance(value, int) and value > 0), group.count)


def _check_complete(
    index: CheckpointIndex, groups: Sequence[ExpertGroup], leaves: dict[str, str], count: int, fused: bool
) -> None:
    """Every layer has every part of every expert, and nothing beyond; biases everywhere or nowhere."""
    experts: list[int | None] = [None] if fused else list(range(count))
    required = {(part, expert) for part in leaves for expert in experts}
    biased = any(group.biases for group in groups)
    missing: list[str] = []
    extra: list[str] = []
    weight_end, bias_end = ("", "_bias") if fused else (".weight", ".bias")
    for group in groups:
        for names, end in ((group.names, weight_end), *(((group.biases, bias_end),) if biased else ())):
            for part, expert in required - set(names):
                middle = "" if expert is None else f"{expert}."
                missing.append(f"{group.prefix}.{middle}{leaves[part]}{end}")
            extra += [names[key] for key in set(names) - required]
    if missing or extra:
        raise damaged(
            "checkpoint lacks experts" if missing else "checkpoint has more experts than its configuration",
            index.path,
            f"{'missing' if missing else 'unexpected'}: {some(sorted(missing or extra))}",
            f"{count} experts with {', '.join(leaves.values())} in each of {len(groups)} layers",
        )
