"""What to change when a plan does not fit: the smallest changes that make it fit, tried in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from kt_ray.config.schema import Config, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.describe import nominal_hardware
from kt_ray.hardware.machine import Hardware, with_hosts
from kt_ray.placement.balance import without_load
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan

SHORTEST_ROW = 64  # tokens; shorter rows are no remedy
MOST_ELSEWHERE = 3  # rules named for other hardware


class Remedy(NamedTuple):
    """A change that fits: command-line overrides, and what it costs."""

    overrides: str
    effect: str


def remedies(
    dims: ModelDims, config: Config, hardware: Hardware, rules: Mapping[str, RuleConfig]
) -> tuple[Remedy, ...]:
    """Changes under which the plan fits, the least intrusive first; empty when nothing tried does.

    Args:
        rules: other rules by option name (conf/rule), each tried as it stands: on this hardware and,
            where none fits there, on the hardware the rule is drawn up for.
    """
    found: list[Remedy] = []
    kinds: set[str] = set()
    for kind, remedy, changed in _candidates(config, rules):
        if kind not in kinds and _fits(dims, changed, hardware):
            found.append(remedy)
            if kind != "rule":  # of several sizes of one change the first, smallest one is enough
                kinds.add(kind)
    if not found:
        for overrides, changed in _combined(config):
            if _fits(dims, changed, hardware):
                found.append(Remedy(overrides, "all of these together"))
                break
    if not any(remedy.overrides.startswith("rule=") for remedy in found):
        found += _elsewhere(dims, config, rules)[:MOST_ELSEWHERE]
    return tuple(found)


def _elsewhere(dims: ModelDims, config: Config, rules: Mapping[str, RuleConfig]) -> list[Remedy]:
    """Rules that fit the hardware they are drawn up for, the least hardware first."""
    fitting: list[tuple[tuple[int, int], Remedy]] = []
    for name, rule in rules.items():
        hardware = with_hosts(nominal_hardware(rule), rule.nodes)
        if name != "auto" and _fits(dims, replace(config, rule=rule), hardware):
            size = (sum(s.memory_bytes for s in hardware.sockets), len(hardware.gpus))
            fitting.append((size, Remedy(f"rule={name}", f"on other hardware: {describe(hardware)}")))
    return [remedy for _, remedy in sorted(fitting)]


def _placed(rule: RuleConfig) -> str:
    if rule.nodes > 1:
        return f"{rule.nodes} hosts like this one, same results"
    return "another placement, same results"


def describe(hardware: Hardware) -> str:
    """Hardware in a few words: "4 x 24 GB GPU, 2 sockets x 48 cores, 1,024 GiB each"."""
    parts = []
    if hardware.gpus:
        parts.append(f"{len(hardware.gpus)} x {hardware.gpus[0].name}")
    sockets, hosts = hardware.on(0), hardware.hosts
    plural = "sockets" if len(sockets) > 1 else "socket"
    memory = sockets[0].memory_bytes >> 30
    each = " each" if len(sockets) > 1 else ""
    if hosts > 1:
        parts.append(
            f"{hosts} hosts of {len(sockets)} {plural} x {sockets[0].cores} cores, {memory:,} GiB{each}"
        )
        return ", ".join(parts)
    parts.append(f"{len(sockets)} {plural} x {sockets[0].cores} cores, {memory:,} GiB{each}")
    return ", ".join(parts)


def shortage(plan: Plan) -> str:
    """Which device lacks how much, the worst first; "" when everything fits."""
    over = sorted((b for b in plan.budgets if not b.fits), key=lambda b: b.capacity - b.total)
    return ", ".join(f"{b.device} lacks {(b.total - b.capacity) / 2**30:.1f} GiB" for b in over)


def _candidates(config: Config, rules: Mapping[str, RuleConfig]) -> Iterator[tuple[str, Remedy, Config]]:
    """Single changes: same results first, then a smaller step, then a smaller adapter."""
    rule = config.rule
    if rule.experts.activations == "retain":
        yield (
            "activations",
            Remedy("rule.experts.activations=recompute", "same results, slower expert backward"),
            replace(config, rule=replace(rule, experts=replace(rule.experts, activations="recompute"))),
        )
    if isinstance(rule.wave, int):
        yield (
            "wave",
            Remedy("rule.wave=auto", "same results, each pass over the experts' weights serves fewer tokens"),
            replace(config, rule=replace(rule, wave="auto")),
        )
    for name, other in rules.items():
        if name != rule.name:
            yield (
                "rule",
                Remedy(f"rule={name}", _placed(other)),
                replace(config, rule=other),
            )
    if config.trainer.micro_batch_size > 1:
        yield (
            "micro",
            Remedy("trainer.micro_batch_size=1", "same results, more and smaller attention passes"),
            replace(config, trainer=replace(config.trainer, micro_batch_size=1)),
        )
    for rows in _halves(config.trainer.batch_size, rule.replica_count):
        yield (
            "batch",
            Remedy(f"trainer.batch_size={rows}", "fewer rows per optimizer step"),
            _with_batch(config, rows),
        )
    for length in _halves(config.data.max_length, SHORTEST_ROW):
        yield (
            "length",
            Remedy(f"data.max_length={length}", "longer rows are cut off"),
            replace(config, data=replace(config.data, max_length=length)),
        )
    for rank in _halves(config.lora.rank, 1):
        yield (
            "rank",
            Remedy(f"lora.rank={rank}", "a smaller adapter"),
            replace(config, lora=replace(config.lora, rank=rank)),
        )
    if config.lora.experts and config.lora.target_modules != "none":
        yield (
            "experts",
            Remedy("lora.experts=false", "the routed experts are not trained"),
            replace(config, lora=replace(config.lora, experts=False)),
        )


def _combined(config: Config) -> Iterator[tuple[str, Config]]:
    """Several changes at once, growing: recompute, one row per replica, shorter rows, no expert LoRA."""
    rule, rows = config.rule, config.rule.replica_count
    changed, text = config, ""
    if rule.experts.activations == "retain":  # auto comes to recompute by itself
        changed = replace(config, rule=replace(rule, experts=replace(rule.experts, activations="recompute")))
        text = "rule.experts.activations=recompute "
    changed = _with_batch(changed, rows)
    text += f"trainer.batch_size={rows} trainer.micro_batch_size=1"
    yield text, changed
    shorter, shorter_text = changed, text
    for length in _halves(config.data.max_length, SHORTEST_ROW):
        shorter = replace(changed, data=replace(changed.data, max_length=length))
        shorter_text = f"{text} data.max_length={length}"
        yield shorter_text, shorter
    if config.lora.experts and config.lora.target_modules != "none":
        yield text + " lora.experts=false", replace(changed, lora=replace(changed.lora, experts=False))
        yield (
            shorter_text + " lora.experts=false",
            replace(shorter, lora=replace(shorter.lora, experts=False)),
        )


def _with_batch(config: Config, rows: int) -> Config:
    micro = min(config.trainer.micro_batch_size, rows)
    return replace(config, trainer=replace(config.trainer, batch_size=rows, micro_batch_size=micro))


def _halves(value: int, least: int) -> Iterator[int]:
    """value/2, value/4, ... down to `least`."""
    while value // 2 >= least:
        value //= 2
        yield value


def _fits(dims: ModelDims, config: Config, hardware: Hardware) -> bool:
    try:
        return make_plan(dims, without_load(replace(config, mode="plan")), hardware).fits
    except UserError:
        return False
