"""The routers' load-balancing loss (Fedus et al. 2021), as transformers computes it for a whole batch.

With f_e the share of (layer, token) rows that chose expert e and p_e its mean probability, both over all MoE
layers and all valid tokens of the step, the loss is E Σ f_e p_e. Counts have no gradient, so a row's
probability of expert e has the slope coefficient · E f_e / rows: a constant once the step's counts are known.
A separate forward pass counts them, with the dropout of the training pass that follows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kt_ray.errors import UserError


class RouterWatch:
    """What the routers of a stage's layers gave out last, as transformers' loss reads it.

    Attributes:
        layers: those whose routers it reads; not those of routers that hash tokens (DeepSeek-V4).
        counts, probabilities: float64 [E], summed since `reset`.
    """

    def __init__(self, causal: Any, layers: Mapping[int, nn.Module], top_k: int, num_experts: int) -> None:
        self.top_k = top_k
        self.num_experts = num_experts
        self.layers: set[int] = set()
        self._last: Tensor | None = None
        recorder = router_recorder(causal)

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._watching:
                self._last = output[recorder.index] if isinstance(output, tuple | list) else output

        for index, layer in layers.items():
            for name, module in layer.named_modules():
                if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                    module.register_forward_hook(note)
                    self.layers.add(index)
        self.reset(False)

    def reset(self, watching: bool) -> None:
        """Begin a pass that asks for routers, or one that does not."""
        self._watching, self._last = watching, None
        self.counts = np.zeros(self.num_experts)
        self.probabilities = np.zeros(self.num_experts)

    def take(self, rows: Tensor | None) -> Tensor:
        """Probabilities [T, E] of the valid rows that the last layer call routed; differentiable.

        Args:
            rows: int64 [T] of them; None = all.
        """
        assert self._last is not None, "the layer called no router"
        logits, self._last = self._last, None
        probabilities = torch.softmax(logits.reshape(-1, self.num_experts).float(), dim=-1)
        return probabilities if rows is None else probabilities.index_select(0, rows)

    def count(self, rows: Tensor | None) -> None:
        """Add the last layer call to `counts` and `probabilities`."""
        probabilities = self.take(rows)
        chosen = probabilities.topk(self.top_k, dim=-1).indices.flatten()
        self.counts += torch.bincount(chosen, minlength=self.num_experts).cpu().numpy()
        self.probabilities += probabilities.double().sum(dim=0).cpu().numpy()


def balance(
    counts: np.ndarray, probabilities: np.ndarray, top_k: int, coefficient: float
) -> tuple[float, tuple[float, ...]]:
    """(the loss, without its coefficient; slope of coefficient · loss in a row's probability of each expert).

    Args:
        counts, probabilities: float64 [E], summed over layers, stages, micro-batches and replicas.
    """
    experts, rows = len(counts), counts.sum() / top_k
    share = counts / rows
    loss = float(experts * (share * probabilities / rows).sum())
    return loss, tuple((coefficient * experts * share / rows).tolist())


def router_recorder(causal: Any) -> Any:
    """transformers' note of which modules give router logits, for a family with this loss.

    Raises:
        UserError: the family has no such loss, or another one.
    """
    from transformers.utils.output_capturing import OutputRecorder

    name = type(causal).__name__
    function = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
    recorder: Any = None
    for module in causal.modules():  # a multimodal class may leave it to its language model
        recorder = recorder or (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
    missing = function is None or recorder is None
    if missing or not _agrees(function):
        raise UserError(
            f"{name} has no load-balancing loss of its routers in transformers"
            if missing
            else f"{name} has another load-balancing loss",
            where="trainer.aux_loss",
            required="a family with Switch Transformer's loss (Mixtral, Qwen-MoE, OLMoE, gpt-oss, ...)",
            remedy="set trainer.aux_loss=0",
        )
    return recorder if isinstance(recorder, OutputRecorder) else OutputRecorder(recorder)


def _agrees(function: Any) -> bool:
    """Whether a family's loss is the one above, on a small example with padding."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=generator, dtype=torch.float32) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    try:
        theirs = float(function(logits, 4, 2, mask))
    except Exception:  # another signature: another loss
        return False
    valid = torch.cat([layer[:5].softmax(dim=-1) for layer in logits]).double()
    counts = torch.bincount(valid.topk(2, dim=-1).indices.flatten(), minlength=4).double()
    ours, _ = balance(counts.numpy(), valid.sum(dim=0).numpy(), 2, 1.0)
    return abs(ours - theirs) <= 1e-5 * abs(theirs)
