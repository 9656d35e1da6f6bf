"""AdamW over float32 LoRA masters, and the learning-rate schedule.

Used by attention worker 0 (the non-expert LoRA of all stages) and by every expert actor (its own
experts' LoRA): one implementation, so that both halves of the model take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kt_ray.config.schema import OptimConfig


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """`optim.warmup` as a number of steps: a share of all steps below 1, else a count."""
    if optim.warmup < 1:
        return math.ceil(optim.warmup * total_steps)
    return int(optim.warmup)


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) out of `total_steps`.

    Linear warm-up from lr / warmup to lr, then "constant", "linear" or "cosine" down to
    lr * min_lr_ratio at the last step.
    """
    warmup = warmup_steps(optim, total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - warmup) / max(1, total_steps - warmup)
    progress = min(1.0, max(0.0, progress))
    floor = optim.min_lr_ratio
    if optim.schedule == "linear":
        return optim.lr * (1.0 - (1.0 - floor) * progress)
    if optim.schedule == "cosine":
        return optim.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    raise ValueError(f"optim.schedule {optim.schedule!r} is not one of cosine, linear, constant")


def use_torch_threads(threads: int) -> None:
    """torch's thread count for the calling thread.

    The first parallel operation of a thread sets its count to the process-wide last one; asking first
    makes that happen now, so that it cannot undo what is set here.
    """
    torch.get_num_threads()
    torch.set_num_threads(max(1, threads))


_ROW = 4096  # summed by one thread, whatever their number
_BLOCK = _ROW * 4096  # elements widened to float64 at a time


def squared_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Sum of squares of all elements in float64; the same bits for any number of torch threads."""
    rows: list[float] = []
    for tensor in tensors:
        for block in tensor.detach().reshape(-1).split(_BLOCK):
            squares = block.to(torch.float64).square_()
            whole = squares.numel() // _ROW * _ROW
            rows.extend(squares[:whole].view(-1, _ROW).sum(dim=1).tolist())
            rows.append(float(squares[whole:].sum()))
    return math.fsum(rows)


class LoraOptimizer:
    """AdamW (torch, fused) over a fixed list of float32 parameters whose `.grad` is always set.

    Decoupled weight decay as in Loshchilov & Hutter 2019. `apply` scales the gradients by the clip
    factor in place, steps, and zeroes them.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optim: OptimConfig) -> None:
        self.parameters = list(parameters)
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise ValueError(f"optimizer parameters must be float32, got {parameter.dtype}")
            parameter.grad = torch.zeros_like(parameter)
        self._adamw = torch.optim.AdamW(
            self.parameters or [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        for parameter in self.parameters:
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def gradients(self) -> list[torch.Tensor]:
        """The gradient tensors, in parameter order."""
        grads = []
        for parameter in self.parameters:
            assert parameter.grad is not None
            grads.append(parameter.grad)
        return grads

    def moments(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """(exp_avg, exp_avg_sq) of one parameter, as live tensors of its shape."""
        state = self._adamw.state[parameter]
        return state["exp_avg"], state["exp_avg_sq"]

    def apply(self, lr: float, clip: float) -> None:
        """Scale gradients by `clip`, take one AdamW step at `lr`, zero the gradients."""
        if not self.parameters:
            return
        for group in self._adamw.param_groups:
            group["lr"] = lr
        if clip != 1.0:
            torch._foreach_mul_(self.gradients(), clip)
        self._adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        if self.parameters:
            torch._foreach_zero_(self.gradients())

    def set_step(self, step: int) -> None:
        """Number of updates already taken (bias correction), on resume."""
        for parameter in self.parameters:
            self._adamw.state[parameter]["step"].fill_(float(step))
