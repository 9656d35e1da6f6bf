"""What to change when a plan does not fit: the smallest changes that make it fit, tried in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from kt_ray.config.checks import check
from kt_ray.config.fields import show
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.describe import nominal_hardware
from kt_ray.hardware.machine import Hardware, with_hosts
from kt_ray.placement.balance import without_load
from kt_ray.placement.devices import first_kind, with_gpus
from kt_ray.placement.generation_memory import absorbs_keys, within_server
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import counted

SHORTEST_ROW = 64  # tokens; shorter rows are no remedy
MOST_ELSEWHERE = 3  # rules named for other hardware
UNEVEN = "same results to rounding, without the cards of another kind or size"


class Remedy(NamedTuple):
    """A change that fits: command-line overrides, and what it costs."""

    overrides: str
    effect: str


def remedies(
    dims: ModelDims, config: Config, hardware: Hardware, rules: Mapping[str, RuleConfig]
) -> tuple[Remedy, ...]:
    """Changes under which the plan fits, the least intrusive first; empty when nothing tried does.

    Args:
        rules: all rules by option name (conf/rule), each tried with the keys that are set over the present
            one, as its override would be: on this hardware and, where none fits there, on the hardware the
            rule is drawn up for.
    """
    base = rules.get(config.rule.name, RuleConfig())
    rules = {name: _with_set(other, config.rule, base) for name, other in rules.items()}
    fitting: list[Remedy] = []
    changed_keys: set[str] = set()
    for remedy, changed in _candidates(config, hardware, rules):
        key = remedy.overrides.partition("=")[0]
        if key not in changed_keys and _fits(dims, changed, hardware):
            fitting.append(remedy)
            changed_keys |= {key} - {"rule"}  # the first value of a key that fits is enough
    if not fitting:
        fitting += _several(dims, config, hardware)
    if not any(remedy.overrides.startswith("rule=") for remedy in fitting):
        fitting += _elsewhere(dims, config, rules)[:MOST_ELSEWHERE]
    return tuple(fitting)


def _several(dims: ModelDims, config: Config, hardware: Hardware) -> list[Remedy]:
    """The first changes at once that fit: of experts as they are, then of coarser ones."""
    memory = sum(socket.memory_bytes for socket in hardware.sockets)
    experts = dims.num_experts * len(dims.moe_layers)
    for backend in (None, *_backends(config)):
        if backend is not None and experts * dims.held_bytes(backend) > memory:
            continue
        own = {} if backend is None else {"rule.experts.backend": backend}
        for keys in ({**own, **keys} for keys in _combined(config)):
            if _fits(dims, with_keys(config, keys), hardware):
                text = " ".join(f"{key}={show(value)}" for key, value in keys.items())
                rounding = "" if backend is None else f"; {_rounded(backend)}"
                return [Remedy(text, f"all of these together{rounding}")]
    return []


def answer_remedy(dims: ModelDims, config: Config, hardware: Hardware) -> Remedy | None:
    """The first change under which a plan of answers fits; None = none of those tried."""
    rows_key = "serve.max_batch" if config.mode == "serve" else "generate.batch_size"
    generate, fewer = config.generate, "fewer answers at a time"
    changes: list[tuple[str, Any, str]] = []
    if isinstance(generate.cache_tokens, int):
        longest = config.data.max_length + generate.max_new_tokens
        rooms = ("auto", *_halves(generate.cache_tokens, longest))
        changes += [("generate.cache_tokens", tokens, fewer) for tokens in rooms]
    changes += [(rows_key, rows, fewer) for rows in _halves(generate.batch_size, 1)]
    changes += [
        ("generate.prefill_tokens", tokens, "fewer prompts are read at a time")
        for tokens in _halves(generate.prefill_tokens, SHORTEST_ROW)
    ]
    changes += [
        ("data.max_length", tokens, "no prompt longer than that is planned for")
        for tokens in _halves(config.data.max_length, SHORTEST_ROW)
    ]
    changes += [("rule.experts.backend", name, _rounded(name)) for name in _backends(config)]
    for key, value, effect in changes:
        # mode=serve plans for generate.batch_size rows, too.
        keys = {key: value} | ({"generate.batch_size": value} if key == rows_key else {})
        if make_plan(dims, with_keys(config, keys), hardware).fits:
            return Remedy(f"{key}={show(value)}", effect)
    return None


def _with_set(other: Any, asked: Any, base: Any) -> Any:
    """The rule (or part of one) with every key that `asked` has otherwise than the option it is made from."""
    changed = {}
    for field in fields(asked):
        name = field.name
        value, plain = getattr(asked, name), getattr(base, name)
        if is_dataclass(value):
            changed[name] = _with_set(getattr(other, name), value, plain)
        elif value != plain:
            changed[name] = value
    return replace(other, **changed)


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
    sockets, hosts = hardware.on(0), hardware.hosts
    sizes = [socket.memory_bytes for socket in sockets]
    # What the firmware keeps for itself makes nodes differ a little.
    alike = len({socket.cores for socket in sockets}) == 1 and max(sizes) <= 1.05 * min(sizes)
    kinds = Counter((s.cores, sizes[0] if alike else s.memory_bytes) for s in sockets)
    text = " + ".join(
        f"{counted(count, 'socket')} x {cores} cores, {size >> 30:,} GiB" + " each" * (count > 1)
        for (cores, size), count in kinds.items()
    )
    text = f"{hosts} hosts of {text}" if hosts > 1 else text
    cards = Counter(gpu.name for gpu in hardware.gpus)
    return f"{' + '.join(f'{count} x {name}' for name, count in cards.items())}, {text}" if cards else text


def shortage(plan: Plan) -> str:
    """Which device lacks how much, the worst first; "" when everything fits."""
    over = sorted((b for b in plan.budgets if not b.fits), key=lambda b: b.capacity - b.total)
    return ", ".join(f"{b.device} lacks {(b.total - b.capacity) / 2**30:.1f} GiB" for b in over)


def _candidates(
    config: Config, hardware: Hardware, rules: Mapping[str, RuleConfig]
) -> Iterator[tuple[Remedy, Config]]:
    """Single changes: same results first, then fewer answers at a time, a smaller step, coarser experts, a
    smaller adapter."""
    rule, lora = config.rule, config.lora

    def change(key: str, value: object, effect: str) -> tuple[Remedy, Config]:
        return Remedy(f"{key}={show(value)}", effect), with_keys(config, {key: value})

    if rule.experts.activations == "retain":
        yield change("rule.experts.activations", "recompute", "same results, slower expert backward")
    if rule.experts.activations == "int8":
        yield change("rule.experts.activations", "recompute", "gate and up unrounded, slower expert backward")
    if rule.activations != "auto":
        yield change("rule.activations", "auto", "same results, in whichever memory there is room")
    if rule.attention_output == "retain":
        yield change("rule.attention_output", "auto", "same results, less memory of attention workers")
    if isinstance(rule.resident_layers, int):
        yield change("rule.resident_layers", "auto", "same results, as many weights on the GPUs as fit")
    if rule.gpu_memory != "auto":
        yield change("rule.gpu_memory", "auto", "same results, all that the cards have")
    for stay in (*_halves(rule.experts.gpu_resident, 1), 0) if rule.experts.gpu_resident else ():
        yield change("rule.experts.gpu_resident", stay, "same results to rounding, fewer experts on the GPUs")
    if not isinstance(rule.experts.stream, str):
        yield change("rule.experts.stream", "auto", "same results to rounding, as many experts as fit")
    if isinstance(rule.experts.sockets, int):
        yield change("rule.experts.sockets", "auto", "same results to rounding, experts on every socket")
    if rule.layers:
        yield change("rule.layers", None, "same results to rounding, layers divided by memory")
    alike, used = first_kind(hardware), len(with_gpus(rule, hardware).gpus)
    if alike < used and rule.device != "cpu":
        yield change("rule.gpus", alike, UNEVEN)
    if isinstance(rule.wave, int):
        fewer = "same results, each pass over the experts' weights serves fewer tokens"
        yield change("rule.wave", "auto", fewer)
    for name, other in rules.items():
        if name != rule.name:
            yield Remedy(f"rule={name}", _placed(other)), replace(config, rule=other)
    for adapters in _halves(config.trainings, 1):
        yield change("train_server.adapters", adapters, "same results, more trainings wait on disk")
    if not absorbs_keys(config):
        rounds = "answers' log-probabilities round otherwise than training's"
        yield change("generate.latent_keys", "absorbed", rounds)
    if config.trainer.micro_batch_tokens != "auto":
        yield change(
            "trainer.micro_batch_tokens", "auto", "same results to rounding, smaller attention passes"
        )
    elif config.micro_batch_rows(rule.replica_count) > 1:
        yield change("trainer.micro_batch_size", 1, "same results, more and smaller attention passes")
    if config.trainings:
        for rows in _halves(config.serve.max_batch, 1):
            yield change("serve.max_batch", rows, "fewer answers at a time")
    elif config.answering_rows:
        if config.generate.cache_tokens != "auto":
            yield change("generate.cache_tokens", "auto", "no more room than the longest answers need")
        for rows in _halves(config.answering_rows, 1):
            yield change("generate.batch_size", rows, "fewer answers at a time, which take longer")
    for rows in _halves(config.trainer.batch_size, rule.replica_count):
        yield change("trainer.batch_size", rows, "fewer rows per optimizer step")
    for length in _halves(config.data.max_length, SHORTEST_ROW):
        yield change("data.max_length", length, "longer rows are cut off")
    for backend in _backends(config):
        yield change("rule.experts.backend", backend, _rounded(backend))
    for rank in _halves(lora.rank, 1) if lora.adapter is None else ():
        yield change("lora.rank", rank, "a smaller adapter")
    if lora.experts and lora.target_modules != "none" and lora.adapter is None:
        yield change("lora.experts", False, "the routed experts are not trained")


def _backends(config: Config) -> list[str]:
    return [name for name in ("AMXINT8", "AMXINT4") if name != config.rule.experts.backend]


def _rounded(backend: str) -> str:
    return f"experts are quantised to {backend[3:]} while they load: rounding without calibration"


def _combined(config: Config) -> Iterator[dict[str, Any]]:
    """Several changes at once, growing: recompute, one row per replica and one answer at a time, shorter
    rows, no expert LoRA."""
    keys: dict[str, Any] = {"trainer.batch_size": config.rule.replica_count, "trainer.micro_batch_size": 1}
    if config.trainer.stage == "grpo":  # whole groups
        keys["trainer.batch_size"] = max(config.rule.replica_count, config.grpo.group_size)
    if config.trainings:
        keys["serve.max_batch"] = 1
    elif config.answering_rows:
        keys["generate.batch_size"] = 1
        if config.generate.cache_tokens != "auto":
            keys["generate.cache_tokens"] = "auto"
    if config.trainer.micro_batch_tokens != "auto":
        keys["trainer.micro_batch_tokens"] = "auto"
    if config.rule.experts.activations in ("retain", "int8"):  # auto comes to recompute by itself
        keys = {"rule.experts.activations": "recompute", **keys}
    yield keys
    shortest = keys
    for length in _halves(config.data.max_length, SHORTEST_ROW):
        shortest = {**keys, "data.max_length": length}
        yield shortest
    if config.lora.experts and config.lora.target_modules != "none" and config.lora.adapter is None:
        yield {**keys, "lora.experts": False}
        yield {**shortest, "lora.experts": False}


def _halves(value: int, least: int) -> Iterator[int]:
    """value/2, value/4, ... down to `least`."""
    while value // 2 >= least:
        value //= 2
        yield value


def _fits(dims: ModelDims, config: Config, hardware: Hardware) -> bool:
    config = without_load(replace(config, mode="plan"))
    config = within_server(config) if config.trainings else config
    try:
        check(config)
        return make_plan(dims, config, hardware).fits
    except UserError:
        return False
