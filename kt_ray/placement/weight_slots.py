"""Which layers' weights are in a GPU's slots when they do not all stay there (rule.resident_layers).

The weights of a streamed layer wait in host memory. A worker brings them into one of a few slots when its
program comes to the layer, and those of the next one meanwhile: upwards in a forward pass, downwards in
backward. What a recomputed layer holds for autograd stays until it is differentiated. The worker
(kt_ray.model.streamed_weights) and the simulation (kt_ray.timing.simulate) ask the same object, so what is
predicted is what is copied. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kt_ray.dims.model_dims import ModelDims
from kt_ray.placement.order import Op, stage_program
from kt_ray.placement.plan_types import WorkerPlan

_USES = frozenset(("forward", "join", "recompute", "backward"))


class Filled(NamedTuple):
    """A slot that gets a layer's weights; evicted: the layer that it had, if any."""

    slot: int
    layer: int
    evicted: int | None


class WeightSlots:
    """Slots of one worker.

    Args:
        layers: streamed layers, ascending.
        count: slots.
    """

    def __init__(self, layers: Sequence[int], count: int) -> None:
        self.layers = tuple(layers)
        self._position = {layer: number for number, layer in enumerate(self.layers)}
        self._slots: list[int | None] = [None] * count
        self._used: list[int] = list(range(count))  # the one used longest ago first
        self._held: Counter[int] = Counter()
        self._wraps = True

    def slot_of(self, layer: int) -> int | None:
        """Where a layer's weights are."""
        return self._slots.index(layer) if layer in self._slots else None

    def bring(self, layer: int) -> Filled | None:
        """The layer is used now. Returns what has to be copied for it.

        Raises:
            RuntimeError: every slot holds a layer that is still needed.
        """
        filled = self._fill(layer, layer)
        slot = self.slot_of(layer)
        if slot is None:
            raise RuntimeError(
                f"layer {layer} finds no slot for its weights: {len(self._slots)} slots, held are layers "
                f"{sorted(self._held)}"
            )
        self._used.remove(slot)
        self._used.append(slot)
        return filled

    def ahead(self, layer: int, *, downwards: bool) -> Filled | None:
        """What to copy while `layer` is computed: the next layer, unless it is there or finds no slot."""
        number = self._position[layer] + (-1 if downwards else 1)
        if number < 0 or (number == len(self.layers) and not self._wraps):
            return None
        return self._fill(self.layers[number % len(self.layers)], layer)

    def hold(self, layer: int) -> None:
        """Keep a layer's weights where they are until `release`; counted."""
        if layer in self._position:
            self._held[layer] += 1

    def release(self, layer: int) -> None:
        """Undo one `hold`."""
        if self._held[layer] > 1:
            self._held[layer] -= 1
        else:
            del self._held[layer]

    def begin(self, *, wraps: bool) -> None:
        """A pass begins: what one that was given up held is free. wraps: upwards the first layer follows the
        last, as when another pass like this one comes."""
        self._held.clear()
        self._wraps = wraps

    def _fill(self, layer: int, current: int) -> Filled | None:
        """Give a layer the free slot used longest ago, unless it has one."""
        if layer in self._slots:
            return None
        for slot in self._used:
            before = self._slots[slot]
            if before is None or (before not in self._held and before != current):
                self._slots[slot] = layer
                return Filled(slot, layer, before)
        return None


def streaming(
    workers: Sequence[WorkerPlan],
    dims: ModelDims,
    groups: int,
    resident: int | None,
    *,
    trains: bool = True,
    lowest: int = 0,
) -> tuple[WorkerPlan, ...]:
    """The workers of a plan with what is streamed on each.

    Args:
        resident: layers of each that stay; None = all. trains: whether backward passes them, down to
            `lowest`.
    """
    if resident is None:
        return tuple(workers)
    last = max(worker.stage for worker in workers)
    ranges = [next(w.layers for w in workers if w.stage == stage) for stage in range(last + 1)]

    kinds: dict[int, tuple[tuple[int, ...], int]] = {}  # by stage: streamed layers, slots

    def of(worker: WorkerPlan) -> WorkerPlan:
        if worker.stage in kinds:
            streamed, slots = kinds[worker.stage]
            return replace(worker, streamed=streamed, slots=slots)
        start, stop = worker.layers
        stay = resident_of(worker.layers, min(resident, stop - start))
        streamed = tuple(layer for layer in range(start, stop) if layer not in stay)
        kind = "train" if trains else "eval"
        program = stage_program(ranges, dims.moe_layers, groups, worker.stage, kind, lowest)
        kinds[worker.stage] = streamed, slots_needed(program, streamed)
        return of(worker)

    return tuple(map(of, workers))


def resident_of(layers: tuple[int, int], count: int) -> tuple[int, ...]:
    """`count` of the layers [start, stop), evenly spread, so that the link is evenly used."""
    start, stop = layers
    own = stop - start
    return tuple(start + i for i in range(own) if (i + 1) * count // own > i * count // own)


def slots_needed(program: Iterable[Op], streamed: Sequence[int]) -> int:
    """Slots with which no layer waits for a place: those held at once, the one in use, and the next."""
    wanted, most, held = frozenset(streamed), 0, Counter[int]()
    for op in program:
        if op.layer not in wanted or op.kind not in _USES:
            continue
        if op.kind == "recompute":
            held[op.layer] += 1
        most = max(most, len(held) + (op.layer not in held))
        if op.kind == "backward":
            held[op.layer] -= 1
            if held[op.layer] <= 0:
                del held[op.layer]
    return min(len(wanted), most + 1)
