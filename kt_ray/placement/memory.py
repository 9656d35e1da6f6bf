"""Bytes per device of a plan: every GPU, and the memory of every socket.

Worst case: every row has data.max_length tokens; routing is balanced over the experts. Legend:
T tokens per wave, T_r of one replica, T_g of one group over all replicas, K experts per token,
H hidden size, b bytes per element of the compute type.

Expert actor with a share s of the experts (engine_memory.py has the engine's own formulas):
    kept              layers * what the engine keeps of T tokens and T * K * s rows, to the byte
    workspace         one engine call of T_g tokens and T_g * K * s rows; scratch of every thread;
                      T_g * H * 16, what goes in and out in float32, twice; 2 MiB for each buffer of at
                      least that size, which are whole huge pages
    staging           `expert_staging`
Attention worker with n layers:
    weights           of the layers that stay, and of the largest streamed one for each slot; the streamed
                      ones are on the socket, once for all replicas
    kept              n * T_r * (streams * H * b + K * 12): input of every layer; routing. With
                      rule.activations=host the inputs are on the socket, and here two of each token; and
                      n * T_r * H * b of outputs, in the same place, with rule.attention_output=retain; what
                      layers hand to later ones (`Handed.bytes`), likewise, and of each kind one here
    workspace         T_r * (one layer's linear inputs and outputs, LoRA inputs in float32 where PEFT computes
                      it, its dropout masks, q/k/v): all groups of a layer are recomputed before the first is
                      released, unless rule.activations has one micro-batch of each recomputed at a time; with
                      rule.activations=retain that of all layers is kept, and none is recomputed; what
                      a LoRA module, an index or eager attention needs for a moment, of one
                      micro-batch (`adapter_scratch_bytes`, `index_scratch_bytes`,
                      `scores_scratch_bytes`). By ranges: range_memory.py;
                      T_r * data.max_length of attention masks, kept for the whole pass (`mask_bytes`)
    logits            rows of one chunk * vocabulary * (b + 12), on the last stage: logits, and their
                      log-probabilities and two gradients in float32
    staging           `worker_staging`
Generation keeps caches in place of activations: `generation_memory`. Passes of mode=eval keep neither.
LoRA is float32: 4 bytes for the weights, 4 for the gradients; AdamW's moments another 8; a copy that is the
reference of a preference loss 4. Expert
LoRA stays in its actor; the masters and moments of all other LoRA are held by worker 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from kt_ray.config.schema import Config, LoraConfig
from kt_ray.dims.model_dims import ModelDims, Quantised
from kt_ray.dims.weight_formats import BACKEND_STORAGE, ELEMENT_BYTES
from kt_ray.hardware.machine import Hardware, gpu_name, socket_name
from kt_ray.hardware.nominal import FORMAT_BYTES
from kt_ray.placement.activation_bytes import (
    adapter_scratch_bytes,
    dora_bytes,
    index_scratch_bytes,
    layer_activation_bytes,
    mask_bytes,
    scores_scratch_bytes,
)
from kt_ray.placement.engine_memory import HUGE_PAGE, engine_shape, rounded
from kt_ray.placement.expert_load import touched
from kt_ray.placement.generation_memory import (
    generates,
    generation_items,
    longest_row,
    step_tokens,
    within_training,
)
from kt_ray.placement.lane_plan import LaneMemory, lane_lines, resident_count
from kt_ray.placement.layer_table import layer_table
from kt_ray.placement.lora_sizes import (
    expert_lora_layers,
    expert_lora_params,
    in_parts,
    lowest_kept,
    trained_params,
)
from kt_ray.placement.plan_types import Budget, ExpertActorPlan, Held, WorkerPlan
from kt_ray.placement.range_memory import (
    TOKEN_BYTES,
    range_host,
    range_workspace,
)
from kt_ray.placement.staging import expert_staging, worker_staging
from kt_ray.placement.wave_tokens import HELD, Load, load_of, part_of
from kt_ray.placement.worker_lanes import (
    Left,
    gradient_staging,
    left_of,
    left_to,
    streamable,
    worker_lane_lines,
)

GIB = 1 << 30

# Processes without any model: interpreter, torch, transformers, Ray client. Resident sizes measured on
# Linux with CPU torch 2.13 and Ray 2.60, rounded up.
WORKER_RUNTIME = int(0.5 * GIB)
EXPERT_RUNTIME = int(0.3 * GIB)
DRIVER_RUNTIME = int(0.6 * GIB)
RAY_RUNTIME = int(0.8 * GIB)  # raylet, GCS, dashboard
GPU_RUNTIME = int(0.8 * GIB)  # CUDA context, libraries, allocator slack

# Float32 logits that trainer.loss_chunk=auto allows at once. A GPU waits for the host between small chunks.
LOGITS_BYTES = 1 << 26
GPU_LOGITS_BYTES = 1 << 27

# Items of a budget, in the order in which they are shown.
ITEMS = (
    "experts",
    "weights",
    "embedding and head",
    "LoRA",
    "optimizer",
    "kept activations",
    "caches",
    "answers",
    "workspace",
    "logits",
    "staging",
    "runtime",
)


# Items of a worker that are in host memory wherever it computes, and the items of a budget that they are.
ON_HOST = {
    "staging": "staging",
    "hidden states": "kept activations",
    "passing states": "kept activations",
    "streamed weights": "weights",
    "embedding": "embedding and head",
    "gradients": "staging",
    "trainings": "optimizer",
}


def lora_bytes(config: Config) -> int:
    """Of an actor per LoRA parameter that it computes with: value, gradient, and the reference's value; in
    mode=train_server the value of every sampler, in mode=serve of every adapter."""
    if config.trainings:
        return 8 + 4 * config.train_server.samplers
    if generates(config):
        return 8 + 4 * max(0, len(config.serve.adapters or ()) - 1)
    return 12 if config.keeps_reference else 8


def parts_bytes(config: Config, dtype: str, *, gpu: bool) -> int:
    """Of a worker per LoRA parameter: three bfloat16 numbers of each adapter that one pass, or one session of
    answers, uses (kt_ray/model/lora_linear.py)."""
    if not in_parts(config.lora, dtype, gpu=gpu):
        return 0
    samplers = config.train_server.samplers if config.trainings else len(config.serve.adapters or ())
    return 6 * max(1, config.trainings, samplers)


def checkpoint_bytes(dims: ModelDims, config: Config) -> int:
    """Bytes of one training checkpoint: parameters and moments in float32 (Muon has one moment)."""
    return 4 * (2 if config.optim.name == "muon" else 3) * trained_params(dims, config.lora)


def read_bytes(dims: ModelDims, backend: str) -> float:
    """Bytes of all routed experts where they are read, which backends may quantise while they do."""
    if backend == "llamafile" or dims.experts_file_bytes:
        return dims.bytes_in_file
    return dims.num_experts * dims.expert_bytes()


def held_format(dims: ModelDims, backend: str) -> str:
    """Format of routed experts in memory; of experts in a file of their own the nearest by size."""
    storage = BACKEND_STORAGE.get(backend)
    if storage is not None:
        return storage.format
    if backend != "llamafile" and not dims.experts_file_bytes:
        return dims.expert_format
    size = dims.bytes_in_file / dims.routed_params
    # Of formats of one size GGUF's.
    return min(FORMAT_BYTES, key=lambda name: (abs(FORMAT_BYTES[name] - size), name[0] != "q"))


def budgets(
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    workers: Sequence[WorkerPlan],
    experts: Sequence[ExpertActorPlan],
    wave: int,
    groups: int,
    dtype: str,
    held: Held = HELD,
) -> tuple[Budget, ...]:
    """One budget per GPU in use and per socket in use, for waves of `wave` micro-batches per replica."""
    load = load_of(dims, config, wave, groups, held)
    stages = 1 + max(worker.stage for worker in workers)
    hosts = 1 + max(worker.host for worker in workers)
    sums: dict[str, dict[str, int]] = {}

    def add(device: str, item: str, size: float) -> None:
        if size > 0:
            on_device = sums.setdefault(device, {})
            on_device[item] = on_device.get(item, 0) + math.ceil(size)

    # Hosts are alike: what is equal in two actors is counted once.
    of_workers: dict[WorkerPlan, dict[str, float]] = {}
    of_experts: dict[tuple[ExpertActorPlan, Left], dict[str, float]] = {}
    for worker in workers:
        home = home_socket(worker, hardware)
        like = _kind(worker, config, hosts)
        if like not in of_workers:
            of_workers[like] = worker_items(dims, config, load, worker, stages, dtype, hosts)
        for item, size in of_workers[like].items():
            on_host = worker.device == "cpu" or item in ON_HOST
            add(home if on_host else worker.place, ON_HOST.get(item, item), size)
        if worker.device != "cpu":
            add(worker.place, "runtime", GPU_RUNTIME)
        if config.cluster.name == "ray":
            add(home, "runtime", WORKER_RUNTIME)
    for actor in experts:
        isa = hardware.auto_isa if actor.isa == "auto" else actor.isa
        reached = reached_part(dims, actor, hosts)
        of_copy = load.of_copy(actor.copies, config.rule.replica_count)
        left = left_to(actor, workers, dims, load.own_group, max(1, hosts // actor.copies))
        kind = replace(actor, rank=0, host=0, node=0, cpus=(), copy=0), left
        if kind not in of_experts:
            of_experts[kind] = _expert_actor(dims, config, of_copy, groups, actor, isa, reached, left)
        items = dict(of_experts[kind])
        home = socket_name(hardware, actor.host, actor.node)
        count = sum(actor.counts(dims.moe_layers))
        tokens = part_of(of_copy.group, reached), part_of(of_copy.total, reached)
        slots = dims.experts_per_token * count / len(dims.moe_layers) / dims.choices / reached
        sizes = _lane_memory(dims, config, actor.backend, (*tokens, slots))
        for device, item, size in lane_lines(dims, config, actor, sizes, home):
            add(home if device == home else actor.place(device), item, size)
        items["experts"] *= 1 - resident_count(actor) / count
        for item, size in items.items():
            add(home, item, size)
    for worker in workers:
        count = streamable(worker, experts, dims)
        slots = dims.experts_per_token * count / dims.choices
        sizes = _lane_memory(dims, config, experts[0].backend, (load.own_group, load.replica, slots))
        home = home_socket(worker, hardware)
        for on_host, item, size in worker_lane_lines(dims, config, worker, sizes, count):
            add(home if on_host else worker.place, item, size)
        add(home, "staging", gradient_staging(dims, config, worker, experts, groups))
    ray = RAY_RUNTIME if config.cluster.name == "ray" else 0
    for host in range(hardware.hosts):
        first = socket_name(hardware, host, hardware.on(host)[0].node)
        add(first, "runtime", ray + (DRIVER_RUNTIME if host == 0 else 0))

    capacity = {socket_name(hardware, s.host, s.node): s.memory_bytes for s in hardware.sockets}
    for host in range(hardware.hosts):
        capacity |= {gpu_name(host, f"cuda:{gpu.index}"): gpu.room for gpu in hardware.gpus}
    of_devices = [
        Budget(device, {item: own[item] for item in ITEMS if item in own}, capacity.get(device, 0))
        for device, own in sums.items()
    ]

    def place(budget: Budget) -> tuple[object, ...]:
        number = re.search(r"\d+$", budget.device)
        kind = budget.device.split()[-1].partition(":")[0]
        return budget.is_socket, budget.host, kind, int(number[0]) if number else 0

    return tuple(sorted(of_devices, key=place))


def staged(
    dims: ModelDims,
    config: Config,
    workers: Sequence[WorkerPlan],
    experts: Sequence[ExpertActorPlan],
    wave: int,
    groups: int,
    dtype: str,
    held: Held,
) -> tuple[tuple[WorkerPlan, ...], tuple[ExpertActorPlan, ...]]:
    """The actors with the bytes of `budgets`' item "staging" that are each one's, and those of hidden states
    that wait on the host."""
    load, stages = load_of(dims, config, wave, groups, held), 1 + max(worker.stage for worker in workers)
    hosts = 1 + max(worker.host for worker in workers)

    kinds: dict[WorkerPlan, tuple[int, int]] = {}

    def own(worker: WorkerPlan) -> WorkerPlan:
        kind = _kind(worker, config, hosts)
        if kind not in kinds:
            items = worker_items(dims, config, load, worker, stages, dtype, hosts)
            staging = math.ceil(items["staging"]) + gradient_staging(dims, config, worker, experts, groups)
            kinds[kind] = staging, math.ceil(items["hidden states"])
        return replace(worker, staging=kinds[kind][0], waiting=kinds[kind][1])

    def answers(actor: ExpertActorPlan) -> int:
        tokens = load.of_copy(actor.copies, config.rule.replica_count).total
        left = left_to(actor, workers, dims, load.own_group, max(1, hosts // actor.copies))
        reached = part_of(tokens, reached_part(dims, actor, hosts))
        return expert_staging(dims, part_of(reached, left.tokens), actor.answers)

    return (
        tuple(own(worker) for worker in workers),
        tuple(replace(actor, staging=answers(actor)) for actor in experts),
    )


def _kind(worker: WorkerPlan, config: Config, hosts: int) -> WorkerPlan:
    """Workers with the same one need the same bytes."""
    root, keeps = min(1, worker.rank), int(keeps_weights(worker, config, hosts))
    return replace(worker, rank=root, replica=keeps, host=0, cpus=(), threads=0)


def reached_part(dims: ModelDims, actor: ExpertActorPlan, hosts: int) -> float:
    """Part of the tokens of its copy of the experts that comes to an actor: all of its own host's, and of
    other hosts' with attention those that chose one of its experts. hosts: so many have attention.

    All where attention is on the driver's host alone, also on other hosts: as bad as routing can be.
    """
    held, hosts = max(actor.counts(dims.moe_layers)), max(1, hosts // actor.copies)
    return (1 + (hosts - 1) * touched(dims.choices, held, dims.experts_per_token)) / hosts


def home_socket(worker: WorkerPlan, hardware: Hardware) -> str:
    """The socket whose memory and cores an attention worker's host side uses."""
    sockets = hardware.on(worker.host)
    bound = (s for s in sockets if worker.cpus and set(worker.cpus) <= set(s.cpus))
    # Ranks go on from host to host, GPUs begin again: hosts are alike.
    own = int(worker.device.removeprefix("cuda:")) if worker.host and worker.device != "cpu" else worker.rank
    return socket_name(hardware, worker.host, next(bound, sockets[own % len(sockets)]).node)


