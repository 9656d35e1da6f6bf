"""What layers by ranges take beyond whole ones (rule.activations=ranges): work done twice, and copies.

Hidden states, gradients and heads' outputs come from the host and go back in the middle of the computation,
which waits for them. Not counted is what every range of heads repeats: norms of what latent attention
compresses, and the first products of adapters between.
"""

from __future__ import annotations

from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.hardware.rates import LinkRate
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.range_memory import heads_width
from kt_ray.timing.layer_work import Counts, LayerWork

# Times that a hidden state or a gradient comes to the device and goes back, and heads' outputs.
_HIDDEN = {"forward": (2, 1), "join": (1, 1), "recompute": (1, 0), "backward": (5, 2)}
_HEADS = {"forward": (1, 1), "backward": (2, 1)}  # and once more out where they are computed again


def repeated(work: LayerWork, rows: int, width: int, *, retained: bool) -> Counts:
    """What backward computes twice: attention's first projections, and its heads unless `retained`."""
    m, total = rows * width, Counts()
    for name, n_in, n_out, rank, of_attention in work.modules:
        if of_attention and not name.endswith(".o_proj") and not (retained and n_in != work.dims.hidden_size):
            total = total.plus(work.linear(n_in, n_out, rank, m))
    return total if retained else total.plus(work.pairs(rows, width))


def copied_seconds(plan: Plan, link: LinkRate | None, kind: str, layer: int, tokens: int) -> float:
    """Seconds of a layer's copies between the GPU and the host; 0 without a GPU."""
    if link is None or plan.workers[0].device == "cpu":
        return 0.0
    element = ELEMENT_BYTES[plan.dtype]
    hidden, heads = plan.dims.hidden_size * element, heads_width(plan.dims, layer) * element
    into, out = _HIDDEN.get(kind, (0, 0))
    heads_in, heads_out = _HEADS.get(kind, (0, 0))
    heads_out += kind == "backward" and plan.attention_output != "retain"
    arriving, leaving = into * hidden + heads_in * heads, out * hidden + heads_out * heads
    return tokens * (arriving / link.to_device.value + leaving / link.to_host.value)
