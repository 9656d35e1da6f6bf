"""What an expert actor's GPU lane takes of a predicted call: the split that the runtime makes, in seconds.

The share is the plan's (`LanePlan.share`), rounded to whole experts as the runtime does it, and the seconds
are those by which rule.experts.stream=auto chooses it (lane.py), undivided: the simulation lets actors that
use one link or one GPU, and attention, share it. Besides, gates and ups that are kept for backward, and
kernels that the lane's thread dispatches, batch after batch. Routing is taken as even: residents get their
share of the tokens and no more, and no row of a batch is filled up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.hardware.rates import Rates
from kt_ray.placement.expert_load import touched
from kt_ray.placement.lane_plan import expert_sizes
from kt_ray.placement.lane_share import ExpertSizes, batch_size, lane_parts, whole_experts
from kt_ray.placement.lora_sizes import expert_lora_params, expert_lora_share
from kt_ray.placement.memory import reached_part
from kt_ray.placement.plan_types import ExpertActorPlan, Plan
from kt_ray.timing.lane_products import lane_flops
from kt_ray.timing.layer_work import dispatch_seconds
from kt_ray.timing.simulate import LaneCall

# Kernels and copies per batch (kt_ray.experts.lane_math with LoRA, gate, up and down, no dropout; views not
# counted). Two more where gate and up are not multiplied as one matrix.
KERNELS = {"forward": 19.0, "backward": 47.0}
# activations=recompute: gate and up do not travel, and are computed once more
KERNELS_AGAIN = {"forward": -2.0, "backward": 0.0}
# float8 products: each matrix that is rounded takes three kernels (5 of them in forward, 6 in backward, 3 for
# gate and up once more), and a product two per expert (itself, and the conversion) in place of one for all.
# Gate and up are then multiplied one by one.
FLOAT8_KERNELS = {"forward": 2 + 5 * 3 - 3.0, "backward": 2 + 6 * 3 - 3.0}
FLOAT8_AGAIN = {"forward": 0.0, "backward": 2 + 3 * 3 - 2.0}
FLOAT8_EACH = 2.0  # per product and expert; a call has three products, five where gate and up come again
# And copies of each expert that is not there already: its matrices and scales lie side by side
# (kt_ray.checkpoint.load_experts), those of a GGUF file do not. Biases, three more, are not counted.
KERNELS_EACH, KERNELS_EACH_GGUF = 1.0, 3.0
# Bytes per element of what goes to every device (x in bfloat16; backward dy in float32 besides) and back, of
# tokens that have a row there (y, or dx, in float32).
ENTERING, BACK = {"forward": 2, "backward": 6}, 4
# What sorting a call's slots (tokens times experts per token) by expert takes one core, each: measured on a
# Zen 4 core, 21 to 46 ns (32,768 to 262,144 slots).
ROUTED_SECONDS = 35e-9


class Computed(NamedTuple):
    """Of a call on one GPU: seconds of dispatch on a core; times that its products take; bytes of gates and
    ups that leave in forward and come back in backward."""

    dispatch: float
    products: float
    kept: float


def computed(
    dims: ModelDims,
    rates: Rates,
    direction: str,
    experts: int,
    batches: int,
    rows: float,
    *,
    carried: float,
    recompute: bool,
    float8: bool,
) -> Computed:
    """Args: experts, batches: that the GPU computes. rows: of each expert. carried: experts that are not
    there already. recompute: gates and ups. float8: `LanePlan.float8`."""
    assert rates.gpu is not None
    again = recompute and direction == "backward"
    each = KERNELS_EACH_GGUF if dims.experts_file_bytes else KERNELS_EACH
    kernels, started, products, kept = KERNELS[direction], each * carried, 1.0, 0.0
    if float8:
        kernels += FLOAT8_KERNELS[direction] + (FLOAT8_AGAIN[direction] if recompute else 0.0)
        started += FLOAT8_EACH * (5 if again else 3) * experts
    if recompute:
        kernels += KERNELS_AGAIN[direction]
        if again:
            products += 2 / 3 if dims.gated else 1 / 2
    else:
        element = ELEMENT_BYTES["float32" if dims.expert_format == "f32" else "bfloat16"]
        kept = experts * rows * (2 if dims.gated else 1) * dims.expert_intermediate * element
    started += kernels * batches
    return Computed(dispatch_seconds(started, rates.gpu, rates.cpu_one), products, kept)


def adapter_bytes(dims: ModelDims, config: Config) -> float:
    """Bytes of one expert's LoRA, mean over its layers."""
    return 4.0 * expert_lora_params(dims, config.lora) * expert_lora_share(dims, config.lora)


