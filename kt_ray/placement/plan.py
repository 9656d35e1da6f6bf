"""From (model dimensions, configuration, hardware) to a plan. Pure functions; every "auto" ends here."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from kt_ray.config.fields import show
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config, DataConfig, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import BACKEND_STORAGE
from kt_ray.errors import UserError
from kt_ray.hardware.machine import GPU_FREE, Gpu, Hardware, Socket, with_hosts
from kt_ray.placement.activation_bytes import by_torch
from kt_ray.placement.balance import place_experts
from kt_ray.placement.devices import (
    attention_hosts,
    count_stages,
    expert_copies,
    resolve_device,
    shared_devices,
    stage_devices,
    with_gpus,
    with_stream,
)
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.generation_memory import attends_as_cached, generates, room, step_tokens
from kt_ray.placement.lane_plan import plan_lanes, with_held
from kt_ray.placement.lane_share import UNTUNED, LaneRates
from kt_ray.placement.layer_table import layer_table
from kt_ray.placement.layout import Layout, choose_layout, layout_of, layouts, with_layout
from kt_ray.placement.lora_sizes import backward_of, check_layers
from kt_ray.placement.memory import budgets, staged
from kt_ray.placement.plan_types import Budget, ExpertActorPlan, Plan, WorkerPlan
from kt_ray.placement.range_memory import range_counts, without_ranges
from kt_ray.placement.render import counted, gib, layout_text
from kt_ray.placement.split import LayerSplit, split_experts, split_layers
from kt_ray.placement.stage_split import Ranges, balanced_stages
from kt_ray.placement.traffic import traffic_notes
from kt_ray.placement.transports import choose_transport
from kt_ray.placement.wave import Fit, Held, attention_kinds, choose_groups, fit, output_kinds
from kt_ray.placement.wave_tokens import load_of
from kt_ray.placement.weight_slots import streaming
from kt_ray.placement.worker_lanes import plan_worker_lanes, streams_to_workers, with_places

# Packages with kernels of states, as they are installed.
_DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}

GPU_WORKER_THREADS = 4  # a GPU's worker only copies and launches on the host


def make_plan(
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    load: ExpertLoad | None = None,
    lane_rates: LaneRates | None = None,
) -> Plan:
    """Who holds and does what for this model, configuration and host.

    Stages and replicas that are both auto are chosen here: notes say which and why.

    Args:
        load: tokens per expert of this model, by which experts may be placed; None = unknown.
        lane_rates: by which rule.experts.stream=auto decides; None = not known, and nothing is streamed.

    Raises:
        UserError: the model cannot be trained (mode=train), or the rule asks for more stages than
            layers, more GPUs than there are, an instruction set the host lacks, experts placed by a load that
            is not known, or a lane on a GPU that is not there.
    """
    hardware = with_gpus(config.rule, hardware)
    config = with_stream(config, hardware)
    asked = config.rule.resident_layers
    choices = layouts(dims, config, hardware)

    def plan_of(layout: Layout | None, resident: int | None, like: Plan | None = None) -> Plan:
        chosen = with_layout(config, layout) if layout else config
        if like is not None and not generates(config):
            held = {"experts.activations": like.experts[0].activations, "activations": like.activations}
            held["attention_output"] = like.attention_output
            chosen = with_keys(chosen, {f"rule.{key}": value for key, value in held.items()})
            chosen = with_keys(chosen, {"rule.wave": like.wave})
        return _laid_out(dims, chosen, hardware, load, lane_rates, resident)

    stay = asked if isinstance(asked, int) else None
    if config.rule.activations == "ranges" and not generates(config):
        _check_ranges(dims, config)
    if choices:
        plan = choose_layout(config, choices, lambda layout: plan_of(layout, stay))
    else:
        plan = plan_of(None, stay)
    full = [budget for budget in plan.budgets if not budget.fits and not budget.is_socket]
    if stay is None and full and config.rule.activations != "retain":
        plan = _streamed(plan, full, choices or (None,), plan_of) or plan
    if full and not plan.fits and not generates(config):
        return _by_ranges(plan, dims, config, hardware, load, lane_rates) or plan
    return plan


def _check_ranges(dims: ModelDims, config: Config) -> None:
    """Raises UserError where layers cannot go by ranges."""
    reason = without_ranges(dims, config)
    if reason:
        raise UserError(
            f"{dims.model_type} cannot train with rule.activations=ranges",
            where=dims.name,
            observed=reason,
            required="attention that computes heads apart, in layers that else act on single tokens",
            remedy="set rule.activations=auto; where that does not fit, mode=plan names a data.max_length",
        )


def _by_ranges(
    plan: Plan,
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    load: ExpertLoad | None,
    lane_rates: LaneRates | None,
) -> Plan | None:
    """The plan of rows that do not fit: every layer by ranges, and no streamed experts where those leave
    no room. None = it does not fit either.

    Args:
        plan: the one that does not fit.
    """
    stay = ("experts", "LoRA", "optimizer")  # whatever else changes
    if any(sum(b.items.get(item, 0) for item in stay) > b.capacity > 0 for b in plan.budgets if b.is_socket):
        return None
    row = f"rows of {config.data.max_length:,} tokens"
    if config.rule.activations == "auto" and not without_ranges(dims, config):
        worst = max((b for b in plan.budgets if not b.is_socket), key=lambda b: b.total - b.capacity)
        lacking = f"{worst.device} would lack {gib(worst.total - worst.capacity)}"
        note = f"rule.activations=auto: ranges, since {row} do not fit otherwise: {lacking}"
        changed = with_keys(config, {"rule.activations": "ranges"})
        if streams_to_workers(config.rule):  # which know no ranges
            if config.rule.experts.stream != "auto":
                return None
            changed = with_keys(changed, {"rule.experts.stream": "off"})
    elif config.rule.activations == "ranges" and config.rule.experts.stream == "auto":
        note = f"rule.experts.stream=auto: off, since {row} leave no room for streamed experts"
        changed = with_keys(config, {"rule.experts.stream": "off"})
    else:
        return None
    chosen = make_plan(dims, changed, hardware, load, lane_rates)
    return replace(chosen, notes=(note, *chosen.notes)) if chosen.fits else None


def _streamed(
    plan: Plan,
    full: Sequence[Budget],
    choices: Sequence[Layout | None],
    plan_of: Callable[..., Plan],
) -> Plan | None:
    """The plan of the first layout that fits with streamed layers, as many of them resident as cost no wave;
    where host memory has no room for them, the one that does not fit with a note of it; else None.

    Args:
        plan: the one that does not fit. full: its GPUs that are too small. plan_of: plans a layout with so
            many resident layers; with the waves of a third argument, which needs no search.
    """
    short: Budget | None = None
    for layout in choices:
        least = plan_of(layout, 0)
        if not least.fits:
            lacking = [budget for budget in least.budgets if not budget.fits]
            if all(budget.is_socket for budget in lacking):
                short = short or max(lacking, key=lambda budget: budget.total - budget.capacity)
            continue

        def too_many(resident: int, layout: Layout | None = layout, least: Plan = least) -> bool:
            return not plan_of(layout, resident, least).fits

        most = max(stop - start for start, stop in (worker.layers for worker in least.workers))
        resident = bisect_left(range(1, most + 1), True, key=too_many)
        chosen = plan_of(layout, resident)
        worst = max(full, key=lambda budget: budget.total - budget.capacity)
        note = (
            f"rule.resident_layers=auto: {resident} of each worker's layers; the weights of the others pass "
            f"through its GPU, since {layout_text(*layout_of(plan))} with all of them would lack "
            f"{gib(worst.total - worst.capacity)} on {worst.device}"
        )
        return replace(chosen, notes=(note, *chosen.notes))
    if short is None:
        return None
    note = (
        "rule.resident_layers=auto: all, as weights of layers that pass through a GPU wait in host memory: "
        f"{short.device} would lack {gib(short.total - short.capacity)}"
    )
    return replace(plan, notes=(note, *plan.notes))


def _laid_out(
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    load: ExpertLoad | None,
    lane_rates: LaneRates | None,
    resident: int | None,
) -> Plan:
    """`make_plan` with as many stages and replicas as the rule says. resident: layers of each worker whose
    weights stay on its device; None = all."""
    rule = config.rule
    generating = generates(config)
    if not generating:
        check_layers(dims, config.lora)
    backward = backward_of(dims, config.lora)
    if (config.mode in ("train", "train_server") or generating) and dims.refusal:
        raise UserError(
            f"{dims.model_type} cannot be {'used' if generating else 'trained'} from this checkpoint",
            where=dims.name,
            observed=dims.refusal,
            remedy="use another checkpoint, or mode=plan to see its placement",
        )
    if config.mode in ("train", "train_server"):
        _check_longest_row(dims, config.data)
    local = config.cluster.name == "local"  # then all hosts' actors are in this process
    there = hardware.hosts
    hardware = with_hosts(hardware, 1 if local else rule.nodes)
    device = resolve_device(rule, hardware)
    stages = count_stages(rule, device, hardware, dims)
    # float16 has no room for gradients without scaling them, which nothing here does.
    usual = "bfloat16" if dims.dtype == "float16" else dims.dtype
    dtype = usual if config.model.dtype == "auto" else config.model.dtype

    def balance() -> Ranges:
        unnamed = stage_devices(rule, device, (None,) * stages, hardware)
        return balanced_stages(dims, config, hardware, unnamed, dtype)

    split = split_layers(dims, rule, stages, balance)
    devices = stage_devices(rule, device, split.devices, hardware)
    hosts = attention_hosts(rule, device, hardware.hosts)
    notes = [*dims.notes, *_weights_notes(dims, config, dtype), *_state_notes(dims, gpu=device != "cpu")]
    if dims.dtype == "float16":
        notes.append(f"the checkpoint's float16 becomes {dtype}: gradients would leave its range")
    if hardware.gpu_fault and rule.device == "auto":
        notes.append(f"attention is on the CPU, since nvidia-smi fails: {hardware.gpu_fault}")
    if not hardware.present:
        notes.append(f"planned for described hardware, not for this host: {hardware.source}")
    if there > rule.nodes:
        notes.append(
            f"planned for {rule.nodes} of the {there} hosts described: set rule.nodes={there} for all"
        )
    workers = _workers(rule, hardware, split, devices, device, hosts)
    notes += [
        f"{counted(count, 'attention worker')} share {name}"
        for name, count in shared_devices(workers).items()
    ]
    copies = expert_copies(rule, attention_hosts(rule, device, rule.nodes))
    team = rule.nodes // copies  # hosts with a whole copy of the experts
    experts, expert_notes = _experts(dims, rule, hardware, team, local=local)
    experts, expected, placed = place_experts(experts, dims, config, load)
    if not streams_to_workers(rule):
        experts, of_lane = plan_lanes(experts, dims, config, hardware, load, lane_rates, min(hosts, team))
    elif generating:
        of_lane = ["rule.experts.stream_to=workers: experts are not streamed while answers are generated"]
    else:
        near = rule.replica_count // hosts
        workers, of_lane = plan_worker_lanes(workers, experts, dims, config, hardware, lane_rates, near)
    experts = _copied(experts, copies, 0 if local else team)
    if copies > 1:
        of_each = f"{counted(team, 'host')} for each, with {counted(rule.replica_count // copies, 'replica')}"
        expert_notes.append(
            f"rule.experts.copies={copies}: {of_each}; the copies' "
            "gradients are added up at the end of a step (not run on several machines)"
        )
    expert_notes += [*placed, *of_lane]

    def keeping(activations: str) -> tuple[ExpertActorPlan, ...]:
        return tuple(replace(actor, activations=activations) for actor in experts)

    @cache
    def with_streams(groups: int) -> tuple[WorkerPlan, ...]:
        return streaming(workers, dims, groups, resident, trains=not generating, lowest=backward.lowest)

    @cache  # `fit` comes back to what it has tried
    def budget_of(wave: int, held: Held) -> tuple[Budget, ...]:
        own, groups = keeping(held.experts), choose_groups(config, wave)
        return budgets(dims, config, hardware, with_streams(groups), own, wave, groups, dtype, held)

    if generating:
        held = Held("retain")
        chosen = Fit(1, held, budget_of(1, held), _cache_notes(dims, config))
    else:
        counts = range_counts(dims)
        kinds = attention_kinds(config, dims, device, resident)
        if resident is not None and kinds == ("retain",):
            raise UserError(
                "rule.activations=retain needs the weights of all layers in their places until backward",
                where=f"rule.resident_layers={resident}",
                required="rule.resident_layers=auto",
                remedy="set rule.resident_layers=auto, or rule.activations=auto",
            )
        chosen = fit(config, budget_of, kinds, output_kinds(config), counts)
    notes += [*expert_notes, *chosen.notes, *_room_notes(hardware, chosen.memory)]
    if rule.gpu_memory != "auto" and all(budget.is_socket for budget in chosen.memory):
        notes.append(f"rule.gpu_memory={show(rule.gpu_memory)} changes nothing: no GPU is used")
    if resident is not None and device == "cpu":
        notes.append(
            f"rule.resident_layers={resident} on the CPU is a stand-in for a GPU: weights are copied within "
            "host memory, which takes time and saves none of it"
        )
    notes += _backend_notes(rule, hardware)
    if config.generate.latent_keys == "absorbed" and not any(
        attends_as_cached(dims, config, layer) for layer in range(dims.num_layers)
    ):
        notes.append("generate.latent_keys=absorbed changes nothing: no layer of this model has latent keys")
    groups = choose_groups(config, chosen.wave)
    own, placed_workers = keeping(chosen.held.experts), with_streams(groups)
    free = {b.device: float(b.capacity - b.total) for b in chosen.memory if not b.is_socket and b.capacity}
    tokens = load_of(dims, config, chosen.wave, groups).own_group
    with_shelves = with_held(own, dims, config, groups, free)
    with_lanes = with_places(placed_workers, own, dims, config, groups, tokens, free)
    if (with_shelves, with_lanes) != (own, placed_workers):
        own, placed_workers = with_shelves, with_lanes
        memory = budgets(dims, config, hardware, placed_workers, own, chosen.wave, groups, dtype, chosen.held)
        chosen = chosen._replace(memory=memory)
    workers, experts = staged(dims, config, placed_workers, own, chosen.wave, groups, dtype, chosen.held)
    if generating:
        notes += _copied_notes(dims, config, workers, dtype)
    plan = Plan(
        dims=dims,
        hardware=hardware,
        workers=workers,
        experts=experts,
        stages=stages,
        replicas=rule.replica_count,
        groups=groups,
        micro_batch_rows=config.micro_batch_rows(rule.replica_count),
        micro_batch_tokens=config.micro_batch_tokens(rule.replica_count),
        wave=chosen.wave,
        activations=chosen.held.attention,
        head_ranges=chosen.held.ranges,
        attention_output=chosen.held.output,
        tuning=UNTUNED if lane_rates is None else lane_rates.tuning,
        backward=backward,
        overlap=rule.overlap,
        budgets=chosen.memory,
        rule=rule.name,
        dtype=dtype,
        tokens_per_step=(
            rule.replica_count * step_tokens(dims, config) if generating else config.tokens_per_step
        ),
        transport=choose_transport(rule),
        expected_load=expected,
    )
    notes += _shared_notes(plan, config)
    if local:
        if rule.transport != "auto":
            notes.append(f"rule.transport={rule.transport} changes nothing with cluster=local")
        return replace(plan, notes=tuple(notes))
    return replace(plan, notes=(*notes, *traffic_notes(plan)))


def _check_longest_row(dims: ModelDims, data: DataConfig) -> None:
    longest = dims.longest_row
    if longest and data.widest_row > longest:
        raise UserError(
            "transformers computes long rows of phimoe with the factors of short ones (LongRoPE)"
            if dims.model_type == "phimoe"
            else f"beyond a length {dims.model_type} computes a row by the rows beside and before it "
            "(its RoPE is dynamic or LongRoPE)",
            where="data.max_length",
            observed=data.widest_row,
            required=f"at most {longest} (config.json)",
            remedy=f"set data.max_length={longest}"
            + (" and data.pad_to_multiple_of=1" if longest % data.pad_to_multiple_of else ""),
        )


def _shared_notes(plan: Plan, config: Config) -> list[str]:
    """What train_server.shared=layers asks in vain."""
    if not config.trainings or config.train_server.shared == "experts" or plan.mixes_trainings:
        return []
    why = "a micro-batch holds one row (trainer.micro_batch_size=1)"
    if not plan.joins_trainings:
        one = "where GPUs compute experts" if plan.lane is not None else "with rule.activations=ranges"
        why = f"passes of several trainings are not joined {one}"
    return [f"train_server.shared={config.train_server.shared} changes nothing: {why}"]


def _room_notes(hardware: Hardware, memory: Sequence[Budget]) -> list[str]:
    """Why the capacity of a GPU is less than its memory."""
    used = {budget.device for budget in memory}
    sizes: dict[tuple[int, bool], list[Gpu]] = {}
    for gpu in hardware.gpus:
        if f"cuda:{gpu.index}" in used:
            sizes.setdefault((gpu.usable, gpu.usable < gpu.memory_bytes), []).append(gpu)
    return [
        f"{', '.join(f'cuda:{gpu.index}' for gpu in gpus)}: "
        f"{'rule.gpu_memory leaves' if capped else 'CUDA gives'} {gib(size)}"
        f"{' each' if len(gpus) > 1 else ''}, of which {GPU_FREE:.0%} stay free: "
        f"{gib(gpus[0].room)} to plan with"
        for (size, capped), gpus in sizes.items()
    ]


def _copied_notes(dims: ModelDims, config: Config, workers: Sequence[WorkerPlan], dtype: str) -> list[str]:
    """What streamed layers cost an answer: their weights cross the link for every token."""
    weights = layer_table(dims, config, dtype).weight_bytes
    sizes = [sum(weights[layer] for layer in w.streamed) for w in workers]
    if not any(sizes):
        return []
    return [
        f"each step of generation copies {gib(max(sizes))} of weights to a GPU: streamed layers slow answers "
        "down, which more stages or model.keep_quantized=true lessen"
    ]


def _cache_notes(dims: ModelDims, config: Config) -> tuple[str, ...]:
    generate, tokens = config.generate, room(dims, config)
    auto = "generate.cache_tokens=auto: " if generate.cache_tokens == "auto" else ""
    rows = counted(generate.batch_size, "row")
    return (f"{auto}key-value caches of {tokens:,} tokens per replica, in at most {rows}",)


def _workers(
    rule: RuleConfig,
    hardware: Hardware,
    split: LayerSplit,
    devices: tuple[tuple[str, ...], ...],
    device: str,
    hosts: int,
) -> tuple[WorkerPlan, ...]:
    """All workers get the same number of torch threads, so that results do not depend on the layout.

    On the CPU a replica's stages work one after the other, and in turn with the experts: all may use
    every core of their socket; only replicas on the same socket share it.

    Args:
        hosts: with attention workers.
    """
    sockets = hardware.on(0)
    cores = min(socket.cores for socket in sockets)
    if isinstance(rule.worker_threads, int):
        threads = rule.worker_threads
    elif device == "cpu":
        # With cluster=local, too, as many as on several hosts: another number rounds differently.
        on_host = rule.replica_count // attention_hosts(rule, device, rule.nodes)
        threads = max(1, cores // math.ceil(on_host / len(sockets)))
    else:
        threads = max(1, min(GPU_WORKER_THREADS, cores // 4))
    workers = []
    per_host = rule.replica_count // hosts
    for replica, names in enumerate(devices):
        for stage, name in enumerate(names):
            bound = device == "cpu" and len(sockets) > 1
            # Replicas are in the same stage at a time: there they have sockets of their own.
            cpus = sockets[(replica % per_host + stage) % len(sockets)].cpus if bound else ()
            rank, layers, host = replica * len(names) + stage, split.ranges[stage], replica // per_host
            workers.append(WorkerPlan(rank, replica, stage, layers, name, threads, cpus, host=host))
    return tuple(workers)


def _copied(experts: tuple[ExpertActorPlan, ...], copies: int, hosts: int) -> tuple[ExpertActorPlan, ...]:
    """The actors of all copies of the experts, from those of the first one. hosts: of each."""
    count = len(experts)
    return tuple(
        replace(a, rank=a.rank + copy * count, host=a.host + copy * hosts, copy=copy, copies=copies)
        for copy in range(copies)
        for a in experts
    )


def _experts(
    dims: ModelDims, rule: RuleConfig, hardware: Hardware, hosts: int, *, local: bool
) -> tuple[tuple[ExpertActorPlan, ...], list[str]]:
    """Expert actors of the first `hosts` hosts, which hold all experts, in the order of hosts and sockets.
    local: they are all on this host."""
    wanted = rule.experts
    notes: list[str] = []
    per_host = len(hardware.on(0)) if wanted.sockets == "auto" else int(wanted.sockets)
    count = per_host * hosts
    folded = hosts if local else 1
    if wanted.sockets == "auto":
        count = min(count, dims.num_experts)
    shares = split_experts(dims.num_experts, count, hosts)
    if folded > 1:
        notes.append(f"cluster=local: the expert actors of {folded} hosts are all in this process")
    actors: list[ExpertActorPlan] = []
    for host in range(1 if local else hosts):
        sockets, first = hardware.on(host), len(actors)
        least, most = (pick(sockets, key=lambda s: s.cores) for pick in (min, max))
        if 2 * least.cores < most.cores and min(per_host, len(sockets)) > 1 and host == 0:
            notes.append(
                f"node {least.node} has {counted(least.cores, 'core')}, node {most.node} {most.cores}: they "
                "hold as many experts each, so all wait for the smaller; allow this process whole nodes "
                "(by taskset, Slurm or docker --cpuset-cpus)"
            )
        homes = _homes(min(per_host * folded, count - first), len(sockets))
        if len(homes) > len(sockets) and host == 0:
            nodes = counted(len(sockets), "NUMA node")
            notes.append(
                f"{len(homes)} expert actors on {nodes}: actors of one node divide its cores and memory"
            )
        for i, home in enumerate(homes):
            socket, peers = sockets[home], [j for j, h in enumerate(homes) if h == home]
            cpus, cores = divide_cpus(socket, len(peers), peers.index(i))
            if len(peers) > socket.cores and i == peers[0] and host == 0:
                notes.append(
                    f"{len(peers)} expert actors share the {socket.cores} cores of node {socket.node}"
                )
            threads = wanted.threads if isinstance(wanted.threads, int) else cores
            if threads > max(1, len(cpus)) and host == 0:
                notes.append(f"expert actor {i}: {threads} threads on {len(cpus)} CPUs of node {socket.node}")
            actors.append(
                ExpertActorPlan(
                    rank=first + i,
                    node=socket.node,
                    cpus=cpus,
                    threads=threads,
                    experts=shares[first + i],
                    backend=wanted.backend,
                    isa=wanted.isa,
                    activations="retain" if wanted.activations == "auto" else wanted.activations,
                    host=host,
                    answers=wanted.answers,
                    pinned=socket.pinned,
                )
            )
    return tuple(actors), notes


def _homes(actors: int, sockets: int) -> list[int]:
    """Socket of each actor of a host: one each, or neighbours in rank together where they must share."""
    return [i * sockets // actors if actors > sockets else i for i in range(actors)]


def divide_cpus(socket: Socket, parts: int, part: int) -> tuple[tuple[int, ...], int]:
    """CPUs and cores of the `part`-th of `parts` actors on one node: whole cores, first threads first."""
    first, siblings = socket.cpus[: socket.cores], socket.cpus[socket.cores :]
    if parts > socket.cores:  # more actors than cores: they share
        core = part % socket.cores
        return first[core : core + 1], 1

    def piece(cpus: tuple[int, ...]) -> tuple[int, ...]:
        return cpus[len(cpus) * part // parts : len(cpus) * (part + 1) // parts]

    own = piece(first) if first else ()
    cores = len(own) if first else socket.cores // parts
    return own + piece(siblings), max(1, cores)


def _weights_notes(dims: ModelDims, config: Config, dtype: str) -> list[str]:
    """How weights outside the routed experts are held where the checkpoint stores them quantised."""
    if not dims.quantised:
        if not config.model.keep_quantized:
            return []
        return ["model.keep_quantized=true changes nothing: no weight outside the experts is quantised"]
    if config.model.keep_quantized:
        return ["quantised weights outside the experts stay as they are stored and are dequantised when used"]
    return [f"quantised weights outside the experts are dequantised to {dtype} when they are loaded"]


def _state_notes(dims: ModelDims, *, gpu: bool) -> list[str]:
    """Which package a GPU lacks for layers with a state from token to token."""
    lacking = [state.package for state in dims.states if state and state.package and by_torch(state, gpu=gpu)]
    if not gpu or not lacking:
        return []
    return [
        f"the states of {counted(len(lacking), 'layer')} are computed by torch's own functions, which take "
        f"more memory (counted) and time (not counted) than kernels: pip install {_DISTRIBUTIONS[lacking[0]]}"
    ]


def _backend_notes(rule: RuleConfig, hardware: Hardware) -> list[str]:
    isa, backend = rule.experts.isa, rule.experts.backend
    best = hardware.auto_isa
    if isa != "auto" and isa not in hardware.isas:
        raise UserError(
            "the forced instruction set is not available",
            where=f"rule.experts.isa on {hardware.source}",
            observed=isa,
            required="auto, " + ", ".join(hardware.isas),
            remedy="set rule.experts.isa=auto",
        )
    notes = []
    if backend in ("AMXBF16", *BACKEND_STORAGE) and "amx" not in hardware.isas:
        notes.append(f"{backend} without AMX: the same mathematics on {best if isa == 'auto' else isa}")
    if backend in BACKEND_STORAGE:
        fmt = BACKEND_STORAGE[backend].format
        notes.append(f"{backend}: experts are quantised to {fmt} while they stream in")
    return notes
