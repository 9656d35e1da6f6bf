"""Targets, initialisation and injection."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kt_ray import cpu_products
from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.model.dropout import CounterDropout, DropoutContext
from kt_ray.model.lora import init_lora_a, inject_lora, is_gate, linear_names, resolve_targets
from kt_ray.placement.activation_bytes import adapter_scratch_bytes
from tests.placement.configs import make_config, small_dims

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.shared_expert.up_proj",
    "model.layers.1.mlp.shared_expert_gate",
    "model.layers.1.mlp.gate",
]


def test_auto_takes_all_but_gates() -> None:
    assert resolve_targets("auto", NAMES) == tuple(NAMES[:5])
    assert resolve_targets("none", NAMES) == ()


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate",
        "mlp.router",
        "mlp.shared_expert_gate",
        "mlp.router.proj",
        "router_a",
        "self_attn.indexer.wq_b",
        "self_attn.compressor.indexer.scorer.weights_proj",
    ],
)
def test_gates(name: str) -> None:
    assert is_gate(name)


@pytest.mark.parametrize(
    "name", ["mlp.gate_proj", "self_attn.g_proj", "mlp.shared_experts.gate_proj", "navigate"]
)
def test_not_gates(name: str) -> None:
    assert not is_gate(name)


def test_suffixes_and_regex() -> None:
    assert resolve_targets(["q_proj"], NAMES) == (NAMES[0], NAMES[3])
    assert resolve_targets(["self_attn.o_proj", "shared_expert_gate"], NAMES) == (NAMES[1], NAMES[5])
    assert resolve_targets(r"model\.layers\.1\..*proj", NAMES) == (NAMES[3], NAMES[4])


@pytest.mark.parametrize("projections", [["gate_proj", "up_proj", "down_proj"], ["w1", "w2", "w3"]])
def test_experts_projections_may_lie_in_the_experts_alone(projections: list[str]) -> None:
    targets, names = ["q_proj", *projections], NAMES[3:4]
    assert resolve_targets(targets, names, experts=True) == tuple(names)
    with pytest.raises(UserError, match="does not have outside its routed experts"):
        resolve_targets(targets, names)


@pytest.mark.parametrize("target", [["q_proj", "qkv_proj"], "qkv_proj", r".*lm_head", ["embed_tokens"]])
def test_unknown_targets_list_what_there_is(target: str | list[str]) -> None:
    with pytest.raises(UserError, match="gate, gate_proj, o_proj, q_proj, shared_expert_gate, up_proj"):
        resolve_targets(target, NAMES)


def test_broken_regex() -> None:
    with pytest.raises(UserError, match="not a regular expression"):
        resolve_targets("(q_proj", NAMES)


def test_init_is_a_function_of_seed_and_name() -> None:
    torch.manual_seed(1)
    a = init_lora_a(3, "x.lora_A.weight", (4, 100))
    torch.manual_seed(2)
    assert torch.equal(a, init_lora_a(3, "x.lora_A.weight", (4, 100)))
    assert not torch.equal(a, init_lora_a(4, "x.lora_A.weight", (4, 100)))
    assert not torch.equal(a, init_lora_a(3, "y.lora_A.weight", (4, 100)))
    assert a.dtype == torch.float32 and float(a.abs().max()) <= 0.1
    assert abs(float(a.std()) - 0.1 / 3**0.5) < 0.01


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 6)
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(8, 10, bias=False), "gate": nn.Linear(8, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inject(rslora: bool, dtype: torch.dtype) -> None:
    layer = _Layer().to(dtype).requires_grad_(False)
    layers = {"model.layers.4": layer}
    assert linear_names(layers) == [f"model.layers.4.{n}" for n in ("q_proj", "mlp.up_proj", "mlp.gate")]
    x = torch.randn(3, 8, dtype=dtype)
    before = layer(x)
    state = torch.get_rng_state()
    config = LoraConfig(rank=4, alpha=6.0, rslora=rslora, dropout=0.5)
    targets = ["model.layers.4.q_proj", "model.layers.4.mlp.up_proj"]
    parameters = inject_lora(layers, targets, config, 11, DropoutContext(), torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state()), "no global random numbers are drawn"
    assert list(parameters) == [f"{t}.lora_{side}.weight" for t in targets for side in "AB"]
    assert all(p.dtype == torch.float32 and p.requires_grad for p in parameters.values())
    trainable = {id(p) for p in layer.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in parameters.values()}
    a, b = parameters[targets[0] + ".lora_A.weight"], parameters[targets[0] + ".lora_B.weight"]
    assert torch.equal(a, init_lora_a(11, targets[0] + ".lora_A.weight", (4, 8))) and not b.any()
    assert isinstance(layer.q_proj.lora_dropout["default"], CounterDropout)
    assert layer.q_proj.lora_dropout["default"].name == targets[0]
    assert torch.equal(layer(x), before), "B is zero: the adapter changes nothing yet"
    with torch.no_grad():
        b.normal_()
    expected = before.float() + config.scale * (x.float() @ a.T @ b.T)
    assert config.scale == pytest.approx(6.0 / (2.0 if rslora else 4.0))
    torch.testing.assert_close(
        layer(x), expected.to(dtype), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
    )


def test_nothing_to_inject() -> None:
    layer = _Layer()
    assert (
        inject_lora({"model.layers.0": layer}, [], LoraConfig(), 0, DropoutContext(), torch.device("cpu"))
        == {}
    )
    assert type(layer.q_proj) is nn.Linear
    with pytest.raises(ValueError, match="none of this stage's layers"):
        inject_lora(
            {"model.layers.0": layer},
            ["model.layers.1.q_proj"],
            LoraConfig(),
            0,
            DropoutContext(),
            torch.device("cpu"),
        )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("n_in", "n_out"), [(1024, 256), (512, 512), (256, 1024)])
def test_a_plan_counts_what_a_module_needs_for_a_moment(
    n_in: int, n_out: int, dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of a module's forward and backward over what it keeps, by torch's own memory events.

    As on a GPU: without the blocks that an older CPU widens, if a test before this one has asked for that.
    """
    monkeypatch.setattr(cpu_products, "_widened", lambda *operands: False)
    name, rows = "model.layers.0.proj", 256
    layer = nn.ModuleDict({"proj": nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16)})
    layer.requires_grad_(False)
    context = DropoutContext(
        enabled=dropout > 0, samples_N=torch.arange(rows), positions_N=torch.zeros(rows, dtype=torch.int64)
    )
    config = make_config(lora={"rank": 4, "dropout": dropout})
    inject_lora({"model.layers.0": layer}, [name], config.lora, 0, context, torch.device("cpu"))
    x = torch.randn(rows, n_in, dtype=torch.bfloat16).requires_grad_()
    kept: list[Tensor] = []
    gradient = torch.ones(rows, n_out, dtype=torch.bfloat16)
    forward, left = _memory_peak(lambda: kept.append(layer["proj"](x)), tmp_path)
    backward, _ = _memory_peak(lambda: kept.pop().backward(gradient), tmp_path)
    dims = dataclasses.replace(small_dims(), lora_in_out=((("proj", n_in, n_out),),))
    planned = rows * adapter_scratch_bytes(dims, config, 0, "bfloat16")
    needed = max(forward - left, backward)
    assert 0.6 * planned <= needed <= 1.01 * planned


def _memory_peak(work: Callable[[], object], directory: Path) -> tuple[int, int]:
    """Bytes that `work` held at most, and those that it leaves behind."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as trace:
        work()
    trace.export_chrome_trace(str(directory / "trace.json"))
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    moves = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = list(itertools.accumulate(size for _, size in moves))
    return max(held), held[-1]


def test_importable_without_transformers() -> None:
    code = (
        "import sys; import kt_ray.model.lora, kt_ray.model.stage_spec; "
        "bad = {'transformers', 'peft', 'ray'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
