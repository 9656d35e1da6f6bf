"""What tests/test_golden.py records: the engine's bits, and a short training run that no rounding can derail.

The run is the demo's, made so that it is a smooth function of its weights:

- weights are drawn from integers (`tests.helpers.integers`), all in float32, the experts' too: nothing is
  rounded to bfloat16, where a last bit can become a 256th of the value;
- routers are overruled: token `position` of row `sample` goes to experts that a hash chooses. The routers'
  weights still count; their own choices are noted beside;
- AdamW divides by sqrt(v) + 1e-3 instead of 1e-8, which would make full steps of the rounding of zeros.

Rounding then moves losses as a small change of the weights does. A float32 sum of n products, in whatever
order, is the exact sum for weights that are off by a relative n u at the very most (u = 2**-24; Higham,
Accuracy and Stability of Numerical Algorithms, 3.1) and by sqrt(n) u in practice (Higham and Mary 2019). So
the bound is measured: the same run with every weight off by sqrt(n) u, n its row's length, with random signs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.local_cluster import LocalCluster, LocalHandle
from kt_ray.actors.specs import actor_specs
from kt_ray.demo.builder import ensure_demo_model
from kt_ray.model.dropout import CounterDropout
from kt_ray.native import DropoutSpec, Engine, ExpertLora, ExpertMatrix, ExpertWeights
from kt_ray.native.matrix import GGUF_BLOCKS
from kt_ray.runs.prepare import prepare
from kt_ray.train.trainer import Events, Trainer
from tests.helpers.composing import compose
from tests.helpers.integers import integers, uniform
from tests.helpers.reference.routing import find_router

# ------------------------------------------------------------------ the engine

T, K, E, H, I, R = 37, 2, 5, 96, 64, 5  # tokens, slots, experts, hidden, intermediate, rank
GGUF = {"q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}  # where a block's half floats are
ROW_CASES = ("f32", "bf16", "fp8", "mxfp4", "int8", "int4", *GGUF)
ENGINE_CASES = (*ROW_CASES, "int8_products")
ROW_SIZES = ((544, 160), (768, 256))  # whole steps of 128 elements and a rest; whole blocks of GGUF


def engine_digests(isa: str, case: str) -> dict[str, str]:
    """SHA-256 (shortened) of every result of one forward and backward with two adapters and dropout."""
    h, i = (256, 256) if case in GGUF else (H, I)
    weights, lora = _weights(case, h, i), _lora(h, i)
    grads = [adapter.zeros_like() for adapter in lora]
    keys = (integers("sample", (T,), 1 << 20) << 32) + torch.arange(T)
    with Engine(isa, threads=2, int8_products=case == "int8_products") as engine:
        y, saved = engine.forward(
            weights,
            uniform("x", (T, h)),
            integers("ids", (T, K), E + 1),  # E: no expert
            uniform("router", (T, K)).abs(),
            lora=lora,
            adapter_of_token=integers("adapter", (T,), 3) - 1,  # -1: none
            dropout=DropoutSpec(0.1, seed=7, step=2),
            keys=keys,
        )
        dx, dw = engine.backward(weights, saved, uniform("dy", (T, h)), lora=lora, lora_grads=grads)
    results = {"y": y, "dx": dx, "dw": dw}
    for a, adapter in enumerate(grads):
        results |= {f"{a}.{name}": tensor for name, tensor in adapter.named().items()}
    return {name: digest(tensor) for name, tensor in results.items()}


def row_digests(isa: str) -> dict[str, str]:
    """The same of forwards that go by rows of the weights, by format: up to 12 rows at an expert."""
    tokens, found = 12, {}
    with Engine(isa, threads=2) as engine:
        for case in ROW_CASES:
            h, i = ROW_SIZES[case in GGUF]
            found[case] = digest(
                engine.forward(
                    _weights(case, h, i),
                    uniform("x", (tokens, h)),
                    integers("ids", (tokens, K), 3) * 2,
                    uniform("router", (tokens, K)).abs(),
                    lora=_lora(h, i),
                    adapter_of_token=integers("adapter", (tokens,), 3) - 1,
                    save=False,
                )[0]
            )
    return found


def _weights(case: str, h: int, i: int) -> ExpertWeights:
    make = _gguf if case in GGUF else _MATRICES.get(case, _plain)
    return ExpertWeights(
        gate=make(case, "gate", i, h),
        up=make(case, "up", i, h),
        down=make(case, "down", h, i),
        layer=3,
        expert_ids=tuple(range(10, 10 + E)),
    )


def _lora(h: int, i: int) -> list[ExpertLora]:
    return [
        ExpertLora(
            *(
                uniform(f"lora {a} {name}", shape, 0.25)
                for name, shape in (
                    *(("gate_a", (E, R, h)), ("gate_b", (E, i, R)), ("up_a", (E, R, h))),
                    *(("up_b", (E, i, R)), ("down_a", (E, R, i)), ("down_b", (E, h, R))),
                )
            ),
            scale=1.5,
        )
        for a in range(2)
    ]


def digest(*tensors: Tensor) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def _plain(case: str, name: str, n: int, k: int) -> Tensor:
    return uniform(name, (E, n, k), 0.125).to(torch.float32 if case == "f32" else torch.bfloat16)


def _fp8(case: str, name: str, n: int, k: int) -> ExpertMatrix:
    codes = integers(name, (E, n, k), 256)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes).to(torch.uint8)  # no NaN
    side = 32 if k < 128 else 128
    scales = uniform(f"{name} scales", (E, -(-n // side), -(-k // side))).abs() * 2.0**-9
    return ExpertMatrix.fp8(codes.view(torch.float8_e4m3fn), scales, (side, side))


def _mxfp4(case: str, name: str, n: int, k: int) -> ExpertMatrix:
    blocks = integers(name, (E, n, k // 32, 16), 256).to(torch.uint8)
    return ExpertMatrix.mxfp4(blocks, (integers(f"{name} scales", (E, n, k // 32), 3) + 121).to(torch.uint8))


def _int4(case: str, name: str, n: int, k: int) -> ExpertMatrix:
    packed = (integers(name, (E, n, k // 8), 1 << 32) - (1 << 31)).to(torch.int32)
    return ExpertMatrix.int4(packed, uniform(f"{name} scales", (E, n, k // 32)).abs() * 2.0**-6)


def _int8(case: str, name: str, n: int, k: int) -> ExpertMatrix:
    codes = (integers(name, (E, n, k), 255) - 127).to(torch.int8)
    return ExpertMatrix.int8(codes, uniform(f"{name} scales", (E, n)).abs() * 2.0**-9)


def _gguf(case: str, name: str, n: int, k: int) -> ExpertMatrix:
    elements, size = GGUF_BLOCKS[case]
    blocks = integers(name, (E, n, k // elements, size), 256).to(torch.uint8)
    halves = (uniform(f"{name} scales", (E, n, k // elements)).abs() * 2.0**-9).half().view(torch.uint8)
    for at in GGUF[case]:
        blocks[..., at : at + 2] = halves.view(E, n, k // elements, 2)
    return ExpertMatrix.gguf(case, blocks.view(E, n, -1))


_MATRICES: dict[str, Callable[[str, str, int, int], Tensor | ExpertMatrix]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "int8": _int8,
    "int4": _int4,
    "int8_products": _int8,
}

# ------------------------------------------------------------------ the training run

STEPS = 4
SETTINGS = (
    "model=demo_random",
    "data=demo",
    "model.dtype=float32",
    "cluster=local",
    "rule=cpu_2workers_2sockets",
    "rule.worker_threads=1",
    "rule.experts.threads=1",
    "rule.groups=2",
    "rule.wave=4",
    "lora.dropout=0.1",
    "optim.eps=1e-3",
    "optim.weight_decay=0.01",
    "optim.warmup=2",
    "optim.max_grad_norm=0.5",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=0",
)
UNIT = 2.0**-24


def write_model(directory: Path, *, nudge: str = "") -> Path:
    """The demo's dimensions and tokenizer, with weights out of integers, all float32.

    Args:
        nudge: names random signs; every weight is then off by a relative sqrt(n) u, n its row's length.
    """
    source = Path(ensure_demo_model("demo"))
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    tensors = load_file(directory / "model.safetensors")
    for name, old in tensors.items():
        if old.dim() == 1 and "bias" not in name:  # norms
            value = torch.ones(old.shape)
        elif old.dim() == 1:  # the router's correction
            value = uniform(name, old.shape, 0.02)
        else:
            value = uniform(name, old.shape, (3 / old.shape[-1]) ** 0.5)
        if nudge:
            sign = integers(f"{nudge} {name}", old.shape, 2) * 2 - 1
            value = (value.double() * (1 + sign * (old.shape[-1] ** 0.5 * UNIT))).to(torch.float32)
        tensors[name] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass
class Record:
    """What one run did.

    Attributes:
        batches: per step: the rows' numbers by wave, replica, group and micro-batch, and a digest of their
            tokens, labels and lengths.
        calls: what the loop asked of the cluster, in order.
        rates: learning rate per step. clips: factor on the gradients per step.
        losses, norms: per step; norms before clipping.
        adapters: name -> the first value of a LoRA matrix before training; of the routed experts number 5's.
        routes: layer -> (sample, position) -> what the router itself chose at step 0, sorted, and how sure it
            was: the smallest gap between scores that decides the choice, over the rounding of that gap.
    """

    batches: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    clips: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    adapters: dict[str, float] = field(default_factory=dict)
    routes: dict[int, dict[tuple[int, int], tuple[tuple[int, ...], float]]] = field(default_factory=dict)


def train(model_dir: Path, isa: str, *changes: str) -> Record:
    """The run on this machine; `changes` are further settings."""
    prepared = prepare(compose([*SETTINGS, f"model.path={model_dir}", f"rule.experts.isa={isa}", *changes]))
    record = Record(batches=[_batches(prepared.batches.train(step)) for step in range(STEPS)])
    cluster = _WatchedCluster(prepared.plan, actor_specs(prepared.plan, prepared.config, str(model_dir)))
    cluster.record = record
    try:
        cluster.start()
        parameters = cluster.parameters()
        record.adapters = {
            name: float(parameters[name].flatten()[0])
            for name in sorted(parameters)
            if ".experts." not in name or ".experts.5." in name
        }
        with _overruled_routers(cluster, record):
            summary = Trainer(prepared.config, cluster, prepared.batches, Events()).run()
    finally:
        cluster.shutdown()
    record.losses, record.norms = summary.losses, summary.grad_norms
    return record


class _WatchedCluster(LocalCluster):
    """Notes what the training loop asks for."""

    record: Record

    def run_pass(self, spec: Any) -> Any:
        self.record.calls.append(f"{spec.kind} {spec.step}")
        return super().run_pass(spec)

    def prepare(self, step: int) -> float:
        self.record.calls.append(f"prepare {step}")
        return super().prepare(step)

    def commit(self, step: int, lr: float, clip: float) -> None:
        self.record.calls.append(f"commit {step}")
        self.record.rates.append(lr)
        self.record.clips.append(clip)
        super().commit(step, lr, clip)


def _batches(waves: Sequence[Any]) -> Any:
    """Rows and tokens of a step."""
    whole = hashlib.sha256()

    def rows(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return [rows(p) for p in part]
        for array in (part.input_ids, part.labels, part.lengths):
            whole.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return part.sample_ids.tolist()

    return [rows(waves), whole.hexdigest()[:16]]


def hashed_experts(layer: int, samples_N: Tensor, positions_N: Tensor, experts: int, top_k: int) -> Tensor:
    """int64 [N, K]: different experts for every token, whatever the routers say; `experts` a power of two."""
    mixed_N = (layer * 1299709 + samples_N * 7919 + positions_N * 104729) * 2654435761 % 2**32 >> 12
    stride_N = (mixed_N // experts % (experts // 2)) * 2 + 1
    return (mixed_N[:, None] + stride_N[:, None] * torch.arange(top_k)) % experts


@contextmanager
def _overruled_routers(cluster: LocalCluster, record: Record) -> Iterator[None]:
    routers = []
    for handle in cluster.workers:
        assert isinstance(handle, LocalHandle) and isinstance(handle.actor, AttentionWorker)
        for layer in handle.actor.stage.moe_layers:
            module = handle.actor.stage.model.layers[layer]
            rows = next(m for m in module.modules() if isinstance(m, CounterDropout)).context
            router = find_router(module)
            router.forward = _overruled(router, layer, rows, record)  # type: ignore[method-assign]
            routers.append(router)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def _overruled(router: Any, layer: int, rows: Any, record: Record) -> Callable[[Tensor], Any]:
    """DeepSeek-V3's router with experts that a hash chooses; its weights for these."""
    own, notes = router.forward, record.routes.setdefault(layer, {})

    def forward(x: Tensor) -> Any:
        logits_NE, _, chosen_NK = own(x)
        scores_NE = logits_NE.sigmoid()
        ids_NK = hashed_experts(layer, rows.samples_N, rows.positions_N, router.num_experts, router.top_k)
        weights_NK = scores_NE.gather(1, ids_NK)
        weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
        if rows.step == 0:
            margins = _margins(router, scores_NE.detach(), x.detach().view(-1, x.shape[-1]), layer)
            for n, key in enumerate(zip(rows.samples_N.tolist(), rows.positions_N.tolist(), strict=True)):
                notes[key] = tuple(sorted(chosen_NK[n].tolist())), float(margins[n])
        return logits_NE, weights_NK * router.routed_scaling_factor, ids_NK

    return forward


