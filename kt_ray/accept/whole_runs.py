"""Section `runs`: training at real shapes against plan and prediction; random weights that take no disk."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kt_ray.accept.items import FAIL, PASS, WARN, CannotRunError, Claim, Found, Item, OutOfTimeError, Task
from kt_ray.config.compose import compose
from kt_ray.config.schema import Config
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.dims.model_dims import ModelDims
from kt_ray.disk import free_bytes
from kt_ray.doctor.machine_checks import run_bytes
from kt_ray.hardware.describe import gpu_memory_free
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.rate_files import rates_for
from kt_ray.placement.plan_types import Budget, Plan
from kt_ray.placement.render import counted, gib
from kt_ray.timing.choose import choose_plan
from kt_ray.timing.prediction import predict

GPU_MEMORY, HOST_MEMORY, PREDICTION = 0.05, 0.05, 0.15  # how far from the plan counts as right
STEPS = 4  # the first warms up
LEAST = 64  # tokens of a row
LEAST_SHARE = 0.25  # of its tokens a row must keep: else it is another one
# Items of a budget that grow with the number of layers with experts, and with that of all layers.
OF_EXPERTS = ("experts", "LoRA", "optimizer")
OF_LAYERS = ("weights", "kept activations", "caches")
CHARACTERS = 6  # of text per token, at least
SPARE = 0.9  # of the memory that nobody uses
TRAINING = 0.35  # of an item's time: weights, start, loading and a plan that is wrong take the rest


class Run(NamedTuple):
    """One model. rows: of a step, at most; length: tokens of a row."""

    name: str
    model: str
    format: str
    rows: int
    length: int
    shape: tuple[str, ...] = ()  # KEY=VALUE for config.json
    layers: int | None = None


RUNS = (
    Run("deepseek_v2_lite", "deepseek_v2_lite", "bf16", 8, 2048),
    Run("deepseek_v3", "deepseek_v3", "fp8", 8, 2048),
    Run("qwen3_30b", "qwen3_30b_a3b", "bf16", 8, 2048),
    Run("gpt_oss_120b", "gpt_oss_120b", "mxfp4", 8, 2048),
    Run("long_rows", "qwen3_30b_a3b", "bf16", 1, 32768),
)
TINY = Run(
    "tiny",
    "deepseek_v2_lite",
    "fp8",
    4,
    64,
    (
        *("hidden_size=256", "intermediate_size=512", "moe_intermediate_size=128", "n_routed_experts=8"),
        *("num_experts_per_tok=2", "num_attention_heads=4", "num_key_value_heads=4", "kv_lora_rank=64"),
        *("qk_nope_head_dim=32", "qk_rope_head_dim=16", "v_head_dim=32", "vocab_size=4096"),
    ),
    3,
)


def items(config: Config, hardware: Hardware, free: int, quick: bool) -> Iterator[Item]:
    """free: bytes of host memory that nobody uses."""
    total = sum(socket.memory_bytes for socket in hardware.sockets)
    sockets = tuple(
        replace(s, memory_bytes=int(s.memory_bytes * min(1.0, SPARE * free / total)))
        for s in hardware.sockets
    )
    unused = gpu_memory_free()
    gpus = tuple(
        replace(gpu, memory_bytes=min(gpu.memory_bytes, unused.get(gpu.uuid, gpu.memory_bytes)))
        for gpu in hardware.gpus
    )
    host = replace(hardware, sockets=sockets, gpus=gpus)
    for run in (TINY,) if quick else RUNS:
        yield _item(run, config, host)


def _item(run: Run, config: Config, hardware: Hardware) -> Item:
    title = f"Training {run.model} ({run.format}), rows of {run.length:,} tokens"
    return Item("runs", run.name, title, lambda task: _train(task, run, config, hardware))


class Fitted(NamedTuple):
    """What of a model is trained here, and the plan that says so."""

    layers: int
    whole: int
    rows: int
    length: int
    options: list[str]
    plan: Plan

    @property
    def what(self) -> str:
        """Of the model, and of its rows."""
        part = f"{self.layers} of {self.whole} layers" if self.layers < self.whole else "all layers"
        return f"{part}, {counted(self.rows, 'row')} of {self.length:,} tokens"


def _train(task: Task, run: Run, config: Config, hardware: Hardware) -> Found:
    folder = task.file.with_name(f"{run.name}_run")
    shutil.rmtree(folder, ignore_errors=True)  # of a round that the clock cut off
    folder.mkdir(parents=True)
    fitted = _fit(task, run, config, hardware, folder)
    out = task.file.with_suffix(".bench.json")
    launch = [sys.executable, "launch.py", *fitted.options]
    # memory_run looks at all processes; the run's own figures come from its directory.
    code = task.run([sys.executable, "benchmarks/memory_run.py", "--json", str(out), "--", *launch])
    for part in ("weights", "run/checkpoints", "run/adapter"):  # up to tens of GB
        shutil.rmtree(folder / part, ignore_errors=True)
    if code is None:
        raise OutOfTimeError(f"{fitted.what}: the time was over during the run")
    if code or not out.is_file():
        said = [line for line in task.log.read_text(errors="replace").splitlines() if "rror" in line]
        found = f"exit status {code}: {said[-1].strip() if said else 'see the log'}"
        return Found([Claim(FAIL, f"{run.model} is trained", found, "0", "README.md")])
    return _judge(run, fitted, json.loads(out.read_text(encoding="utf-8"))["records"][0])


def _fit(task: Task, run: Run, config: Config, hardware: Hardware, folder: Path) -> Fitted:
    """As many layers as memory holds, and as many tokens as the time allows.

    Raises:
        CannotRunError: not even one layer with experts fits, or the disk has no room for what a run writes.
        OutOfTimeError. RuntimeError: a program failed.
    """
    dims = _weights(task, run, run.layers, folder)
    whole, least = dims.num_layers, min(dims.moe_layers) + 1
    while True:
        options = _options(run, config, folder, run.rows, run.length)
        composed = compose(options)
        plan = choose_plan(dims, composed, hardware)
        if plan.fits:
            break
        layers = min(_layers_for(budget, dims) for budget in plan.budgets if not budget.fits)
        if dims.num_layers <= least:
            worst = max(plan.budgets, key=lambda b: b.total - b.capacity)
            need = (
                f"{least} layers need {gib(worst.total)} of {worst.device}, which has {gib(worst.capacity)}"
            )
            raise CannotRunError(need)
        dims = _weights(task, run, max(least, min(layers, dims.num_layers - 1)), folder)
    needed, free = run_bytes(composed, plan), free_bytes(folder)
    if needed > free:
        raise CannotRunError(f"a run writes {gib(needed)}, {gib(free)} are free at {folder}")
    rows, length = run.rows, run.length
    for _ in range(3):  # fewer tokens are slower ones, each
        speed = predict(plan, composed, rates_for(composed, hardware)).tokens_per_s
        tokens = int(TRAINING * task.seconds / STEPS * speed)
        if tokens >= rows * length:
            break
        rows = max(1, min(rows, tokens // run.length))
        length = max(LEAST, min(length, tokens // rows))
        options = _options(run, config, folder, rows, length)
        composed = compose(options)
        plan = choose_plan(dims, composed, hardware)
    if length < run.length * LEAST_SHARE:
        raise OutOfTimeError(f"{dims.num_layers} layers: no time for rows of {run.length:,} tokens")
    # The run looks at the whole machine; the plan above at what nobody uses of it.
    chosen = [f"rule.wave={plan.wave}", f"rule.groups={plan.groups}", f"rule.stages={plan.stages}"]
    chosen += [f"rule.replicas={plan.replicas}", f"rule.experts.activations={plan.experts[0].activations}"]
    chosen += [f"rule.activations={plan.activations}", f"rule.attention_output={plan.attention_output}"]
    return Fitted(dims.num_layers, whole, rows, length, [*options, *chosen], plan)


def _weights(task: Task, run: Run, layers: int | None, folder: Path) -> ModelDims:
    """The model's first layers (None = all) as a checkpoint of holes, and its dimensions."""
    weights = folder / "weights"
    shutil.rmtree(weights, ignore_errors=True)
    command = [sys.executable, "-m", "kt_ray.tools", "random", str(weights), "--model", run.model]
    command += ["--sparse", "--format", run.format, *(["--layers", str(layers)] if layers else [])]
    code = task.run([*command, *(["--set", *run.shape] if run.shape else [])])
    if code is None:
        raise OutOfTimeError("the time was over while its weights were made")
    if code != 0:
        raise RuntimeError(f"making its weights ended with exit status {code}")
    return dims_from_dir(str(weights))


