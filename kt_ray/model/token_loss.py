"""Token losses and their gradient at the last layer's output.

The head and the final norm are frozen, so a chunk of rows gives its losses and its part of dH at
once, and its logits are gone before the next chunk: [rows, vocab] never exists as a whole, nor is
anything computed twice. Inside a chunk, deepspeed's chunked cross-entropy (where it is installed)
saves the float32 copies of the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.batch import IGNORE
from kt_ray.model.build import StageModel
from kt_ray.placement.memory import logit_rows

CrossEntropy = Callable[[Tensor, Tensor], Tensor]  # logits [n, V], targets [n] -> losses float32 [n]
# Both see a chunk: flat positions [n], and what the head made of them.
Slopes = Callable[[Tensor, Tensor], Tensor]  # losses float32 [n] -> the gradient in each of them, float32 [n]
Look = Callable[[Tensor, Tensor, Tensor], None]  # logits [n, V], losses float32 [n]


def uniform(scale: float) -> Slopes:
    """Of scale · the losses' sum."""
    return lambda rows, losses: torch.full_like(losses, scale)


def plain_cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Float32 cross-entropy per row."""
    return torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="none")


@cache
def chunked_cross_entropy() -> CrossEntropy:
    """deepspeed's cross-entropy without float32 copies of the logits, or torch's where it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its imports: accelerator probing, deprecated modules
            from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy as deepspeed_loss
    except Exception:  # deepspeed's import probes accelerators and compilers; any failure means "not here"
        return plain_cross_entropy

    def loss(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        return deepspeed_loss(logits_NV, targets_N, ignore_index=IGNORE, reduction="none")

    return loss


def shifted_targets(labels: Tensor) -> Tensor:
    """Target of each position: the next position's label. int64 [b, s], IGNORE at the end."""
    out = torch.full_like(labels, IGNORE)
    out[:, :-1] = labels[:, 1:]
    return out


class Head:
    """From the last layer's output to logits and losses.

    Attributes:
        norm: the final norm when logits = lm_head(norm(h)) exactly, found by trying; None for a family
            that scales or caps its logits, which goes through its own forward.
    """

    def __init__(self, model: StageModel, loss_chunk: int | str) -> None:
        self.capture = model.capture
        self.lm_head = model.causal.get_output_embeddings()
        self.hidden_size = model.hidden_size
        self.dtype = model.dtype
        self.device = model.device
        self.loss_chunk = loss_chunk
        self.norm = self._find_norm(model.base)

    def _inputs(self, b: int, s: int) -> dict[str, Tensor]:
        embeds = torch.zeros(b, s, self.hidden_size, dtype=self.dtype, device=self.device)
        # Qwen4-Exp would look for tokens of these embeddings, for its layers.
        named = getattr(self.capture.base.config, "ple_layer_ids", None)
        ids = {"ple_input_ids": torch.zeros(b, s, dtype=torch.int64, device=self.device)} if named else {}
        return {"inputs_embeds": embeds, **ids}

    @torch.no_grad()
    def _find_norm(self, base: Any) -> nn.Module | None:
        generator = torch.Generator().manual_seed(0)
        if len(self.capture.state_shape) != 1:
            return None  # several streams: the family's own forward makes one of them
        h = torch.randn(1, 3, self.hidden_size, generator=generator, dtype=torch.float32).to(
            self.device, self.dtype
        )
        expected = self.capture.logits(self._inputs(1, 3), None, h)
        norms = (module for name, module in base.named_children() if "norm" in name)
        return next((norm for norm in norms if torch.equal(self.lm_head(norm(h)), expected)), None)

    def logits(self, h: Tensor) -> Tensor:
        """Logits [b, s, V] of one micro-batch's h [b, s, *state_shape], in the model's dtype."""
        if self.norm is not None:
            return self.lm_head(self.norm(h))
        b, s = h.shape[:2]
        return self.capture.logits(self._inputs(b, s), None, h)

    def loss(self, h: Tensor, labels: Tensor, scale: float | None) -> tuple[float, Tensor | None]:
        """Sum of token losses, and the gradient of scale · sum.

        Args:
            h: [b, s, *state_shape] output of the last layer (not changed), on the device or the host.
            labels: int64 [b, s], not shifted, IGNORE where not trained.
            scale: factor of the gradient (1 / tokens of the step); None = no gradient.

        Returns:
            (float64 sum over trained tokens, dH like h or None).
        """
        parts, grad = self._losses(h, shifted_targets(labels), None if scale is None else uniform(scale))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _, losses in parts:
            total += losses.sum()
        return float(total), grad

    def token_losses(
        self, h: Tensor, targets: Tensor, slopes: Slopes | None, look: Look | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Every token's loss, and the gradient of each at its own position, times its slope.

        Args:
            h: [b, s, *state_shape] output of the last layer (not changed).
            targets: int64 [b, s], already shifted, IGNORE where there is none.
            slopes: None = no gradient. look: is shown every chunk.

        Returns:
            (float64 [b, s], 0 without a target; like h: at a position the gradient of that position's loss,
            or None). Heads act on positions one by one.
        """
        parts, grad = self._losses(h, targets, slopes, look)
        out_N = torch.zeros(targets.numel(), dtype=torch.float64, device=self.device)
        for rows, losses in parts:
            out_N[rows] = losses
        return out_N.view(targets.shape), grad

    def _losses(
        self, h: Tensor, targets: Tensor, slopes: Slopes | None, look: Look | None = None
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """By chunk (flat positions, their losses in float64), and the gradients times `slopes`."""
        targets_N = targets.reshape(-1)
        parts: list[tuple[Tensor, Tensor]] = []
        flat_NH = h.detach().flatten(0, 1)
        grad_NH = None if slopes is None else torch.zeros_like(flat_NH)
        # positions without a target have neither a loss nor a gradient
        trained = (targets_N != IGNORE).nonzero().squeeze(1)
        gpu = self.device.type != "cpu"
        chunk = logit_rows(self.loss_chunk, trained.numel(), self.lm_head.out_features, gpu=gpu)
        entropy = chunked_cross_entropy() if chunk < trained.numel() else plain_cross_entropy
        if self.norm is None:
            chunk = min(chunk, h.shape[1])  # to the family's own forward they are a row of the batch
        with torch.set_grad_enabled(slopes is not None):
            for rows in trained.split(chunk) if trained.numel() else ():
                at = rows.to(h.device)
                leaf = flat_NH[at].to(self.device).requires_grad_(slopes is not None)
                logits = self.logits(leaf[None])[0] if self.norm is None else self.lm_head(self.norm(leaf))
                losses = entropy(logits, targets_N[rows])
                parts.append((rows, losses.detach().double()))
                if look is not None:
                    look(rows, logits.detach(), losses.detach())
                if grad_NH is not None and slopes is not None:
                    slopes_n = slopes(rows, losses.detach())
                    grad_NH[at] = torch.autograd.grad(losses, leaf, slopes_n)[0].to(h.device)
        return parts, None if grad_NH is None else grad_NH.view_as(h)
