"""The histogram of tokens per expert: added up, written, read, and refused when it is another model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray.errors import UserError
from kt_ray.placement.expert_load import FILE, ExpertLoad, read_load
from tests.placement.configs import small_dims

DIMS = small_dims()
LAYERS, E = DIMS.moe_layers, DIMS.num_experts


def step(first: int) -> dict[int, list[int]]:
    return {layer: [first + layer + e for e in range(E)] for layer in LAYERS}


def test_steps_add_up_and_states_keep_their_own() -> None:
    one = ExpertLoad().plus(step(0))
    two = one.plus(step(10))
    assert (one.steps, two.steps) == (1, 2)
    assert one.slots[LAYERS[0]] == tuple(LAYERS[0] + e for e in range(E))
    assert two.slots[LAYERS[0]] == tuple(10 + 2 * (LAYERS[0] + e) for e in range(E))
    assert ExpertLoad().least_slots() == 0 and one.least_slots() == sum(one.slots[LAYERS[0]])
    with pytest.raises(ValueError, match="zip"):
        one.plus({LAYERS[0]: [1]})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_load(tmp_path, DIMS) is None
    load = ExpertLoad().plus(step(3))
    owners = {layer: tuple(e % 2 for e in range(E)) for layer in LAYERS}
    for table in (owners, {}):
        (tmp_path / FILE).write_text(load.to_json(table))
        found = read_load(tmp_path, DIMS)
        assert found is not None and (found.steps, found.slots, found.owners) == (1, load.slots, table)
        assert found.source == str(tmp_path) and found.residents == {}
    (tmp_path / FILE).write_text(load.to_json(owners, dict.fromkeys(LAYERS, (0, 2))))
    found = read_load(tmp_path, DIMS)
    assert found is not None and found.residents == dict.fromkeys(LAYERS, (0, 2))
    assert len(load.to_json(owners).splitlines()) < 3 * len(LAYERS) + 4, "a line per layer"


def fresh() -> dict[str, Any]:
    return dict(json.loads(ExpertLoad().plus(step(1)).to_json({})))


def changed(**values: Any) -> str:
    return json.dumps({**fresh(), **values})


SLOTS = fresh()["slots"]
WRONG = {
    "not JSON": ("{", "cannot be read"),
    "a list": ("[]", "is not a JSON object"),
    "version": (changed(version=2), "version 2"),
    "steps": (changed(steps="many"), "steps; found str many"),
    "no table": (changed(slots=None), "no table slots"),
    "negative": (changed(slots={**SLOTS, "1": [-1] * E}), "slots of layer 1 are no counts"),
    "true": (changed(slots={**SLOTS, "1": [True] * E}), "slots of layer 1 are no counts"),
    "a name": (changed(slots={"first": [1] * E}), "slots of layer first are no counts"),
    "fewer layers": (
        changed(slots={"1": [1] * E}),
        r"another model.*found 1 \(layers 1 to 1\) with 8 experts",
    ),
    "no layers": (changed(slots={}), "no layers"),
    "more experts": (
        changed(slots={k: [1] * 16 for k in SLOTS}),
        "with 16 experts; required .* with 8 experts",
    ),
    "mixed": (changed(slots={**SLOTS, "1": [1] * 4}), "with 4 or 8 experts"),
    "owners": (changed(owners={"1": [0] * E}), "another model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(tmp_path: Path, name: str) -> None:
    text, message = WRONG[name]
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_load(tmp_path, DIMS)
    assert caught.value.where.startswith(str(tmp_path / FILE)) and "rule.experts.load" in caught.value.remedy