def _layers_for(budget: Budget, dims: ModelDims) -> int:
    """How many layers a device has room for, as far as its items grow with them; dense ones come first."""
    layers, sparse = dims.num_layers, len(dims.moe_layers)
    experts = sum(size for item, size in budget.items.items() if item in OF_EXPERTS)
    rest = sum(size for item, size in budget.items.items() if item in OF_LAYERS)
    room = budget.capacity - budget.total + experts + rest + (layers - sparse) * experts / sparse
    return int(room / max(1.0, rest / layers + experts / sparse))


def _options(run: Run, config: Config, folder: Path, rows: int, length: int) -> list[str]:
    text = folder / "rows.jsonl"
    if not text.exists():
        text.write_text(long_rows(run.rows, CHARACTERS * run.length), encoding="utf-8")
    ray = ["cluster.address=local", "cluster.dashboard=false"] if config.cluster.name == "ray" else []
    return [
        *("model=custom", f"model.name={run.model}", f"model.path='{folder / 'weights'}'"),
        *("data=jsonl", f"data.path='{text}'", f"data.max_length={length}", "data.overflow=truncate"),
        *(f"cluster={config.cluster.name}", *ray, f"run.root='{folder}'", "run.name=run", "tracking=jsonl"),
        *(f"trainer.batch_size={rows}", f"trainer.max_steps={STEPS}"),
        *("trainer.eval_every=0", "data.eval_fraction=0", "eval.after_training=0"),
        *(f"trainer.timeline_every={STEPS}", "tracking.plot=false", "tracking.progress=false"),
    ]


