"""Rows of 131,072 tokens at released sizes: every byte of a layer by ranges against what a plan counts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray.config.files import conf_dir
from kt_ray.config.schema import LoraConfig
from kt_ray.dims.config_json import dims_from_config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_from_file
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.model.head_ranges import Named
from kt_ray.placement.activation_bytes import adapter_scratch_bytes, layer_activation_bytes
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.range_memory import TOKEN_BYTES, range_counts, range_workspace, without_ranges
from kt_ray.timing.lane_rates import from_rates
from tests.helpers.allocations import layer_peaks
from tests.helpers.devices import on_cuda
from tests.helpers.exhaustive import spread
from tests.placement.configs import make_config, make_hardware, small_dims

ROW = 131_072
SPARE = 1.2  # what is counted, over the most that is allocated

LATENT = Named(
    "self_attn",
    (("q_a_proj", False), ("kv_a_proj_with_mqa", False)),
    ("q_b_proj", "kv_b_proj"),
    (),
    "o_proj",
    2,
)
GROUPED = Named("self_attn", (("q_proj", True), ("k_proj", True), ("v_proj", True)), (), (), "o_proj", 2)
SINKS = GROUPED._replace(own=("sinks",))
MODELS = [
    ("deepseek_v3", LATENT, 32, 0.0),
    ("deepseek_v3", LATENT, 16, 0.1),
    ("kimi_k2", LATENT, 16, 0.0),
    ("qwen3_235b_a22b", GROUPED, 4, 0.0),
    ("qwen3_30b_a3b", GROUPED, 4, 0.1),
    ("gpt_oss_120b", SINKS, 8, 0.0),
]
UNUSED = ("mlp.down_proj", "mlp.shared_experts.down_proj")


def released(model: str, layers: int) -> tuple[dict[str, Any], ModelDims]:
    """config.json of a model with so many layers, of which the first is dense where the family has such."""
    config = yaml.safe_load((conf_dir() / "model" / f"{model}.yaml").read_text())["config"]
    config |= {"num_hidden_layers": layers, "quantization_config": None}
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    config = {key: value for key, value in config.items() if value is not None}
    return config, dims_from_config(config, name=model)


_PEAKS: dict[tuple[object, ...], dict[int, tuple[int, float]]] = {}  # tests ask for the same ones


def peaks_of(
    path: Path,
    patch: pytest.MonkeyPatch,
    model: str,
    named: Named,
    count: int,
    dropout: float = 0.0,
    device: str = "meta",
) -> dict[int, tuple[int, float]]:
    """Layer -> (bytes allocated at the worst, bytes counted) in a pass of two micro-batches of a row each."""
    asked = (model, count, dropout, device)
    if asked in _PEAKS:
        return _PEAKS[asked]
    lora = {"rank": 8, "dropout": dropout}
    config, dims = released(model, 2)
    peaks = layer_peaks(
        *(patch, path / "model", config, named.of, UNUSED),
        layers=2,
        tokens=ROW,
        count=count,
        lora=LoraConfig(rank=8, dropout=dropout),
        device=device,
    )
    whole = make_config(lora=lora, data={"max_length": ROW})
    found = {}
    for layer in range(2):
        each = layer_activation_bytes(dims, whole, layer, "bfloat16", gpu=True)
        each += adapter_scratch_bytes(dims, whole, layer, "bfloat16", gpu=True)
        counted = range_workspace(dims, whole, layer, ROW, count, 2, each=each, widened=dropout > 0)
        worst = max(size for (_, of), size in peaks.items() if of == layer)
        found[layer] = (worst, counted + 2 * ROW * TOKEN_BYTES)
    _PEAKS[asked] = found
    return found


# Kimi-K2's layer is DeepSeek-V3's with half of the heads: it is in the table only.
@pytest.mark.parametrize(
    ("model", "named", "count", "dropout"), spread([m for m in MODELS if m[0] != "kimi_k2"], 8)
)
def test_a_plan_counts_what_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, named: Named, count: int, dropout: float
) -> None:
    """Never less; and of the layer that needs most, not much more."""
    found = peaks_of(tmp_path, monkeypatch, model, named, count, dropout)
    for allocated, counted in found.values():
        assert allocated <= counted
    worst = max(found.values())
    assert worst[1] <= SPARE * worst[0]


@on_cuda
@pytest.mark.parametrize(
    ("model", "named", "count"),
    [("deepseek_v3", LATENT, 32), ("qwen3_30b_a3b", GROUPED, 4), ("gpt_oss_120b", SINKS, 8)],
)
def test_a_card_keeps_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, named: Named, count: int
) -> None:
    """By torch's own count, with random weights."""
    found = peaks_of(tmp_path, monkeypatch, model, named, count, device="cuda:0")
    assert all(0 < allocated <= counted for allocated, counted in found.values())