def worker_items(
    dims: ModelDims, config: Config, load: Load, worker: WorkerPlan, stages: int, dtype: str, hosts: int = 1
) -> dict[str, float]:
    """Bytes of an attention worker by item; all on its device but those `ON_HOST`. hosts: with attention."""
    start, stop = worker.layers
    own = range(start, stop)
    passed = range(max(start, lowest_kept(dims, config)), stop)  # by backward
    element, hidden = ELEMENT_BYTES[dtype], dims.hidden_size
    first, last = worker.stage == 0, worker.stage == stages - 1
    table = layer_table(dims, config, dtype)
    moe = sum(table.moe[passed.start : stop])
    ends = 1 if dims.tie_embeddings and first and last else first + last
    looked_up = int(embedding_on_host(dims, worker, stages))
    adapters = sum(table.lora_params[start:stop])
    root, copies = worker.rank == 0, config.rule.experts.copy_count
    # Whose gradients it sends, or in worker 0 adds up.
    reduced = sum(table.lora_params) if root else adapters
    far = config.rule.replica_count * (hosts - 1) // hosts  # replicas on other hosts than worker 0
    outputs = int(load.outputs)  # each as wide as one stream of the hidden state
    states = len(passed) * load.replica * (dims.hidden_streams + outputs) * hidden * element
    # Of what waits on the host are here hidden states between two layers, and two of each that are copied.
    kept = 2 * load.replica * dims.hidden_streams * hidden * element
    kept += 2 * load.micro * (dims.hidden_streams + outputs) * hidden * element
    results = [h for h in dims.handed if start <= h.layer < stop]
    sizes = {h: h.bytes(load.replica, load.row, element) for h in results}
    states += sum(size for h, size in sizes.items() if h.last >= passed.start)
    working = sum(  # of each kind one is at work, in a pass without backward, too
        max((size for h, size in sizes.items() if choices == bool(h.chosen)), default=0)
        for choices in (True, False)
    )
    kept, passing = kept + working if load.on_host else max(states, working), 0
    if load.ranges:
        tokens = (load.replica, load.own_group, load.micro)
        kept = load.replica * TOKEN_BYTES
        states, passing = range_host(dims, passed, *tokens, element, outputs=load.outputs)
    kept += moe * load.replica * dims.experts_per_token * 12
    if not dims.affine:  # then the experts' output is kept as well
        kept += moe * load.replica * hidden * 4
    probed = max((table.params[layer] for layer in own if table.moe[layer]), default=0)
    away = [table.weight_bytes[layer] for layer in worker.streamed]
    # What is dequantised when used, one matrix at a time.
    unpacked = element * max((q.largest for q in _kept_quantised(dims, config)[start:stop]), default=0)
    unpacked += max((dora_bytes(dims, config, layer) for layer in own), default=0)
    gpu = worker.device != "cpu"
    # One layer of each kind: a plan asks for every layer of every layout that it compares.
    of_kind = {table.kinds[layer]: layer for layer in reversed(own)}
    kinds = of_kind.values()
    kept_by_layer = {layer: layer_activation_bytes(dims, config, layer, dtype, gpu=gpu) for layer in kinds}
    scratch = {
        layer: max(
            adapter_scratch_bytes(dims, config, layer, dtype, gpu=gpu),
            index_scratch_bytes(dims, load.row, layer, dtype),
            scores_scratch_bytes(dims, config, load.row, layer, dtype),
        )
        for layer in kinds
    }
    if load.retained:  # and each layer's output, which is counted as a hidden state
        kept += load.replica * sum(kept_by_layer[of_kind[table.kinds[layer]]] for layer in passed)
    # Without backward a micro-batch's layer is at work whatever is retained; a hidden state is read, another
    # written, and experts' answers are float32.
    held = load.recomputed if passed else max(load.recomputed, load.micro)
    moved = 8 if passed else max(8, 2 * dims.hidden_streams * element + 4)
    at_once: dict[int, float] = {
        layer: held * size + load.micro * scratch[layer] + load.replica * hidden * moved
        for layer, size in kept_by_layer.items()
    }
    if load.ranges:
        widened = not in_parts(config.lora, dtype, gpu=gpu)
        shape = (load.micro, load.ranges, element)
        at_once = {
            layer: range_workspace(dims, config, layer, *shape, each=size + scratch[layer], widened=widened)
            for layer, size in kept_by_layer.items()
        }
    recompute = max(at_once.values())
    logits = logit_rows(config.trainer.loss_chunk, load.micro, dims.vocab_size, gpu=gpu)
    items: dict[str, float] = {
        "weights": sum(table.weight_bytes[start:stop])
        - sum(away)
        + worker.slots * max(away, default=0)
        + element * (dims.outside_params if last else 0),
        "embedding and head": element * dims.embedding_params * (ends - looked_up),
        # On a GPU a pass that joins trainings has copies of the others' values and gradients.
        "LoRA": (lora_bytes(config) + (8 * max(0, config.trainings - 1) if gpu else 0)) * adapters
        + parts_bytes(config, dtype, gpu=gpu) * adapters
        + (8 * reduced if root else 0),
        "optimizer": 8 * reduced if root else 0,
        "kept activations": kept,
        "hidden states": states if load.on_host else 0,
        "passing states": passing,
        "streamed weights": sum(away) if keeps_weights(worker, config, hosts) else 0,
        "embedding": element * dims.embedding_params * looked_up,
        # The probe of the experts' scale copies one MoE layer to float32 before training.
        "workspace": max(recompute + unpacked, 4 * probed) + mask_bytes(dims, config, load, dtype, gpu=gpu),
        "logits": logits * dims.vocab_size * (element + 12) if last else 0,
        "staging": worker_staging(
            dims,
            load.replica,
            sent=part_of(load.replica, left_of(worker, dims, load.own_group, max(1, hosts // copies)).tokens),
            stages=stages,
            workers=stages * config.rule.replica_count,
            adapters=reduced,
            dtype=dtype,
        ),
        # Those of workers on other hosts wait in worker 0 until it adds them up.
        "gradients": 4 * reduced * far if root else 0,
        # Put aside (`PlainActor.switch_training`): values and gradients; with the masters, moments.
        "trainings": config.trainings * (8 * adapters + (12 * reduced if root else 0)),
    }

    def generating(config: Config) -> dict[str, float]:
        moment = {
            n: max(
                index_scratch_bytes(dims, step_tokens(dims, config), n, dtype),
                scores_scratch_bytes(dims, config, longest_row(dims, config), n, dtype),
            )
            for n in kinds
        }
        largest = max(size + moment[layer] for layer, size in kept_by_layer.items()) + hidden * 8
        return generation_items(dims, config, own, last=last, layer=largest, element=element)

    if generates(config):
        items |= generating(config)
        items["workspace"] = max(items["workspace"] + unpacked, 4 * probed)
    elif config.answering_rows:
        answering = generating(within_training(config))
        free = sum(items[name] for name in answering if name in items)  # training no longer needs it
        items["answers"] = max(0.0, sum(answering.values()) - free)
    return items


def embedding_on_host(dims: ModelDims, worker: WorkerPlan, stages: int) -> bool:
    """Whether a worker looks tokens up in host memory: where its GPU does not hold all layers either.

    A head that is the embedding stays with it on the GPU.
    """
    tied = dims.tie_embeddings and worker.stage == stages - 1
    return bool(worker.streamed) and worker.stage == 0 and not tied


def keeps_weights(worker: WorkerPlan, config: Config, hosts: int) -> bool:
    """Whether streamed layers are counted for a worker, as the first on its host. hosts: with attention."""
    first = worker.replica % (config.rule.replica_count // hosts) == 0
    return first or not shares_weights(config.lora)


def shares_weights(lora: LoraConfig) -> bool:
    """Whether replicas have one copy of their streamed layers' weights. PiSSA changes them after loading."""
    return not lora.init.startswith("pissa")


def _kept_quantised(dims: ModelDims, config: Config) -> Sequence[Quantised]:
    """Per layer what stays quantised; empty where nothing does."""
    return dims.quantised if config.model.keep_quantized else ()


def logit_rows(loss_chunk: int | str, rows: int, vocab: int, *, gpu: bool) -> int:
    """Rows of logits per chunk of trainer.loss_chunk; all `rows` (trained tokens) when they are not cut."""
    if loss_chunk == "auto":
        return max(1, min(rows, (GPU_LOGITS_BYTES if gpu else LOGITS_BYTES) // (4 * vocab)))
    return max(1, min(rows, int(loss_chunk)) if int(loss_chunk) > 0 else rows)


def _expert_actor(
    dims: ModelDims,
    config: Config,
    load: Load,
    groups: int,
    actor: ExpertActorPlan,
    isa: str,
    reached: float,
    left: Left,
) -> dict[str, float]:
    total, group = (part_of(tokens, reached) for tokens in (load.total, load.group))
    sent, sent_of_group = (part_of(tokens, left.tokens) for tokens in (total, group))
    width = dims.expert_width
    count = sum(actor.counts(dims.moe_layers))
    per_layer = count / len(dims.moe_layers)
    slots_per_token = dims.experts_per_token * per_layer / dims.choices
    shape = engine_shape(dims, config.lora, isa, actor.backend)
    lowest, with_lora = lowest_kept(dims, config), expert_lora_layers(dims, config.lora)
    of_layer = {
        own: own.saved(sent, load.total * slots_per_token * left.rows, actor.activations).values()
        for own in (shape, shape.without_lora)
    }
    kept = [
        size
        for layer in dims.moe_layers
        if layer >= lowest
        for size in of_layer[shape if layer in with_lora else shape.without_lora]
    ]
    rows = load.group * slots_per_token * left.rows
    buffers = shape.call(sent_of_group, rows, actor.activations)
    call = sum(buffers.values()) + actor.threads * rounded(shape.thread()) + sent_of_group * width * 16
    large = sum(size >= HUGE_PAGE for size in buffers.values())
    large += groups * sum(size / groups >= HUGE_PAGE for size in kept)
    adapters = sum(actor.counts(with_lora)) * expert_lora_params(dims, config.lora)
    return {
        "experts": count * dims.held_bytes(actor.backend),
        "LoRA": lora_bytes(config) * adapters,
        "optimizer": 8 * adapters / actor.copies + 16 * adapters * config.trainings,
        "kept activations": sum(kept),
        "workspace": call + large * HUGE_PAGE,
        # And what the other copies send at the end of a step: gradients of own layers, updated other ones.
        "staging": expert_staging(dims, sent, actor.answers) + 4 * adapters * (1 - 1 / actor.copies),
        "runtime": EXPERT_RUNTIME if config.cluster.name == "ray" else 0,
    }


def _lane_memory(
    dims: ModelDims, config: Config, backend: str, of_tokens: tuple[int, int, float]
) -> LaneMemory:
    """of_tokens: `LaneMemory.group`, total and slots."""
    plain = held_format(dims, backend) in ("f32", "bf16")
    float32 = engine_shape(dims, config.lora, "reference", backend).float32
    sizes = dims.held_bytes(backend), dims.most_held_bytes(backend), 4 * expert_lora_params(dims, config.lora)
    return LaneMemory(*sizes, *of_tokens, runtime=GPU_RUNTIME, float32=float32, plain=plain)
