"""What layers by ranges take beyond whole ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kt_ray.hardware.rates import Figure, LinkRate
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.layer_work import layer_works
from kt_ray.timing.range_seconds import copied_seconds, repeated
from tests.placement.configs import make_config, make_hardware, small_dims

LINK = LinkRate(*(Figure(rate, "described") for rate in (2e9, 1e9, 1.0, 1.0)))


def plan_of(gpus: int, **rule: Any) -> Plan:
    keys = {"activations": "ranges", **rule}
    return make_plan(small_dims(), make_config(rule=keys), make_hardware(gpus=gpus))


def test_attention_is_computed_twice() -> None:
    """Its first projections always, heads and what lies before them unless their outputs are kept."""
    (work, *_) = layer_works(plan_of(1), make_config())
    rows, width = 1, 64
    kept, again = (repeated(work, rows, width, retained=retained) for retained in (True, False))
    attention = [module for module in work.modules if module[4] and not module[0].endswith("o_proj")]
    first = sum(
        2.0 * width * n_in * n_out for _, n_in, n_out, _, _ in attention if n_in == work.dims.hidden_size
    )
    every = sum(2.0 * width * n_in * n_out for _, n_in, n_out, _, _ in attention)
    assert first <= kept.products < every <= again.products
    assert kept.pairs == 0 < again.pairs == work.pairs(rows, width).pairs


def test_copies_take_the_link() -> None:
    dims, tokens = small_dims(), 100
    heads, hidden = 2 * dims.num_heads * 10, 2 * dims.hidden_size  # values of 10 per head, in bfloat16
    recomputed, retained = (plan_of(1, attention_output=kind) for kind in ("recompute", "retain"))
    forward = tokens * ((2 * hidden + heads) / 2e9 + (hidden + heads) / 1e9)
    assert copied_seconds(retained, LINK, "forward", 0, tokens) == pytest.approx(forward)
    backward = [copied_seconds(plan, LINK, "backward", 0, tokens) for plan in (recomputed, retained)]
    assert backward[0] - backward[1] == pytest.approx(tokens * heads / 1e9)
    assert copied_seconds(retained, LINK, "begin", 0, tokens) == 0
    assert copied_seconds(plan_of(0), LINK, "forward", 0, tokens) == 0
    on_cpu = replace(retained, workers=plan_of(0).workers)
    assert copied_seconds(on_cpu, None, "forward", 0, tokens) == 0
