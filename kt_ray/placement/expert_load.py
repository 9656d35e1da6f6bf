"""How many tokens each expert of each layer gets: the histogram that training keeps in its checkpoints.

expert_load.json of a checkpoint directory: slots = (token, expert) pairs of training steps, summed over the
whole run, resumed parts included; owners = which expert actor held which expert when it was written;
residents = which experts stayed on a GPU then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_json

FILE = "expert_load.json"
VERSION = 1
_WHAT = "histogram of tokens per expert"
_OTHER = "name a checkpoint of this model (rule.experts.load or trainer.resume)"


@dataclass(frozen=True)
class ExpertLoad:
    """Tokens per expert; immutable, so that a state of the run can keep its own."""

    steps: int = 0  # training steps counted
    # MoE layer -> tokens of every expert [E]
    slots: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    source: str = "this run"  # where it was read, for messages
    # MoE layer -> rank of the actor that held each expert [E]; empty = contiguous
    owners: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # MoE layer -> experts that stayed on a lane's device; None = not known
    residents: Mapping[int, tuple[int, ...]] | None = None

    def plus(self, counts: Mapping[int, Sequence[int]]) -> ExpertLoad:
        """With one more step: MoE layer -> tokens of every expert in it."""
        slots = dict(self.slots)
        for layer, of_layer in counts.items():
            old = slots.get(layer, (0,) * len(of_layer))
            slots[layer] = tuple(a + b for a, b in zip(old, of_layer, strict=True))
        return replace(self, steps=self.steps + 1, slots=slots)

    def least_slots(self) -> int:
        """Tokens of the layer that got fewest."""
        return min((sum(of_layer) for of_layer in self.slots.values()), default=0)

    def to_json(
        self, owners: Mapping[int, Sequence[int]], residents: Mapping[int, Sequence[int]] | None = None
    ) -> str:
        """The file's text, one line per layer. owners, residents: as this run has placed them now."""
        lines = [f'{{"version": {VERSION}, "steps": {self.steps}']
        for name, table in (("slots", self.slots), ("owners", owners), ("residents", residents or {})):
            rows = (
                f"  {json.dumps(str(layer))}: {json.dumps(list(table[layer]))}" for layer in sorted(table)
            )
            lines.append(f' "{name}": {{\n' + ",\n".join(rows) + "}")
        return ",\n".join(lines) + "}\n"


def read_load(checkpoint: Path, dims: ModelDims) -> ExpertLoad | None:
    """The histogram of a checkpoint directory; None = it has none (written before there were any).

    Raises:
        UserError: a file that cannot be read, or one of a model with other layers or experts.
    """
    file = checkpoint / FILE
    if not file.exists():
        return None
    value = read_json(file, _WHAT, _OTHER)
    check_shape(value, {"steps": int}, file, _WHAT, _OTHER)
    if value.get("version") != VERSION:
        raise _damaged(file, f"version {value.get('version')}")
    slots = _table(file, value, "slots")
    owners = _table(file, value, "owners")
    experts = {len(counts) for table in (slots, owners) for counts in table.values()}
    for table in (slots, owners) if owners else (slots,):
        if set(table) != set(dims.moe_layers) or experts != {dims.num_experts}:
            raise UserError(
                "histogram of tokens per expert belongs to another model",
                where=str(file),
                observed=_shape(sorted(table), experts),
                required=_shape(dims.moe_layers, {dims.num_experts}),
                remedy=_OTHER,
            )
    residents = _table(file, value, "residents") if "residents" in value else None
    return ExpertLoad(value["steps"], slots, str(checkpoint), owners, residents)


def _table(file: Path, value: Mapping[str, Any], name: str) -> dict[int, tuple[int, ...]]:
    table = value.get(name)
    if not isinstance(table, dict):
        raise _damaged(file, f"no table {name}")
    by_layer: dict[int, tuple[int, ...]] = {}
    for layer, counts in table.items():
        # bool is an int, but no count.
        fine = isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
        if not fine or not layer.isdecimal():
            raise _damaged(file, f"{name} of layer {layer[:20]} are no counts")
        by_layer[int(layer)] = tuple(counts)
    return by_layer


def _shape(layers: Sequence[int], experts: set[int]) -> str:
    named = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers"
    return f"{len(layers)} ({named}) with {' or '.join(map(str, sorted(experts))) or 'no'} experts"


def _damaged(file: Path, observed: object) -> UserError:
    return UserError(
        f"{_WHAT} cannot be read",
        where=str(file),
        observed=observed,
        required=f"a file {FILE} as mode=train writes it, version {VERSION}",
        remedy=_OTHER,
    )


def touched(choices: int, held: float, experts_per_token: int) -> float:
    """Expected share of tokens with at least one of `held` experts, balanced routing.

    A token's K experts are different ones, but K is small beside the E that it chooses among:
    1 - (1 - held / E)^K.
    """
    return 1.0 - (1.0 - held / choices) ** experts_per_token