def _margins(router: Any, scores_NE: Tensor, x_NH: Tensor, layer: int) -> Tensor:
    """[N]: the gap between scores that decides each choice, over what rounding can do to such a gap.

    A logit is off by H u |w| |x| at the most, from its own sum and from each layer before it; the slope of a
    sigmoid is at most 1/4, and a gap has two ends.
    """
    biased_NE = scores_NE + router.e_score_correction_bias
    groups_NG = biased_NE.view(len(x_NH), router.num_group, -1).topk(2, dim=-1).values.sum(dim=-1)
    group_order = groups_NG.sort(dim=-1, descending=True)
    group_gap = group_order.values[:, router.topk_group - 1] - group_order.values[:, router.topk_group]
    allowed = torch.zeros_like(groups_NG).scatter(1, group_order.indices[:, : router.topk_group], 1.0).bool()
    allowed_NE = allowed.repeat_interleave(biased_NE.shape[1] // router.num_group, dim=1)
    ranked = biased_NE.masked_fill(~allowed_NE, float("-inf")).sort(dim=-1, descending=True).values
    gap_N = torch.minimum(group_gap / 2, ranked[:, router.top_k - 1] - ranked[:, router.top_k])
    logit = x_NH.shape[1] * UNIT * router.weight.norm(dim=1).max() * x_NH.norm(dim=1)
    return gap_N / ((layer + 1) * 2 * logit / 4)


def spread(runs: Sequence[Record], of: Record) -> Mapping[str, list[float]]:
    """The largest change per step, in losses and in norms, of runs with nudged weights."""
    return {
        name: [max(abs(getattr(run, name)[s] - getattr(of, name)[s]) for run in runs) for s in range(STEPS)]
        for name in ("losses", "norms")
    }
