"""What attention workers' lanes take of a predicted step (rule.experts.stream_to=workers), in seconds.

Every worker computes the plan's share of its host's experts for its own tokens, on the GPU that attention
uses; expert actors get the rest. Routing is taken as even. As in lane_seconds.py, of which the parts are that
both kinds of lanes have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kt_ray.config.schema import Config
from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.hardware.rates import Rates
from kt_ray.placement.expert_load import touched
from kt_ray.placement.lane_plan import expert_sizes
from kt_ray.placement.lane_share import ExpertSizes, batch_size, lane_parts, whole_experts
from kt_ray.placement.memory import home_socket
from kt_ray.placement.plan_types import LanePlan, Plan
from kt_ray.placement.worker_lanes import experts_near
from kt_ray.timing.lane_products import lane_flops
from kt_ray.timing.lane_seconds import ROUTED_SECONDS, adapter_bytes, computed
from kt_ray.timing.simulate import WorkerLaneCall


@dataclass(frozen=True)
class LeftCall:
    """What workers leave to an expert actor of a call.

    tokens, rows, experts: parts of those that the call would have. read: experts that workers copy meanwhile
    out of the same memory. gradients: bytes of adapters' gradients that come from the workers.
    """

    tokens: float = 1.0
    rows: float = 1.0
    experts: float = 1.0
    read: float = 0.0
    gradients: float = 0.0


@dataclass(frozen=True, eq=False)
class WorkerLaneSeconds:
    """The lanes of a plan's attention workers at given rates."""

    plan: Plan
    config: Config
    rates: Rates

    @property
    def run(self) -> bool:
        """Whether there are any whose seconds are known."""
        lane = self.plan.workers[0].lane
        return bool(lane and lane.cuda and self.rates.gpu is not None and self.rates.link is not None)

    def call(
        self, worker: int, layer: int, direction: str, tokens: int, *, call: int = 0
    ) -> WorkerLaneCall | None:
        """What a worker computes of its tokens' experts; None = nothing.

        Args:
            call: how many of the same layer came before it, whose experts are there if they are held.
        """
        if not tokens or not self.run or layer not in self.plan.dims.moe_layers:
            return None
        key = (worker, direction, tokens, min(call, 1))
        if key not in self._calls:
            self._calls[key] = self._call(*key)
        return self._calls[key]

    @cached_property
    def _calls(self) -> dict[tuple[int, str, int, int], WorkerLaneCall | None]:
        return {}

    def _call(self, worker: int, direction: str, tokens: int, call: int) -> WorkerLaneCall | None:
        dims, lane, carried = self.plan.dims, self._lane, self._carried(tokens)
        if not carried:
            return None
        assert self.rates.gpu is not None and self.rates.link is not None
        into, out = self.rates.link.to_device.value, self.rates.link.to_host.value
        element = ELEMENT_BYTES["float32" if dims.expert_format == "f32" else "bfloat16"]
        rows = max(1.0, tokens * dims.experts_per_token / dims.choices)
        gpu = lane_flops(self.rates.gpu, dims, self.config, rows)
        products = lane_parts(self._sizes.work(tokens), into, gpu, carried).products
        there = self._there(tokens, call)
        ahead = min(lane.ahead, carried) if not call else 0
        batches = -(-carried // batch_size(int(rows), dims.expert_params))
        how = {"recompute": lane.recompute, "float8": lane.float8}
        found = computed(dims, self.rates, direction, carried, batches, rows, carried=carried - there, **how)
        products *= found.products
        adapters = carried * self._adapter / into
        x = tokens * dims.expert_width * element
        forward = direction == "forward"
        stored = self._sizes.bytes - self._adapter
        device, home = self.plan.workers[worker].place, self._homes[worker]
        return WorkerLaneCall(
            device=device,
            home=home,
            asked=tokens * dims.experts_per_token * 8 / out if forward else 0.0,
            routing=ROUTED_SECONDS * tokens * dims.experts_per_token if forward else 0.0,
            entering=adapters + (0.0 if forward else (x + found.kept) / into),
            copies=(carried - there - ahead) * stored / into,
            copies_ahead=ahead * stored / into,
            products=products * (carried - there - ahead) / carried,
            products_ahead=products * ahead / carried,
            products_there=products * there / carried,
            dispatch=found.dispatch,
            leaving=(x + found.kept) / out if forward else 0.0,
            gradients=0.0 if forward else carried * self._adapter / out,
            sent=touched(dims.choices, dims.num_experts - carried, dims.experts_per_token),
        )

    def left(self, actor: int, direction: str, tokens: int, *, call: int = 0) -> LeftCall:
        """Args: tokens: of all the copy's replicas, of which each has its part."""
        here = self.plan.experts[actor]
        if not self.run or not any(worker.host == here.host for worker in self.plan.workers):
            return LeftCall()
        hosts = self.plan.attention_hosts // self.plan.copies or 1
        replicas = len(self.plan.replicas_of(0))
        own, count = -(-tokens // replicas), self._sizes.held
        carried = self._carried(own)
        if not carried:
            return LeftCall()
        dims = self.plan.dims
        held = sum(here.counts(dims.moe_layers)) / len(dims.moe_layers)
        part, near = carried / self._sizes.work(own).experts, replicas / hosts
        sent = touched(dims.choices, dims.num_experts - carried, dims.experts_per_token)
        copied = near * held / count
        return LeftCall(
            tokens=1 - (1 - sent) / hosts,
            rows=1 - part / hosts,
            experts=1 - part if hosts == 1 else 1.0,  # other hosts' tokens are for all of them
            read=copied * (carried - self._there(own, call)),
            gradients=copied * carried * self._adapter if direction == "backward" else 0.0,
        )

    @property
    def _lane(self) -> LanePlan:
        lane = self.plan.workers[0].lane
        assert lane is not None
        return lane

    def _carried(self, tokens: int) -> int:
        wanted = whole_experts(self._lane.share(tokens), self._sizes.held)
        return min(wanted, self._sizes.work(tokens).experts)

    def _there(self, tokens: int, call: int) -> int:
        """Experts that such a call finds on the device."""
        return min(self._lane.held, self._carried(tokens)) if call else 0

    @cached_property
    def _homes(self) -> list[str]:
        return [home_socket(worker, self.plan.hardware) for worker in self.plan.workers]

    @cached_property
    def _sizes(self) -> ExpertSizes:
        near = experts_near(self.plan.workers[0], self.plan.first_copy)
        return expert_sizes(near, self.plan.dims, self.config, together=True)

    @cached_property
    def _adapter(self) -> float:
        return adapter_bytes(self.plan.dims, self.config)
