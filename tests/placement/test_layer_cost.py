"""Work per layer, and splits of least cost against all splits there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from kt_ray.dims.config_json import dims_from_config
from kt_ray.placement.layer_cost import LayerCosts, LayerSizes, Ranges, cheapest_split, layer_costs, mean_keys
from kt_ray.placement.memory import lora_params
from tests.placement.configs import DEEPSEEK_V3, SMALL, make_config, small_dims


def work(costs: LayerCosts, ranges: Ranges, speeds: Sequence[float]) -> list[float]:
    sums = [sum(costs.layers[a:b]) for a, b in ranges]
    sums[0] += costs.first
    sums[-1] += costs.last
    return [w / s for w, s in zip(sums, speeds, strict=True)]


def held(sizes: LayerSizes, ranges: Ranges) -> list[int]:
    found = [sum(sizes.held[a:b]) + max(sizes.peak[a:b]) for a, b in ranges]
    found[0] += sizes.first
    found[-1] += sizes.last
    return found


def all_splits(n: int, stages: int) -> list[Ranges]:
    cuts = itertools.combinations(range(1, n), stages - 1)
    return [tuple(itertools.pairwise((0, *c, n))) for c in cuts]


def test_cheapest_split_is_the_best_of_all() -> None:
    rng = random.Random(0)
    limited = impossible = 0
    for _ in range(150):
        n = rng.randint(1, 8)
        few = rng.random() < 0.5  # few different values make ties
        costs = LayerCosts(
            tuple(rng.randint(1, 3 if few else 50) for _ in range(n)), rng.randint(0, 5), rng.randint(0, 30)
        )
        sizes = LayerSizes(
            tuple(rng.randint(1, 3 if few else 9) for _ in range(n)),
            tuple(rng.randint(0, 4) for _ in range(n)),
            rng.randint(0, 3),
            rng.randint(0, 6),
        )
        for stages in range(1, n + 1):
            speeds = [rng.choice((1.0, 1.0, 2.5)) for _ in range(stages)]
            room = [rng.choice((0, 12, 25, 40)) for _ in range(stages)]
            ranges = cheapest_split(costs, stages, speeds, sizes, room)
            splits = all_splits(n, stages)
            assert ranges in splits  # every layer once, every stage one at least

            def fits(split: Ranges, room: Sequence[int] = room, sizes: LayerSizes = sizes) -> bool:
                return all(not c or b <= c for b, c in zip(held(sizes, split), room, strict=True))

            fitting = [split for split in splits if fits(split)]
            if not fitting:
                impossible += 1
                over = [
                    max(b / c if c else 0.0 for b, c in zip(held(sizes, s), room, strict=True))
                    for s in (*splits, ranges)
                ]
                assert over[-1] == min(over)
                continue
            limited += len(fitting) < len(splits)
            rated = {
                split: (
                    max(work(costs, split, speeds)),
                    max(held(sizes, split)),
                    sum(w * w for w in work(costs, split, speeds)),
                )
                for split in fitting
            }
            best = min(rated.values())
            assert rated[ranges][:2] == best[:2]
            assert rated[ranges][2] == pytest.approx(best[2])
    assert limited > 50 and impossible > 20


def test_without_speeds_and_limits() -> None:
    costs = LayerCosts((5, 5, 5, 5, 5, 5), first=0, last=10)
    assert cheapest_split(costs, 2) == ((0, 4), (4, 6))
    assert (
        cheapest_split(costs, 3) == ((0, 2), (2, 5), (5, 6))
        or max(work(costs, cheapest_split(costs, 3), (1, 1, 1))) == 15
    )
    assert cheapest_split(costs, 2, speeds=(1.0, 3.0)) == ((0, 2), (2, 6))
    for stages in (0, 7):
        with pytest.raises(ValueError, match="stages for 6 layers"):
            cheapest_split(costs, stages)
    with pytest.raises(ValueError, match="positive speed"):
        cheapest_split(costs, 2, speeds=(1.0,))


def test_costs_by_hand() -> None:
    dims = small_dims()  # MLA: 4 heads, 20 elements per key, 10 per value
    costs = layer_costs(dims, make_config(lora={"rank": 2}))
    for layer in range(4):
        linear = 6 * (dims.attention_params[layer] + dims.dense_params[layer])
        lora = 8 * lora_params(dims, make_config(lora={"rank": 2}).lora, layer)
        assert lora > 0
        assert costs.layers[layer] == linear + lora + round(9 * 8.5 * 4 * (20 + 10))
    assert (costs.first, costs.last) == (2 * 64, 4 * 64 * 256)
    # No LoRA outside the experts: only that part goes.
    bare = layer_costs(dims, make_config(lora={"target_modules": "none"}))
    assert costs.layers[1] - bare.layers[1] == 8 * lora_params(dims, make_config(lora={"rank": 2}).lora, 1)


def test_long_rows_make_attention_dear() -> None:
    def cost(length: int, **more: dict[str, str]) -> int:
        return layer_costs(small_dims("mixtral"), make_config(data={"max_length": length}, **more)).layers[0]

    short, long, longer = (cost(n) for n in (64, 128, 192))
    assert long - short == longer - long == 9 * 32 * 2 * 64  # half the row's keys on average; 2 * H
    eager = {"model": {"attn_implementation": "eager"}}
    assert cost(128, **eager) - cost(64, **eager) == 2 * (long - short)


def test_mean_keys() -> None:
    for row, window in [(1, 0), (7, 0), (7, 3), (7, 7), (7, 100), (64, 1)]:
        seen = [min(query + 1, window or row) for query in range(row)]
        assert mean_keys(row, window) == pytest.approx(sum(seen) / row)


def test_linear_and_sliding_layers_meet_fewer_keys() -> None:
    qwen = dims_from_config({**SMALL["qwen3_next"]}, "qwen3_next")
    assert {width == 0 for width, _ in qwen.pair_widths} == {True, False}
    oss = dims_from_config({**SMALL["gpt_oss"], "sliding_window": 8}, "gpt_oss")
    assert {window for _, window in oss.pair_widths} == {0, 8}
    v3 = dims_from_config(DEEPSEEK_V3)
    assert set(v3.pair_widths) == {(128 * (192 + 128), 0)}
