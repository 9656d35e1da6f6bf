"""The optimizers of float32 LoRA masters, and the learning-rate schedules.

Used by attention worker 0 (the non-expert LoRA of all stages) and by every expert actor (its own
experts' LoRA): one implementation, so that both halves of the model take the same step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kt_ray.config.schema import OptimConfig
from kt_ray.errors import UserError
from kt_ray.optim.muon import Muon
from kt_ray.pulse import beat


def number_of_steps(value: float, total_steps: int) -> int:
    """`optim.warmup` or `optim.decay` in steps: a share of all steps below 1, else a count."""
    return math.ceil(value * total_steps) if value < 1 else int(value)


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) out of `total_steps`.

    Linear warm-up from lr / warmup to lr (one step ahead of transformers' schedules, whose first step has
    rate 0), then as transformers' schedules of the same names: "constant"; "linear" and "cosine" down to
    lr * min_lr_ratio at the last step; "wsd" constant and then down over the last `decay` steps;
    "inverse_sqrt" as 1 / sqrt(step), with the warm-up's length (10,000 without one) as its time scale.
    """
    warmup = number_of_steps(optim.warmup, total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "inverse_sqrt":
        scale = warmup or 10_000
        return optim.lr / math.sqrt((step + scale - warmup) / scale)
    floor, start = optim.min_lr_ratio, warmup
    if optim.schedule == "wsd":
        start = max(warmup, total_steps - number_of_steps(optim.decay, total_steps))
        if step < start:
            return optim.lr
    progress = (step - start) / max(1, total_steps - start)
    progress = min(1.0, max(0.0, progress))
    shape = optim.decay_shape if optim.schedule == "wsd" else optim.schedule
    if shape == "linear":
        return optim.lr * (1.0 - (1.0 - floor) * progress)
    if shape == "cosine":
        return optim.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    if shape == "1-sqrt":
        return optim.lr * (floor + (1.0 - floor) * (1.0 - math.sqrt(progress)))
    raise ValueError(f"optim.schedule {optim.schedule!r} is not known")


def use_torch_threads(threads: int) -> None:
    """torch's thread count for the calling thread.

    The first parallel operation of a thread sets its count to the process-wide last one; asking first
    makes that happen now, so that it cannot undo what is set here.
    """
    torch.get_num_threads()
    torch.set_num_threads(max(1, threads))


_ROW = 4096  # summed by one thread, whatever their number
# Elements that are widened to float64 at a time: 1 MiB for each thread, which its L2 holds; on a GPU many,
# since the host waits for each.
_BLOCK, _GPU_BLOCK = _ROW * 32, _ROW * 4096


def squared_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Sum of squares of all elements in float64; the same bits for any number of torch threads."""
    rows: list[float] = []
    wide = torch.empty(0, dtype=torch.float64)  # for all blocks: new memory costs more than the sums
    for tensor in tensors:
        beat()
        size = _GPU_BLOCK if tensor.is_cuda else _BLOCK * torch.get_num_threads()
        size = min(size, tensor.numel())
        if wide.numel() < size or wide.device != tensor.device:
            wide = torch.empty(size, dtype=torch.float64, device=tensor.device)
        for block in tensor.detach().reshape(-1).split(max(1, size)):
            squares = wide[: block.numel()].copy_(block).square_()
            whole = squares.numel() // _ROW * _ROW
            rows.extend(squares[:whole].view(-1, _ROW).sum(dim=1).tolist())
            rows.append(float(squares[whole:].sum()))
    return math.fsum(rows)


def gradient_norms(named: Iterable[tuple[str, torch.Tensor]], count: int) -> list[tuple[float, str]]:
    """Norm and name of the `count` largest of these gradients, not finite ones first."""
    return largest([(math.sqrt(squared_norm([grad])), name) for name, grad in named], count)


def largest(norms: Sequence[tuple[float, str]], count: int) -> list[tuple[float, str]]:
    """The `count` largest of (norm, name), not finite ones first."""
    return sorted(norms, key=lambda item: (math.isfinite(item[0]), -item[0], item[1]))[:count]


def state_kinds(optim: OptimConfig) -> tuple[str, ...]:
    """Names of the tensors that the optimizer keeps beside each parameter, of its shape."""
    return ("momentum",) if optim.name == "muon" else ("exp_avg", "exp_avg_sq")


def elementwise(optim: OptimConfig) -> bool:
    """Whether a step treats every element alike, so that parameters may be laid end to end."""
    return optim.name != "muon" and optim.lora_plus_ratio == 1.0


@dataclass(frozen=True)
class AdamStep:
    """What one step of AdamW takes in the place of the configured values, as torch.optim.AdamW has them."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float


class LoraOptimizer:
    """One step over a fixed list of float32 parameters whose `.grad` is always set.

    AdamW (torch, fused; decoupled weight decay as in Loshchilov & Hutter 2019), DeepSpeed's CPUAdam or Muon,
    as `optim.name` says. `apply` scales the gradients by the clip factor in place, steps, and zeroes them.

    Args:
        parameters: any shapes; for Muon [.., rows, columns], each matrix a step of its own.
        sides: "A" or "B" per parameter; without it all count as A (LoRA+), as DoRA's magnitudes do.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], optim: OptimConfig, sides: Sequence[str] | None = None
    ) -> None:
        self.parameters = list(parameters)
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise ValueError(f"optimizer parameters must be float32, got {parameter.dtype}")
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._kinds = state_kinds(optim)
        groups: list[dict[str, Any]] = [{"params": self.parameters, "ratio": 1.0}]
        if sides is not None and optim.lora_plus_ratio != 1.0:
            of_side = {
                side: [p for p, s in zip(self.parameters, sides, strict=True) if s == side] for side in "AB"
            }
            groups = [
                {"params": of_side["A"], "ratio": 1.0},
                {"params": of_side["B"], "ratio": optim.lora_plus_ratio},
            ]
        groups = [group for group in groups if group["params"]]
        unused = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32))
        self._inner = _make(groups or [{"params": [unused], "ratio": 1.0}], optim)
        for parameter in self.parameters:
            state: dict[str, Any] = {kind: torch.zeros_like(parameter) for kind in self._kinds}
            if optim.name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            elif optim.name == "deepspeed_cpu_adam":
                state["step"] = 0
            self._inner.state[parameter] = state

    def gradients(self) -> list[torch.Tensor]:
        """The gradient tensors, in parameter order."""
        grads = []
        for parameter in self.parameters:
            assert parameter.grad is not None
            grads.append(parameter.grad)
        return grads

    def state(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        """One of the `state_kinds` of one parameter, as a live tensor of its shape."""
        return self._inner.state[parameter][kind]

    def states(self) -> list[torch.Tensor]:
        """All that `state` gives, in parameter order."""
        return [self.state(parameter, kind) for parameter in self.parameters for kind in self._kinds]

    def apply(self, lr: float, clip: float, adam: AdamStep | None = None) -> None:
        """Scale gradients by `clip`, take one step at `lr`, zero the gradients.

        Args:
            adam: of this step, where a client says so with each; only with optim.name=adamw.
        """
        if not self.parameters:
            return
        for group in self._inner.param_groups:
            group["lr"] = lr * group["ratio"]
            if adam is not None:
                group.update(betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)
        if clip != 1.0:
            torch._foreach_mul_(self.gradients(), clip)
        self._inner.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        if self.parameters:
            torch._foreach_zero_(self.gradients())

    def set_step(self, step: int) -> None:
        """Number of updates already taken (bias correction), on resume."""
        for parameter in self.parameters:
            state = self._inner.state[parameter]
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(float(step))
            elif "step" in state:
                state["step"] = step


def _make(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    betas = (optim.betas[0], optim.betas[1])
    if optim.name == "muon":
        return Muon(groups, lr=optim.lr, momentum=betas[0], weight_decay=optim.weight_decay)
    options: dict[str, Any] = {"lr": optim.lr, "betas": betas, "eps": optim.eps}
    if optim.name == "deepspeed_cpu_adam":
        return _deepspeed(groups, weight_decay=optim.weight_decay, **options)
    return torch.optim.AdamW(groups, weight_decay=optim.weight_decay, fused=True, **options)


def _deepspeed(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """DeepSpeed's CPUAdam; its kernel is compiled on first use and kept in TORCH_EXTENSIONS_DIR."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its imports: accelerator probing, deprecated modules
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    except Exception as error:  # its import and its build fail in many ways
        raise UserError(
            "DeepSpeed's CPUAdam cannot be used on this host",
            where="optim.name=deepspeed_cpu_adam",
            observed=f"{type(error).__name__}: {str(error)[:200]}",
            required="the package deepspeed, ninja and a C++ compiler",
            remedy="set optim=adamw (the same numbers to rounding)",
        ) from error
