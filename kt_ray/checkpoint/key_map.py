"""Which tensor of a model each key of a checkpoint becomes, by transformers' own conversion mapping.

Keys of a multimodal checkpoint are also tried under the names that its language model has on its own; the
prefix of its experts tells where the language model is, and modules that the loader emptied where the other
towers are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.names import is_mtp, is_other_modality, layer_of

if TYPE_CHECKING:  # expert actors import this package and need no transformers
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

_IGNORED = [re.compile(p) for p in (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")]


@dataclass(frozen=True)
class LoadReport:
    """Keys without a place, sorted."""

    unexpected: list[str]  # of the loaded parts
    # by the family: multi-token prediction, stored rotary tables, other towers of a multimodal model
    ignored: list[str]


Mapped = dict[str, tuple["WeightConverter | None", list[tuple[str, str]]]]


def map_keys(
    index: CheckpointIndex,
    module: PreTrainedModel,
    layout: ExpertLayout,
    sources: set[str],
    layers: tuple[int, int],
) -> tuple[Mapped, LoadReport]:
    """Target name -> (converter or None, [(checkpoint key, pattern it matched)]), for `sources`."""
    names = KeyNames(module, layout.prefixes.values())
    count = index.layer_count
    ignore = [re.compile(p) for p in (module._keys_to_ignore_on_load_unexpected or ())]
    ignore += _IGNORED
    skipped = frozenset(layout.skipped)
    ignored, unexpected = set(skipped), []
    mapping: Mapped = {}
    for key in sorted(index.names):
        matrix = index.matrices.get(key)
        raw = {key} if matrix is None else set(matrix.keys)
        if raw <= layout.keys or raw & skipped:
            continue
        renamed, converter, pattern = names.target(key)
        layer = layer_of(key)
        targets = tensors_made(renamed, converter)
        if targets & sources:
            mapping.setdefault(renamed, (converter, []))[1].append((key, pattern or key))
        elif renamed in names.state:
            continue  # another stage's
        elif (
            is_mtp(key, count)
            or any(p.search(key) for p in ignore)
            or names.other_tower(key)
            or index.is_blank_bias(key)
        ):
            ignored.add(key)
        elif layer is None or layers[0] <= layer < layers[1]:
            unexpected.append(key)
    return mapping, LoadReport(unexpected, sorted(ignored))


def tensors_made(renamed: str, converter: WeightConverter | None) -> set[str]:
    """`renamed`, and everything else that its converter makes of the same keys."""
    if converter is None:
        return {renamed}
    first = converter.target_patterns[0]
    return {renamed.replace(first, pattern) for pattern in converter.target_patterns}


class KeyNames:
    """From a checkpoint's keys to a module's parameters.

    Args:
        module: the model.
        prefixes: of the checkpoint's experts: they show where its language model lies.
    """

    def __init__(self, module: PreTrainedModel, prefixes: Iterable[str]) -> None:
        from torch import nn
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(module)
        self.renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self.converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self.by_pattern = {pattern: c for c in self.converters for pattern in c.source_patterns}
        self.state = module.state_dict()
        self.prefix = module.base_model_prefix
        self.emptied = tuple(f"{name}." for name, child in module.named_modules() if type(child) is nn.Module)
        # "model.language_model." of "model.language_model.layers.3.mlp.experts"; "" of "layers.3.ffn.experts"
        self.root = next((p[: p.find("layers.")] for p in prefixes if "layers." in p), "")
        self.outer = self.root.removesuffix("model.")

    def target(self, key: str) -> tuple[str, WeightConverter | None, str | None]:
        """Name of the module's tensor, and the converter (by which pattern) that makes it."""
        first = self._renamed(key)
        if self._known(first):
            return first
        for shorter in self._in_language_model(key):
            inside = self._renamed(shorter)
            if self._known(inside):
                return inside
        return first

    def other_tower(self, key: str) -> bool:
        """Whether a key lies outside a multimodal checkpoint's language model."""
        renamed = self._renamed(key)[0]
        if is_other_modality(key):
            return True
        if renamed.startswith(self.emptied) or f"{self.prefix}.{renamed}".startswith(self.emptied):
            return True
        return self.root not in ("", f"{self.prefix}.") and not key.startswith(self.root)

    def _in_language_model(self, key: str) -> list[str]:
        """Names the key would have if the language model stood alone."""
        if key.startswith(self.root):
            rest = key[len(self.root) :]
            return [f"{self.prefix}.{rest}", rest]
        if self.outer and key.startswith(self.outer):
            return [key[len(self.outer) :]]
        return []

    def _renamed(self, key: str) -> tuple[str, WeightConverter | None, str | None]:
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(key, self.renamings, self.converters, self.prefix, self.state)
        if name not in self.state and key in self.state:
            name, pattern = rename_source_key(key, [], [], self.prefix, self.state)
        return name, (self.by_pattern[pattern] if pattern is not None else None), pattern

    def _known(self, target: tuple[str, WeightConverter | None, str | None]) -> bool:
        return bool(tensors_made(target[0], target[1]) & self.state.keys())