def long_rows(count: int, characters: int) -> str:
    """Rows of prompt and completion with at least so many characters, each another text, as JSON lines."""
    words = ("lantern", "harbour", "copper", "meadow", "winter", "signal", "orchard", "marble", "thunder")
    lines = []
    for row in range(count):
        length = 0
        parts: list[str] = []
        while length < characters:
            parts.append(f"{words[(row * 7 + len(parts) * 5) % len(words)]} {row * 1000 + len(parts)}")
            length += len(parts[-1]) + 1
        lines.append(json.dumps({"prompt": f"Text {row}:", "completion": " ".join(parts)}))
    return "\n".join(lines) + "\n"


def _judge(run: Run, fitted: Fitted, record: Mapping[str, Any]) -> Found:
    page, what = "docs/hardware.md", f"{run.model}, {fitted.what}"
    found = f"{counted(record.get('steps', 0), 'step')}: {fitted.what}"
    claims = [Claim(PASS, f"{run.model} is trained", found, "a run", "README.md")]
    losses = record.get("losses") or []
    if len(losses) < STEPS or not all(math.isfinite(loss) for loss in losses):
        claims[0] = claims[0]._replace(status=FAIL, found=f"losses {losses}")
    speed, expected = record.get("tokens_per_s"), record.get("predicted_tokens_per_s")
    measured = run is not TINY  # whose figures say nothing about real shapes
    if measured and speed and expected:
        off = speed / expected - 1
        status = PASS if abs(off) <= PREDICTION else WARN
        found = f"{speed:,.0f} tokens/s, predicted {expected:,.0f} ({off:+.0%} of it)"
        claims.append(
            Claim(status, f"Prediction of {what}", found, f"±{PREDICTION:.0%}", "docs/prediction.md")
        )
    memory = [(f"host memory of {what}", record.get("peak_pss_bytes"), record.get("plan_bytes"), HOST_MEMORY)]
    for device, sizes in (record.get("gpu") or {}).items():
        memory.append((f"memory of {device}, {what}", sizes["peak_bytes"], sizes["plan_bytes"], GPU_MEMORY))
    for name, peak, planned, most in memory:
        if not measured or not peak or not planned:
            continue
        off = peak / planned - 1
        # Less than planned is safe; far less means that something larger would have fitted.
        status = PASS if abs(off) <= most else WARN if off < 0 else FAIL
        found = f"{gib(peak)}, planned {gib(planned)} ({off:+.0%})"
        claims.append(Claim(status, f"Plan's {name}", found, f"±{most:.0%}", page))
    row = (
        *(run.model, run.format, f"{fitted.layers} of {fitted.whole}", f"{fitted.rows} x {fitted.length}"),
        *(f"{record.get('median_s', 0):.3g}", f"{speed or 0:,.0f}", f"{expected or 0:,.0f}"),
    )
    header = ("model", "format", "layers", "rows x tokens", "s per step", "tokens/s", "predicted")
    return Found(claims, {"Whole runs": [header, row]}, fitted.plan.notes, record)
