"""`merge BASE ADAPTER OUT`: W + scale * B A in place of W, in the base's own formats or in BF16.

With DoRA every row of the result gets its magnitude as its norm.

A quantised weight is dequantised, changed and quantised again as it was stored; weights that the adapter
does not touch are copied byte by byte. One expert is held at a time.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from kt_ray.adapter.adapter_file import Lora, Pair
from kt_ray.adapter.peft_config import CONFIG, TEMPLATE, WEIGHTS, converts_keys
from kt_ray.checkpoint.content import check_content
from kt_ray.checkpoint.expert_groups import ExpertGroup, expert_groups, split_rows
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.key_map import KeyNames, tensors_made
from kt_ray.checkpoint.names import expert_name, family, fused_release, is_mtp, layer_of
from kt_ray.checkpoint.safetensors_file import damaged, read_tensor
from kt_ray.checkpoint.shard_writer import SHARD_BYTES, Notes, Unit, finish, write_shards
from kt_ray.errors import UserError
from kt_ray.model import layer_calls
from kt_ray.model.family import build_causal, read_family
from kt_ray.tools.units import (
    QUANTIZATION_FILES,
    Change,
    Note,
    Placed,
    as_stored,
    check_directories,
    check_formats,
    copied_as,
    error_of,
    position,
    raw_keys,
    rewritten,
    without_quantization,
    without_ties,
)

_OLD_TEMPLATE = "chat_template.json"  # which processors of multimodal models prefer to chat_template.jinja
_ENOUGH = 0.9  # of an update that is left after rounding
_BELONG = "merge into the model that the adapter was trained on"


def merge(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    bf16: bool = False,
    shard_bytes: int = SHARD_BYTES,
    threads: int = 1,
) -> dict[str, Any]:
    """Write the merged checkpoint; an interrupted merge resumes.

    Args:
        bf16: write quantised weights as BF16.
        shard_bytes, threads: see `write_shards`.

    Returns:
        {"touched": parameters changed, "experts": expert matrices changed, "linear": other matrices
        changed, "requantised": relative Frobenius error of what was quantised again, or None, "left": how
        much of its update rounding leaves, 1 = all of it, or None, "left_of_plain": the same of what is
        written plain, "template": whether the adapter brings its chat template, which replaces the base's}.

    Raises:
        UserError: an unreadable or unfinished base or adapter, keys or shapes that fit no weight of the base,
            a directory of another job.
    """
    index, target = CheckpointIndex.open(base), Path(out)
    lora = Lora.open(adapter, family(index.config), len(index.zero_experts))
    check_directories(index, target)
    if bf16:
        check_formats(index)
    plan = _Plan(index, lora)
    lora.check_finite()
    check_content(index)
    units = plan.units(bf16)
    job = {
        "tool": "merge",
        "base": index.fingerprint,
        "adapter": adapter_fingerprint(lora.path),
        "dtype": "bf16" if bf16 else "as the base",
    }
    notes = write_shards(target, units, job, shard_bytes=shard_bytes, threads=threads, title="merge")
    config = without_quantization(index.config) if bf16 else index.config
    config = without_ties(config) if plan.unties else config
    template = lora.path / TEMPLATE
    over = [template] if template.is_file() else []
    left_out = (*(QUANTIZATION_FILES if bf16 else ()), *((_OLD_TEMPLATE,) if over else ()))
    finish(target, index.path, config, units, shard_bytes, left_out=left_out, over=over)
    wrong, whole = notes.get("error", [0.0, 0.0])
    left = {key: notes.get(key, [0.0, 0.0]) for key in ("left", "left_of_plain")}
    return {
        "touched": len(plan.touched) + len(plan.heads),
        "experts": len(plan.experts),
        "linear": len(plan.linear) + len(plan.heads),
        "requantised": (wrong / whole) ** 0.5 if whole else None,
        **{key: along / update if update else None for key, (along, update) in left.items()},
        "template": bool(over),
    }


def adapter_fingerprint(path: Path) -> str:
    """Hash of an adapter's configuration and weights: what a merge depends on."""
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    with (path / WEIGHTS).open("rb") as file:
        while chunk := file.read(4 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _Plan:
    """Which pair changes which parameter of the base.

    Attributes:
        linear: parameter -> (pair, first row of its update), outside the routed experts.
        experts: (prefix in the base, expert, "gate" | "up" | "down") -> (pair, expert within the pair,
            rows of the pair's update).
        touched: parameters that change.
        heads: module -> (pair, the embedding that it is tied to): a parameter that the base does not store.
        unties: whether the adapter changes a head that is tied, stored or not.
    """

    def __init__(self, index: CheckpointIndex, lora: Lora) -> None:
        self.index, self.lora = index, lora
        self.linear: dict[str, tuple[Pair, int]] = {}
        self.heads: dict[str, tuple[Pair, str]] = {}
        self.unties = False
        self.experts: dict[tuple[str, int, str], list[Callable[[], Tensor]]] = {}
        # Without experts in the adapter the base may be any model.
        routed = lora.experts or lora.fused or any(expert_name(name) for name in index.names)
        self.groups = expert_groups(index) if routed else {}
        self.by_layer: dict[int, list[ExpertGroup]] = {}
        for group in self.groups.values():
            if not group.mtp:
                self.by_layer.setdefault(group.layer, []).append(group)
        self.reason = ""
        self.unknown: list[str] = []
        self.misfits: list[str] = []
        self._match_linear()
        self._match_experts()
        self._refuse()
        self.touched = set(self.linear) | {self.groups[g].source(p, e) for g, e, p in self.experts}

    def units(self, bf16: bool) -> list[Unit]:
        """Every tensor of the result, in the order of the base's bytes."""
        placed: list[Placed] = []
        model_type = family(self.index.config)
        release = fused_release(model_type)
        if bf16 and release is not None and not converts_keys(model_type):
            self._refuse_apart()
        group_of = {name: g for g in self.groups.values() for name in g.names.values()}
        rewritten_names = self.touched | (set(self.index.matrices) if bf16 else set())
        for name in sorted(rewritten_names):
            group, quantised = group_of.get(name), name in self.index.matrices
            swapped = group is not None and group.fused and group.transposed
            stays = not (bf16 and quantised)  # else it is written as the family's plain release is
            swaps = not stays and group is not None and release is not None and release.transposed
            change = self._change(name, group) if name in self.touched else None
            note: Note | None = None
            if change is not None:
                change, note = _noted(change, quantised=quantised and stays)
            unit = rewritten(
                self.index,
                name,
                bf16=not stays,
                transposed=(swapped, swapped or swaps),
                change=change,
                touched=self._is_touched(name, group),
                note=note,
            )
            placed.append((position(self.index, name), unit))
        for module, (pair, source) in self.heads.items():
            change, note = _noted(partial(_add_rows, pair), quantised=False)
            unit = copied_as(self.index, source, f"{module}.weight", change, note)
            placed.append((position(self.index, source), unit))
        written = set()
        for name in rewritten_names:  # a weight_shape stays where the format does
            matrix = self.index.matrices.get(name)
            written |= {*raw_keys(self.index, name)} if bf16 or matrix is None else {*matrix.renewed}
        if bf16:  # scales of activations and GPTQ's biases of zeros belong to the quantised format
            written |= {key for key in self.index.tensors if self.index.is_blank_bias(key)}
            parts = {key for matrix in self.index.matrices.values() for key in matrix.keys}
            written |= set(self.index.tensors) - self.index.names - parts
        placed += as_stored(self.index, [key for key in sorted(self.index.tensors) if key not in written])
        return [unit for _, unit in sorted(placed, key=lambda item: item[0])]

    def _refuse_apart(self) -> None:
        """Where the plain release has fused experts, which those one by one would have to become."""
        parts = {name: expert_name(name) for name in self.index.matrices}
        apart = [name for name, part in parts.items() if part is not None and part.expert is not None]
        if apart:
            raise damaged(
                "quantised experts one by one have no BF16 form in this family, whose release fuses them",
                self.index.path,
                some(apart, 2),
                "fused experts, or the base's own format",
                "leave --dtype bf16 away, or fuse them first and merge into DIR: "
                "python -m kt_ray.tools convert BASE DIR --to bf16",
            )

    # -- matching

    def _match_linear(self) -> None:
        if not self.lora.linear:
            return
        names = module_names(self.index, self.groups)
        self.reason = names.reason
        for module, pair in self.lora.linear.items():
            name, source = names.parameters.get(module), names.tied.get(module)
            self.unties |= source is not None
            if source is not None and name is None:
                self._fits(pair, self.index.shape(source))
                self.heads[module] = (pair, source)
                continue
            parts = [name] if name else names.stacked.get(module, [])
            if not parts:
                joined = names.joined.get(module)
                self.unknown.append(
                    f"{module} (part of {joined}, which transformers splits or joins)" if joined else module
                )
                continue
            shapes = [self.index.shape(part) for part in parts]
            self._fits(pair, (sum(shape[0] for shape in shapes), *shapes[0][1:]))
            first = 0
            for part, shape in zip(parts, shapes, strict=True):
                self.linear[part] = (pair, first)
                first += shape[0]

    def _match_experts(self) -> None:
        for (prefix, expert, projection), pair in self.lora.experts.items():
            group = self._group(prefix)
            if group is None or expert >= group.count or projection not in group.projections:
                self.unknown.append(pair.module)
                continue
            self._fits(pair, group.shape(projection))
            self._add(group, expert, projection, pair.delta)
        for (prefix, role), pair in self.lora.fused.items():
            group = self._group(prefix)
            if group is None or role not in group.roles:
                self.unknown.append(pair.module)
                continue
            self._fits(pair, group.shape(role), group.count)
            for expert in range(group.count):
                if role != "gate_up":
                    self._add(group, expert, role, partial(pair.delta, expert))
                    continue
                for half, projection in enumerate(("gate", "up")):
                    self._add(group, expert, projection, _half(pair, expert, half, group.interleaved))

    def _group(self, prefix: str) -> ExpertGroup | None:
        """The base's experts that an adapter's "...experts" means: by its name, or else by its layer."""
        if prefix in self.groups or is_mtp(f"{prefix}.", self.index.layer_count):
            return self.groups.get(prefix)
        own = self.by_layer.get(-1 if (layer := layer_of(prefix)) is None else layer, [])
        if len(own) > 1:
            raise damaged(
                "adapter's experts may be one or another of the base's, which has several sets in one layer",
                f"{self.lora.path}, {prefix}",
                some([group.prefix for group in own]),
                "the name of one of them",
                "rename the adapter's keys to the base's names",
            )
        return own[0] if own else None

    def _add(self, group: ExpertGroup, expert: int, projection: str, delta: Callable[[], Tensor]) -> None:
        self.experts.setdefault((group.prefix, expert, projection), []).append(delta)

    def _fits(self, pair: Pair, shape: Sequence[int], experts: int = 0) -> None:
        observed = (pair.out_features, pair.in_features)
        if tuple(shape) != observed or pair.experts != experts:
            count = f" of {pair.experts} experts" if pair.experts != experts else ""
            self.misfits.append(f"{pair.module} {list(observed)}{count} for {list(shape)}")

    def _refuse(self) -> None:
        if self.unknown:
            what, observed = "adapter has keys that fit no weight of the base", some(sorted(self.unknown), 20)
            reason = f" (only its own names are known: {self.reason})" if self.reason else ""
            raise damaged(what, self.lora.path, observed, f"modules of {self.index.path}{reason}", _BELONG)
        if self.misfits:
            required = "B [out, r] and A [r, in] of the weight's [out, in]"
            observed = some(sorted(self.misfits), 20)
            raise damaged("adapter's shapes do not fit the base", self.lora.path, observed, required, _BELONG)

    # -- values

    def _change(self, name: str, group: ExpertGroup | None) -> Change:
        if group is None:
            pair, start = self.linear[name]
            plain = name not in self.index.matrices
            return lambda value, first: _add_rows(pair, value, start + (first if plain else 0))
        parts = expert_name(name)
        assert parts is not None
        if parts.expert is not None:
            key = (group.prefix, parts.expert, parts.role)
            # Plain experts may come in chunks of rows: `first` is the row the chunk begins with.
            return lambda value, first: value + self._delta(key)[first : first + value.shape[0]]

        def change(value: Tensor, expert: int) -> Tensor:
            result = value.clone()
            if parts.role != "gate_up":
                return result + self._delta((group.prefix, expert, parts.role))
            for rows, projection in zip(split_rows(result, group.interleaved), ("gate", "up"), strict=True):
                if (group.prefix, expert, projection) in self.experts:
                    rows += self._delta((group.prefix, expert, projection))
            return result

        return change

    def _delta(self, key: tuple[str, int, str]) -> Tensor:
        if key not in self.experts:
            return torch.zeros(())
        return torch.stack([delta() for delta in self.experts[key]]).sum(0)

    def _is_touched(self, name: str, group: ExpertGroup | None) -> Callable[[int], bool]:
        parts = expert_name(name)
        if group is None or parts is None or parts.expert is not None:
            return lambda expert: True
        roles = ("gate", "up") if parts.role == "gate_up" else (parts.role,)
        return lambda expert: any((group.prefix, expert, role) in self.experts for role in roles)


def _noted(change: Change, *, quantised: bool) -> tuple[Change, Note]:
    """The same, and a note of what rounding makes of it: how far weights move along their update, and of
    quantised ones the error. A small one is no sign that they moved: none may have left its step."""
    update = torch.zeros(())

    def changed(value: Tensor, first: int) -> Tensor:
        nonlocal update
        result = change(value, first)
        update = result - value
        return result

    def note(notes: Notes, before: Tensor, after: Tensor) -> None:
        if quantised:
            error_of("error")(notes, before, after)
        whole = float(update.square().sum())
        along = whole + float(((after - before) * update).sum())
        notes.add("left" if quantised else "left_of_plain", along, whole)

    return changed, note


def _half(pair: Pair, expert: int, half: int, interleaved: bool) -> Callable[[], Tensor]:
    return lambda: split_rows(pair.delta(expert), interleaved)[half]


def _add_rows(pair: Pair, value: Tensor, first: int) -> Tensor:
    a, b = pair.factors()
    rows = slice(first, first + value.shape[0])
    whole = value + pair.scale * (b[rows] @ a)
    if pair.magnitude is None:
        return whole
    return (read_tensor(pair.magnitude)[rows].float() / torch.linalg.norm(whole, dim=1))[:, None] * whole


def show(report: dict[str, Any], console: Console) -> None:
    """The report in a line."""
    error = report["requantised"]
    text = f"{report['touched']} parameters changed: {report['experts']} expert matrices, "
    text += f"{report['linear']} others"
    if error is not None:
        text += f"; quantised again with relative error {error:.2e}"
    shares = [report[key] for key in ("left", "left_of_plain")]
    whose = ("quantised weights", "plain ones")
    told = [f"{share:.0%} of {name}" for share, name in zip(shares, whose, strict=True) if share is not None]
    text += f"; rounding leaves of the update {', '.join(told)}" if told else ""
    lost = [share is not None and share < _ENOUGH for share in shares]
    if any(lost):
        text += " (to keep more, merge with --dtype bf16)" if lost[0] else " (an adapter unmerged keeps all)"
    if report["template"]:
        text += "; chat template: the adapter's"
    console.print(text, soft_wrap=True)


# -- names of modules outside the experts


@dataclass(frozen=True)
class ModuleNames:
    """Which parameter of a checkpoint an adapter's module name means.

    Adapters name modules as transformers builds them ("model.layers.0.self_attn.q_a_proj"); released
    checkpoints may name them otherwise ("layers.0.attn.wq_a", "model.language_model.layers.0..."). The
    mapping is transformers' own, applied to the names alone.
    """

    parameters: dict[str, str]  # module as transformers or the checkpoint names it -> parameter
    # modules whose weight is a part of, or made from, other tensors of the checkpoint
    joined: dict[str, str] = field(default_factory=dict)
    # modules whose weight is several tensors of the checkpoint, one below the other -> these, in order
    stacked: dict[str, list[str]] = field(default_factory=dict)
    # modules whose weight is the embedding, which alone the checkpoint needs to store -> that parameter
    tied: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # why transformers' names are not known


def module_names(index: CheckpointIndex, prefixes: Iterable[str]) -> ModuleNames:
    """Names of every matrix outside the routed experts (prefixes: "model.layers.3.mlp.experts")."""
    names = sorted(n for n in index.names if expert_name(n) is None and n.endswith(".weight"))
    parameters = {name.removesuffix(".weight"): name for name in names}
    try:
        layer_calls.register()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of configurations: nothing is computed with this model
            model, _, _ = build_causal(read_family(index.path), torch.bfloat16, "eager")
    except UserError as error:
        return ModuleNames(parameters, reason=error.line())
    modules = ModuleNames(parameters)
    keys = KeyNames(model, prefixes)
    order: dict[str, int] = {}  # of a tensor among those that are stacked with it
    for name in names:
        renamed, converter, pattern = keys.target(name)
        if converter is not None and _stacks(converter):
            order[name] = converter.source_patterns.index(str(pattern))
            module = renamed.removesuffix(".weight")
            parts = [*modules.stacked.get(module, []), name]
            modules.stacked[module] = sorted(parts, key=order.__getitem__)
        for target in tensors_made(renamed, converter):
            place = modules.parameters if converter is None else modules.joined
            place[target.removesuffix(".weight")] = name
    embedding = next(name for name, part in model.named_modules() if part is model.get_input_embeddings())
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if source == f"{embedding}.weight" and (stored := modules.parameters.get(embedding)):
            modules.tied[name.removesuffix(".weight")] = stored
    return modules


def _stacks(converter: Any) -> bool:
    """Whether a converter of transformers only puts tensors one below the other."""
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    return operations == [("Concatenate", 0)] and len(converter.target_patterns) == 1