@pytest.mark.parametrize(("gpus", "rows"), [(2, 2), (1, 1)])
@pytest.mark.exhaustive
def test_deepseek_v3_trains_rows_of_131072_in_16_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, rows: int
) -> None:
    """A layer fits beside all else that the plan counts on a card of which 16 GiB may be used."""
    hardware = hardware_from_file(conf_dir() / "hardware" / "2x4090_2x8488c.yaml")
    config = yaml.safe_load((conf_dir() / "model" / "deepseek_v3.yaml").read_text())["config"]
    dims = dims_from_config(config, name="deepseek_v3")
    whole = make_config(
        rule={"gpu_memory": 16, "gpus": gpus, "experts": {"stream": "auto"}},
        data={"max_length": ROW},
        trainer={"batch_size": rows},
    )
    plan = make_plan(dims, whole, hardware, None, from_rates(nominal_rates(hardware), whole, hardware, dims))
    # Streamed experts leave no room for a group's tokens, and give way.
    assert all(actor.lane is None for actor in plan.experts)
    assert any(note.startswith("rule.experts.stream=auto: off, since rows of 131,072") for note in plan.notes)
    assert plan.fits and plan.activations == "ranges" and plan.replicas == gpus
    cards = [budget for budget in plan.budgets if not budget.is_socket]
    assert len(cards) == gpus
    found = peaks_of(tmp_path, monkeypatch, "deepseek_v3", LATENT, plan.head_ranges)
    allocated = max(allocated for allocated, _ in found.values())
    for card in cards:
        assert card.capacity < 16 * GIB
        others = card.total - card.items["workspace"] - ROW * TOKEN_BYTES
        assert others + allocated <= card.total <= card.capacity


def row_plan(family: str = "deepseek_v3", length: int = 1 << 16, gpu_gib: float = 1.25, **rule: Any) -> Plan:
    """Of a small model with two rows, on a card for which they may be too long."""
    return make_plan(
        small_dims(family),
        make_config(rule=rule, data={"max_length": length}, trainer={"batch_size": 2}),
        make_hardware(gpus=1, gpu_gib=gpu_gib, memory=256 * GIB),
    )


def test_ranges_come_last() -> None:
    """Rows that fit stay whole; the others go by as few ranges as fit."""
    whole, short = row_plan(gpu_gib=24), row_plan(length=256)
    assert whole.fits and whole.activations != "ranges" and whole.head_ranges == 0
    assert short.fits and short.head_ranges == 0
    assert not row_plan(activations="host").fits
    long = row_plan()
    assert long.fits and long.activations == "ranges" and long.head_ranges in (2, 4)
    assert any(
        note.startswith("rule.activations=auto: ranges, since rows of 65,536 tokens") for note in long.notes
    )
    asked = row_plan(gpu_gib=24, activations="ranges")
    assert asked.fits and asked.head_ranges == 2


def test_what_waits_is_on_the_host() -> None:
    host, ranges = row_plan(activations="host", gpu_gib=24), row_plan(activations="ranges", gpu_gib=24)
    card, socket = (
        next(b.items for b in ranges.budgets if b.is_socket is on_host) for on_host in (False, True)
    )
    held = next(b.items for b in host.budgets if not b.is_socket)
    dims, tokens = ranges.dims, 2 * (1 << 16)
    routing = len(dims.moe_layers) * tokens * dims.experts_per_token * 12
    assert card["kept activations"] == routing + tokens * TOKEN_BYTES
    assert card["workspace"] < held["workspace"]
    states = (dims.num_layers + 3) * tokens * dims.hidden_size * 2
    assert socket["kept activations"] > states
    one = tokens * dims.hidden_size * 2
    assert states - one < ranges.workers[0].waiting < socket["kept activations"] - one
    assert host.workers[0].waiting == (1 + (host.attention_output == "retain")) * (states - 3 * one)
    assert row_plan(gpu_gib=24, activations="group").workers[0].waiting == 0


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v32", "an index"),
        ("deepseek_v4", "several streams"),
        ("qwen3_next", "another attention"),
        ("olmoe", "all heads at once"),
        ("nemotron_h", "another attention"),
    ],
)
def test_families_that_cannot_are_named(family: str, reason: str) -> None:
    """Left at auto they are planned as before, so that what helps is what mode=plan says."""
    assert reason in without_ranges(small_dims(family), make_config())
    with pytest.raises(UserError, match=rf"{family} cannot train with rule\.activations=ranges.*{reason}"):
        row_plan(family, activations="ranges")
    plan = row_plan(family, gpu_gib=0.9)
    assert plan.head_ranges == 0


@pytest.mark.parametrize(
    ("target_modules", "reason"),
    [("auto", "DoRA"), (["o_proj", "kv_a_proj_with_mqa"], ""), (["kv_b_proj"], "DoRA")],
)
def test_dora_of_what_is_cut_is_refused(target_modules: Any, reason: str) -> None:
    config = make_config(lora={"dora": True, "experts": False, "target_modules": target_modules})
    found = without_ranges(small_dims("deepseek_v3"), config)
    assert found.startswith(reason) if reason else found == ""
    assert without_ranges(small_dims("qwen3_moe"), config) == ""


@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "gpt_oss", "glm4_moe", "mixtral"]
)
def test_families_that_can(family: str) -> None:
    dims = small_dims(family)
    assert without_ranges(dims, make_config()) == ""
    counts = range_counts(dims)
    assert counts and all(dims.kv_heads % count == 0 for count in counts) and counts[-1] == dims.kv_heads


def table() -> Iterator[str]:
    """The lines of docs/decisions/019-rows-by-ranges.md."""
    yield "| model | ranges | allocated | counted |"
    yield "|---|--:|--:|--:|"
    for model, named, count, dropout in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found = peaks_of(Path(folder), pytest.MonkeyPatch(), model, named, count, dropout)
        allocated, counted = (size / GIB for size in max(found.values()))
        dropped = f", dropout {dropout:g}" if dropout else ""
        yield f"| `{model}`{dropped} | {count} | {allocated:.2f} GiB | {counted:.2f} GiB |"


if __name__ == "__main__":
    print("\n".join(table()))
