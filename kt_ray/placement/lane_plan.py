"""From rule.experts.gpu_resident, stream and lane_device to what each actor's lane does, and its bytes.

Bytes of a lane, for each of its devices but for the two lines of the socket. Legend as in memory.py; s bytes
of a stored activation, P parameters of one expert, r LoRA rank.
    experts           the device's resident experts as stored (on a GPU: taken off the socket)
    workspace         two buffers for a batch of experts; a layer's adapters, twice; carried experts that are
                      held; a batch's matrices as numbers, with 16 bytes per element of its largest ones while
                      quantised ones are decoded, and with float8 products once more for each direction;
                      x, dy and dx of the group (T_g H (s + 8)); a batch's places for rows, at most LANE_ROWS:
                      24 (H + I) each (float8: 27), 8 I for gates and ups on their way from or to the host,
                      with dropout 24 bytes per input more
    runtime           a GPU's: the CUDA context of the expert actor's process
    kept activations  (socket) x, which all devices share, and 36 bytes per row; with a GPU its gates and ups
                      once more, as torch rounds page-locked blocks up to powers of two
    workspace         (socket) with a GPU every device's answer for a group, 4 T_g H rounded up likewise; and
                      one more, as torch keeps blocks of smaller groups
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from kt_ray.config.schema import Config, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import BACKEND_STORAGE
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.parts import gpu_named
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.lane_share import (
    LANE_ROWS,
    NOTHING,
    ExpertSizes,
    LaneRates,
    batch_size,
    choose_shares,
    places,
    resident_by_layer,
    whole_experts,
)
from kt_ray.placement.lora_sizes import expert_lora_params, expert_lora_share, lowest_kept
from kt_ray.placement.plan_types import ExpertActorPlan, LanePlan

Actors = tuple[ExpertActorPlan, ...]
HELD_ROOM = 0.9  # of a GPU's free memory that held experts may take


def lane_wanted(rule: RuleConfig) -> bool:
    """Whether the rule asks for a lane; rule.experts.stream=auto does where attention may be on GPUs."""
    asked = rule.experts
    streams = rule.device != "cpu" if asked.stream == "auto" else asked.stream != "off"
    return asked.gpu_resident > 0 or streams


def lane_devices(config: Config, hardware: Hardware) -> tuple[str, ...]:
    """ "cuda:i", …: where the expert actors of a host compute, all together; or "cpu", …: where each does.

    Raises:
        UserError: a GPU that is not there.
    """
    asked = config.rule.experts.lane_devices
    have = tuple(f"cuda:{gpu.index}" for gpu in hardware.gpus)
    named = have if asked == ("auto",) else asked
    if named and (set(named) == {"cpu"} or set(named) <= set(have)):
        return named
    stated = config.rule.experts.lane_device
    keys = [
        f"rule.experts.{key}={value}"
        for key, value, off in (
            ("gpu_resident", config.rule.experts.gpu_resident, 0),
            ("stream", config.rule.experts.stream, "off"),
        )
        if value != off
    ]
    taken = f" by rule.gpus={config.rule.gpus}" if isinstance(config.rule.gpus, int) else ""
    named_one = f"name one of {', '.join(have)}, or " if have else ""
    raise UserError(
        "experts cannot be computed on a GPU that is not there",
        where=f"{' and '.join(keys)}, rule.experts.lane_device={stated}",
        observed=f"GPUs on {hardware.source}{taken}: {', '.join(have) or 'none'}",
        required="a GPU" if stated == "auto" else stated,
        remedy=named_one + "set rule.experts.lane_device=cpu for a stand-in with the same numerics, or "
        "rule.experts.gpu_resident=0 rule.experts.stream=off",
    )


def check_products(config: Config, dims: ModelDims, hardware: Hardware, devices: Collection[str]) -> None:
    """Whether these devices can multiply as rule.experts.gpu_products says.

    Raises:
        UserError: FP8 is asked for, and weights are float32 or a GPU is known to have no FP8 products.
    """
    if config.rule.experts.gpu_products != "float8":
        return
    cards = [gpu for gpu in hardware.gpus if f"cuda:{gpu.index}" in devices]
    sheets = {gpu.name: gpu_named(gpu.name) for gpu in cards}
    without = [name for name, sheet in sheets.items() if sheet is not None and not sheet.float8]
    if dims.expert_format == "f32" and config.rule.experts.backend not in BACKEND_STORAGE:
        what, observed, required = "float32 experts are multiplied in float32", "float32", "another format"
    elif without:
        what, observed = "the GPU has no FP8 products", ", ".join(without)
        required = "compute capability 8.9 or higher (RTX 4090, L40, H100 and later)"
    else:
        return
    where = "rule.experts.gpu_products=float8"
    remedy = "set rule.experts.gpu_products=bfloat16"
    raise UserError(what, where=where, observed=observed, required=required, remedy=remedy)


def devices_of(devices: tuple[str, ...], actor: int, actors: int) -> tuple[str, ...]:
    """The part of a host's GPUs that its `actor`-th of `actors` expert actors computes on.

    Neighbours, as GPUs are numbered socket by socket. With fewer GPUs than actors, several share one.
    """
    count = len(devices)
    if "cpu" in devices:
        return devices
    if count <= actors:
        return (devices[actor * count // actors],)
    return devices[actor * count // actors : (actor + 1) * count // actors]


def plan_lanes(
    actors: Actors,
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    load: ExpertLoad | None,
    rates: LaneRates | None,
    hosts: int,
) -> tuple[Actors, list[str]]:
    """The actors with their lanes, and sentences for the plan's notes.

    Args:
        load: tokens per expert, by which resident experts are chosen; None = unknown.
        rates: of one actor's lane, by which stream=auto decides; None = nothing was measured.
        hosts: the first so many, whose GPUs are used.

    Raises:
        UserError: a GPU that is not there; more resident experts than a layer has; as `check_products`.
    """
    rule = config.rule.experts
    if not lane_wanted(config.rule):
        keys = (("lane_device", rule.lane_device, "auto"), ("gpu_products", rule.gpu_products, "bfloat16"))
        return actors, [
            f"rule.experts.{key}={value} changes nothing: no expert is resident or streamed"
            for key, value, default in keys
            if value != default
        ]
    if rule.gpu_resident > dims.num_experts:
        raise UserError(
            "more experts would stay on the GPU than a layer has",
            where="rule.experts.gpu_resident",
            observed=rule.gpu_resident,
            required=f"at most {dims.num_experts}",
            remedy=f"set rule.experts.gpu_resident={dims.num_experts} or less",
        )
    devices, notes = lane_devices(config, hardware), []
    check_products(config, dims, hardware, devices)
    there = ", ".join(devices)
    own = actors if "cpu" in devices else tuple(actor for actor in actors if actor.host < hosts)
    if len(own) < len(actors):
        notes.append(f"expert actors of other hosts compute all their experts on the CPU: host 0 has {there}")
    resident: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = ((),) * len(own)
    if rule.gpu_resident:
        held = {layer: [actor.experts_of(layer) for actor in own] for layer in dims.moe_layers}
        stay = min(rule.gpu_resident, *(sum(map(len, of_layer)) for of_layer in held.values()))
        as_before = load.residents if load is not None and rule.placement == "kept" else None
        if (
            load is not None
            and as_before is not None
            and all(len(as_before.get(layer, ())) == stay for layer in dims.moe_layers)
        ):
            stayed = {layer: [int(e in as_before[layer]) for e in range(dims.num_experts)] for layer in held}
            resident = resident_by_layer(held, stay, stayed)
            chosen_by = f"those of {load.source}"
        elif load is None:
            resident = resident_by_layer(held, stay, None)
            chosen_by = "the first ids of every actor's share: no load is known (rule.experts.load)"
        else:
            resident = resident_by_layer(held, stay, load.slots)
            chosen_by = f"the most used ones of {load.source}"
        notes.append(f"{stay} experts of each MoE layer stay on {there}: {chosen_by}")
    tokens = config.tokens_per_step // config.rule.experts.copy_count
    shares, said = lane_shares(expert_sizes(own, dims, config), tokens, config, rates, f"to {there}")
    lanes = {}
    for actor, stays in zip(own, resident, strict=True):
        beside = [a.rank for a in own if a.host == actor.host]
        of_host = devices_of(devices, beside.index(actor.rank), len(beside))
        lanes[actor.rank] = replace(shares, devices=of_host, resident=stays)
    made = tuple(replace(actor, lane=lanes.get(actor.rank)) for actor in actors)
    if not any(actor.lane is not None and (actor.lane.resident or actor.lane.streams) for actor in made):
        return actors, notes + said
    if "cpu" in devices:
        said.append(
            "rule.experts.lane_device=cpu: a stand-in on the same cores, for its numerics, not faster"
        )
    return made, notes + said


def lane_shares(
    sizes: ExpertSizes, tokens: int, config: Config, rates: LaneRates | None, where: str
) -> tuple[LanePlan, list[str]]:
    """A lane without devices: what is carried in each call. And sentences for the plan's notes.

    Args:
        tokens: of the largest call. where: who carries, or where to, for the notes.
    """
    asked, off = config.rule.experts.stream, LanePlan((), float8=config.rule.experts.gpu_products == "float8")
    if asked == "off":
        return off, []
    if not isinstance(asked, str):
        said = f"{float(asked):.0%} of the other experts are streamed {where} per call"
        return replace(off, shares=((0, float(asked)),)), [said]
    if rates is None:
        return off, ["rule.experts.stream=auto: off, as no rates of the GPU and its link are known"]
    if rates.tuning == NOTHING:
        return off, []
    recompute = config.rule.experts.activations == "recompute"
    steps, later, split, again = choose_shares(sizes, rates, tokens, recompute=recompute)
    if not steps:
        said = f"off; at {tokens:,} tokens per call it would save {split.gain:.0%}"
        return off, [f"rule.experts.stream=auto: {said} (rates: {rates.source})"]
    said = f"from {steps[0][0]:,} tokens per call on; at {tokens:,} tokens {steps[-1][1]:.0%} of the experts"
    if again and not recompute:
        said += ", whose gates and ups are computed again in backward"
    said += f", which saves {split.gain:.0%} of it (rates: {rates.source})"
    chosen = replace(off, shares=steps, later=later, recompute=again)
    return chosen, [f"rule.experts.stream=auto: {said}"]


def held_experts(actor: ExpertActorPlan, dims: ModelDims, groups: int) -> int:
    """Carried experts of a layer, on each device, that a wave's calls use after each other."""
    lane = actor.lane
    if lane is None or not lane.streams or groups == 1:
        return 0
    share = max(share for _, share in (*lane.shares, *lane.later))
    resident = {layer: len(ids) for layer, ids in lane.resident}
    most = max(len(actor.experts_of(layer)) - resident.get(layer, 0) for layer in dims.moe_layers)
    return -(-whole_experts(share, most) // len(lane.devices))


def with_held(
    actors: Actors, dims: ModelDims, config: Config, groups: int, room: Mapping[str, float]
) -> Actors:
    """The actors with lanes that hold as many carried experts as there is room for.

    Args:
        room: bytes by name of every GPU's budget that nothing else needs, of which a tenth stays free; a
            stand-in has room for all.
    """
    stored = dims.most_held_bytes(config.rule.experts.backend)
    sharing = Counter(actor.place(d) for actor in actors if actor.lane for d in set(actor.lane.devices))
    made = []
    for actor in actors:
        lane, wanted = actor.lane, held_experts(actor, dims, groups)
        held = wanted
        if lane is not None and lane.cuda:
            places = [actor.place(device) for device in lane.devices]
            fits = min(HELD_ROOM * room.get(place, 0.0) / sharing[place] for place in places) // stored
            held = min(wanted, max(0, int(fits)))
        if lane is not None:  # what does not stay is carried by every call
            lane = replace(lane, held=held, later=lane.later if held == wanted and held else ())
        made.append(replace(actor, lane=lane))
    return tuple(made)


def expert_sizes(actors: Actors, dims: ModelDims, config: Config, *, together: bool = False) -> ExpertSizes:
    """What the fullest actor's layer is made of, or that of all of them, resident experts left out."""
    layers = dims.moe_layers
    counts = [actor.counts(layers) for actor in actors]
    held = max(map(sum, zip(*counts, strict=True))) if together else max(map(max, counts))
    held = max(1, held - config.rule.experts.gpu_resident // len(actors))
    return ExpertSizes(
        held=held,
        experts=dims.choices,
        per_token=dims.experts_per_token,
        params=dims.expert_params,
        bytes=dims.held_bytes(config.rule.experts.backend)
        + 4 * expert_lora_params(dims, config.lora) * expert_lora_share(dims, config.lora),
        hidden=dims.expert_width,
        kept=dims.expert_intermediate * (2 if dims.gated else 1) * (4 if dims.expert_format == "f32" else 2),
    )


@dataclass(frozen=True)
class LaneMemory:
    """What the bytes of one actor's lane are counted from."""

    expert: float  # bytes of one expert of one layer as stored
    largest: float  # the same of the layer whose experts take most: places and buffers take any layer's
    adapter: float  # of its LoRA
    group: int  # T_g
    total: int  # T
    slots: float  # rows of the actor per token
    runtime: int  # bytes of a CUDA context
    float32: bool  # whether its weights are
    plain: bool  # whether they are stored as they are multiplied


def resident_count(actor: ExpertActorPlan) -> int:
    """Experts, over all layers, whose only place is the lane's GPUs; 0 with a stand-in on the CPU."""
    if actor.lane is None or not actor.lane.cuda:
        return 0
    return sum(len(ids) for _, ids in actor.lane.resident)


def lane_lines(
    dims: ModelDims, config: Config, actor: ExpertActorPlan, size: LaneMemory, home: str
) -> Iterator[tuple[str, str, float]]:
    """(device, item, bytes) that a lane adds; a GPU's residents are to be taken off the socket `home`."""
    lane = actor.lane
    if lane is None:
        return
    width, inter, cuda = dims.expert_width, dims.expert_intermediate, lane.cuda
    element, lowest = 4 if size.float32 else 2, lowest_kept(dims, config)
    buffers = lane_buffers(dims, config, lane, size, max(actor.counts(dims.moe_layers)))
    buffers += lane.held * size.largest
    for number, device in enumerate(lane.devices):
        where = device if cuda else home
        yield where, "workspace", buffers
        if cuda:
            stays = sum(len(ids[number :: len(lane.devices)]) for _, ids in lane.resident)
            yield where, "experts", stays * size.expert
            yield where, "runtime", size.runtime
    part = min(1.0, _part(dims, actor))
    kept = size.total * width * element + 36 * part * size.slots * size.total
    answers = 4 * size.group * width
    if cuda:
        yield home, "workspace", (1 + len(lane.devices)) * _page_locked(answers, cuda)
    if cuda and not (actor.activations == "recompute" or lane.recompute):
        kept += part * size.slots * size.total * (2 if dims.gated else 1) * inter * element
    yield home, "kept activations", sum(layer >= lowest for layer in dims.moe_layers) * kept


def lane_buffers(dims: ModelDims, config: Config, lane: LanePlan, size: LaneMemory, experts: int) -> float:
    """Bytes that computing takes on each device: buffers of a batch, its matrices and rows, x, dy and dx.

    Args:
        experts: of a layer, that may be computed there.
    """
    width, inter, element = dims.expert_width, dims.expert_intermediate, 4 if size.float32 else 2
    batch = min(batch_size(1, dims.expert_params), experts)
    decoded = 0 if size.plain else 16 * width * inter
    matrices = batch * (dims.expert_params * (element + (2 if lane.float8 else 0)) + decoded)
    at_once = min(places(size.group) * batch, LANE_ROWS)
    rows = at_once * ((27 if lane.float8 else 24) * (width + inter) + 8 * inter)
    if config.lora.experts and config.lora.dropout > 0:
        rows += at_once * 24 * (2 * width + inter)
    # A resident that is a batch of its own is computed where it lies.
    buffers = 2 * batch * (size.largest if lane.streams or batch > 1 else 0)
    buffers += 2 * experts * size.adapter  # as they lie on the host, and batch by batch
    return buffers + matrices + size.group * width * (element + 8) + rows


def _page_locked(size: float, cuda: bool) -> float:
    """Bytes that torch takes for a block that a GPU copies from or to: powers of two."""
    return 2.0 ** math.ceil(math.log2(size)) if cuda and size > 0 else size


def _part(dims: ModelDims, actor: ExpertActorPlan) -> float:
    """Part of an actor's rows that its lane computes, routing balanced."""
    assert actor.lane is not None
    held = sum(actor.counts(dims.moe_layers))
    stays = sum(len(ids) for _, ids in actor.lane.resident) / held
    carried = (*actor.lane.shares, *actor.lane.later)
    return stays + (1 - stays) * max((share for _, share in carried), default=0.0)
