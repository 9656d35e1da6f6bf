"""Speed of what a decoder layer has beside matrix products: adapters, norms, attention's backward.

Each is the code that training runs (a LoRA layer, an RMS norm as transformers writes it, torch's attention),
at a size where neither dispatch nor one cache decides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kt_ray.hardware.rates import BlockRate, Figure

RANK = 8
HEADS = 8
Timed = Callable[[Callable[[], object]], float]


def measure_blocks(
    device: torch.device, timed: Timed, tokens: int, hidden: int, *, masked: bool = False
) -> BlockRate:
    """Rates of one device with the present number of torch threads.

    Args:
        timed: seconds of a call, waited for.
        masked: measure attention with a mask as well, for which a GPU has another kernel.
    """
    adapter, adapter_backward = _adapter(device, timed, tokens, hidden)
    norm, norm_backward = _norm(device, timed, tokens, hidden)
    flop, _, equal = _attention(device, timed, tokens, HEADS, 128, 128)
    few, *narrow = _attention(device, timed, tokens, HEADS, 24, 16)
    many, *wide = _attention(device, timed, tokens, HEADS, 192, 128)
    products, scores = [], []
    for least, most in zip(narrow, wide, strict=True):
        products.append((many - few) / max(most - least, 1e-9))
        scores.append(HEADS * tokens**2 / max(least - few / products[-1], 1e-3 * least))
    figures = [adapter, adapter_backward, norm, norm_backward, flop / equal, *products, *scores]
    if masked:
        figures += [flop / took for took in _attention(device, timed, tokens, HEADS, 128, 128, masked)[1:]]
    return BlockRate(*(Figure(value, "measured") for value in figures))


class _Free(nn.Linear):
    """A linear layer whose products cost nothing, so that what LoRA adds to it is timed alone."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.detach()  # LoRA may be added in place

    def input_gradient(self, dy: Tensor, rows: slice = slice(None)) -> Tensor:
        return self.weight.detach()


def _adapter(device: torch.device, timed: Timed, tokens: int, hidden: int) -> tuple[float, float]:
    """Elements/s of a LoRA layer's own path, [tokens, hidden] to the same."""
    import peft

    from kt_ray.model.lora_linear import LoraLinear

    free = _Free(hidden, hidden, bias=False, dtype=torch.bfloat16, device=device)
    free.weight = nn.Parameter(torch.ones(tokens, hidden, dtype=torch.bfloat16, device=device), False)
    model = nn.Sequential(free)
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, target_modules=["0"]), model)
    model[0].__class__ = LoraLinear
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            parameter.data = torch.ones(
                *((RANK, hidden) if "lora_A" in name else (hidden, RANK)), dtype=torch.float32, device=device
            )
            parameter.requires_grad_(True)
    x = torch.ones(tokens, hidden, dtype=torch.bfloat16, device=device)
    elements, one = 2 * x.numel(), torch.ones_like(x)
    with torch.no_grad():
        forward = timed(lambda: adapted(x))
    leaf = x.clone().requires_grad_()

    def through() -> None:
        leaf.grad = None  # adding up would be a pass of its own
        torch.autograd.backward(adapted(leaf), one)

    both = timed(through)
    return elements / forward, elements / max(both - forward, 1e-9)


def _norm(device: torch.device, timed: Timed, tokens: int, hidden: int) -> tuple[float, float]:
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def norm(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    x = torch.ones(tokens, hidden, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        forward = timed(lambda: norm(x))
    leaf, one = x.clone().requires_grad_(), torch.ones_like(x)
    both = timed(lambda: torch.autograd.backward(norm(leaf), one))
    return x.numel() / forward, x.numel() / max(both - forward, 1e-9)


def _attention(
    device: torch.device, timed: Timed, tokens: int, heads: int, keys: int, values: int, masked: bool = False
) -> tuple[float, float, float]:
    """FLOP of the forward; seconds of forward and backward."""
    q, k = (torch.ones(1, heads, tokens, keys, dtype=torch.bfloat16, device=device) for _ in range(2))
    v = torch.ones(1, heads, tokens, values, dtype=torch.bfloat16, device=device)
    seen = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril() if masked else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=not masked)

    with torch.no_grad():
        forward = timed(lambda: attend(q, k, v))
    leaves = tuple(t.clone().requires_grad_() for t in (q, k, v))
    one = torch.ones_like(v)
    both = timed(lambda: torch.autograd.grad(attend(*leaves), leaves, one))
    flop = 2.0 * heads * tokens * tokens * (keys + values)
    return flop, forward, max(both - forward, 1e-9)