@dataclass(frozen=True, eq=False)
class LaneSeconds:
    """The lanes of a plan at given rates."""

    plan: Plan
    config: Config
    rates: Rates

    def part(self, actor: int, layer: int, tokens: int, *, call: int = 0) -> tuple[float, float]:
        """Parts of the actor's rows that its lane computes: resident experts, and carried ones."""
        if not self._runs(actor):
            return 0.0, 0.0
        stays, others, carried = self._counts(actor, layer, tokens, call=call)
        busy = self._sizes(actor, others).work(tokens).experts if others else 0
        streamed = others * carried / busy if busy else 0.0
        return stays / (stays + others), streamed / (stays + others)

    def calls(
        self, actor: int, layer: int, direction: str, tokens: int, *, call: int = 0
    ) -> tuple[LaneCall, ...]:
        """A call's lane, by GPU; nothing where the CPU computes all of it, or the stand-in on its cores does.

        Experts are dealt out evenly, so every GPU takes as long as the one that gets most.

        Args:
            call: how many of the same layer came before it, whose experts are there if they are held.
        """
        if not tokens or not self._runs(actor):
            return ()
        # Layers of which as many experts stay and come are alike, and so are calls from the third on.
        key = (actor, self.held(actor, layer), direction, tokens, min(call, 2))
        if key not in self._known:
            self._known[key] = self._calls(actor, layer, direction, tokens, call)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, tuple[int, int], str, int, int], tuple[LaneCall, ...]]:
        return {}

    def _calls(self, actor: int, layer: int, direction: str, tokens: int, call: int) -> tuple[LaneCall, ...]:
        assert self.rates.gpu is not None and self.rates.link is not None
        here, dims = self.plan.experts[actor], self.plan.dims
        assert here.lane is not None
        devices = len(here.lane.devices)
        stays, others, carried = self._counts(actor, layer, tokens, call=call)
        link = self.rates.link.to_device.value
        rows = max(1.0, tokens * dims.experts_per_token / dims.choices)
        gpu = lane_flops(self.rates.gpu, dims, self.config, rows)
        together = batch_size(int(rows), dims.expert_params)
        copies = products = brought = 0.0
        experts = batches = 0
        if others and carried:
            found = lane_parts(self._sizes(actor, others).work(tokens), link, gpu, carried, devices)
            copies, products = found.copies, found.products
            own = -(-carried // devices)
            experts, batches, brought = own, -(-own // together), float(own)
            if call:  # their adapters travel with every call
                before = -(-self._counts(actor, layer, tokens, call=call - 1)[2] // devices)
                held = min(here.lane.held, before) / own
                copies *= 1 - held * (1 - self._adapter / self._of_actor[actor].bytes)
                brought *= 1 - held
        if stays:  # only their adapters are copied
            kept = replace(self._sizes(actor, stays), bytes=self._adapter)
            work = kept.work(tokens)
            found = lane_parts(work, link, gpu, work.experts, devices)
            copies, products = copies + found.copies, products + found.products
            own = -(-work.experts // devices)
            experts, batches = experts + own, batches + -(-own // together)
        if not experts:
            return ()
        recompute = here.activations == "recompute" or here.lane.recompute
        how = {"recompute": recompute, "float8": here.lane.float8}
        of_batches = computed(dims, self.rates, direction, experts, batches, rows, carried=brought, **how)
        products *= of_batches.products
        # Gate and up go to host memory and come back.
        leaving = of_batches.kept / self.rates.link.to_host.value if direction == "forward" else 0.0
        copies += of_batches.kept / link if direction == "backward" else 0.0
        # The first batch is copied before anything is computed, the last one computed after all copies.
        ahead = copies / batches
        last = products / batches
        reached = tokens * reached_part(dims, here, self.plan.attention_hosts)
        width, routing = reached * dims.expert_width, 0.0
        entering = ENTERING[direction] * width / link
        back = (
            BACK
            * self._answered(actor, layer, tokens, call)
            * dims.expert_width
            / self.rates.link.to_host.value
        )
        if direction == "forward":
            routing = ROUTED_SECONDS * reached * dims.experts_per_token
        whole = (
            ahead + entering,
            copies - ahead,
            products - last,
            of_batches.dispatch,
            back,
            last,
            leaving,
            routing,
        )
        return tuple(LaneCall(device, *whole) for device in here.lane.devices)

    def added(
        self, actor: int, layer: int, direction: str, tokens: int, *, call: int = 0
    ) -> tuple[float, float]:
        """Of a call that GPUs have a part in: bytes of x that the actor's cores keep for them, and bytes that
        they read and write to add up the answers."""
        if not tokens or not self._runs(actor):
            return 0.0, 0.0
        lane, dims = self.plan.experts[actor].lane, self.plan.dims
        stays, _, carried = self._counts(actor, layer, tokens, call=call)
        if lane is None or not stays + carried:
            return 0.0, 0.0
        element = ELEMENT_BYTES["float32" if dims.expert_format == "f32" else "bfloat16"]
        reached = reached_part(dims, self.plan.experts[actor], self.plan.attention_hosts)
        kept = reached * tokens * dims.expert_width * element if direction == "forward" else 0.0
        answered = len(lane.devices) * self._answered(actor, layer, tokens, call)
        after = 4.0 * dims.expert_width * (answered + 2 * min(tokens, answered))
        if direction == "backward":  # gradients of the adapters, each read and added to another
            after += 3 * (stays + carried) * self._adapter
        return kept, after

    def _answered(self, actor: int, layer: int, tokens: int, call: int) -> float:
        """Tokens that chose an expert of one of the lane's devices."""
        lane = self.plan.experts[actor].lane
        assert lane is not None
        stays, _, carried = self._counts(actor, layer, tokens, call=call)
        own = -(-stays // len(lane.devices)) - (-carried // len(lane.devices))
        return tokens * touched(self.plan.dims.choices, own, self.plan.dims.experts_per_token)

    def _runs(self, actor: int) -> bool:
        lane = self.plan.experts[actor].lane
        known = self.rates.gpu is not None and self.rates.link is not None
        return lane is not None and lane.cuda and known

    def held(self, actor: int, layer: int) -> tuple[int, int]:
        """Experts of a layer that stay on the lane's devices, and others of the actor."""
        stays = len(self._resident[actor].get(layer, ()))
        return stays, len(self.plan.experts[actor].experts_of(layer)) - stays

    def _counts(self, actor: int, layer: int, tokens: int, *, call: int = 0) -> tuple[int, int, int]:
        """Experts of a layer that stay on the device; in host memory; of these carried for such a call."""
        here = self.plan.experts[actor]
        assert here.lane is not None
        stays, others = self.held(actor, layer)
        wanted = whole_experts(here.lane.share(tokens, again=call > 0), others)
        busy = self._sizes(actor, others).work(tokens).experts if others else 0
        return stays, others, min(wanted, busy)

    def _sizes(self, actor: int, experts: int) -> ExpertSizes:
        return replace(self._of_actor[actor], held=experts)

    @property
    def _adapter(self) -> float:
        return adapter_bytes(self.plan.dims, self.config)

    @cached_property
    def _of_actor(self) -> tuple[ExpertSizes, ...]:
        def sizes(actor: ExpertActorPlan) -> ExpertSizes:
            return expert_sizes((actor,), self.plan.dims, self.config)

        return tuple(map(sizes, self.plan.experts))

    @cached_property
    def _resident(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        return tuple(dict(a.lane.resident) if a.lane else {} for a in self.plan.experts)
