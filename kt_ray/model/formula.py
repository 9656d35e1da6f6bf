"""What an experts module of transformers computes, in the engine's terms.

A family's own `_apply_gate` is not recognised by its name: it is called on numbers on both sides of every
bound and compared with each formula that the engine has. What agrees with none is refused by name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kt_ray.errors import UserError
from kt_ray.native import ExpertFormula, ExpertWeights
from kt_ray.native.reference import activate

_WEIGHTS = frozenset({"gate_up_proj", "up_proj", "down_proj"})
_BIASES = frozenset({"gate_up_proj_bias", "up_proj_bias", "down_proj_bias"})
_LIMITS = ("limit", "swiglu_limit")  # a module's attribute; its configuration's may mean other layers
_ALPHAS = ("alpha", "swiglu_alpha")


def formula_of(module: Any, model_type: str) -> ExpertFormula:
    """The formula between a module's first projections and its last.

    Raises:
        UserError: names the family, the module and what the engine lacks.
    """
    faults = []
    if getattr(module, "has_post_expert_norm", False):
        faults.append("a norm after each expert")
    parameters = _WEIGHTS | (_BIASES if module.has_bias else frozenset())
    extra = sorted(name for name, _ in module.named_parameters(recurse=False) if name not in parameters)
    if extra:
        faults.append("the expert parameters " + ", ".join(extra))
    formula = None if faults else _recognised(module)
    if formula is None and not faults:
        from transformers.integrations.moe import _default_apply_gate

        plain = not module.has_gate or type(module)._apply_gate is _default_apply_gate
        act = type(getattr(module, "act_fn", None)).__name__
        gate = "" if module.has_gate else " without a gate"
        faults.append(f"the activation {act}{gate}" if plain else "a gate of its own (_apply_gate)")
    if formula is None:
        raise UserError(
            f"the experts of {model_type} cannot be computed yet",
            where=type(module).__name__,
            observed=" and ".join(faults),
            required="SwiGLU (with or without a limit), GeGLU (tanh), gpt-oss's clamped SwiGLU, or relu "
            "squared without a gate",
            remedy="choose a model with such experts (DeepSeek-V3, Qwen3-MoE, Mixtral, GLM-4-MoE, ...)",
        )
    return formula


def check_trainable(module: Any, model_type: str, hidden_size: int | None = None) -> ExpertFormula:
    """What expert actors compute for a layer's experts; refuses what they cannot load or dispatch.

    Args:
        hidden_size: of the model; experts of another width sit between projections of their own.

    Raises:
        UserError: names the family, the module and what is missing.
    """
    formula = formula_of(module, model_type)
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    if hidden_size is not None and width != hidden_size:
        raise UserError(
            f"the experts of {model_type} cannot be trained: they work in a projected width",
            where=type(module).__name__,
            observed=f"experts of width {width}",
            required=f"the hidden size, {hidden_size}",
            remedy="choose a model whose experts read the hidden state (DeepSeek-V3, Qwen3-MoE, ...)",
        )
    return formula


def _recognised(module: Any) -> ExpertFormula | None:
    """The engine's formula that gives what the module does; None = none does."""
    limit, alpha = _number(module, _LIMITS), _number(module, _ALPHAS)
    candidates = [ExpertFormula("relu2")]
    if module.has_gate:
        candidates = [ExpertFormula("gelu_tanh")]
        for bound in dict.fromkeys((None, limit)):
            candidates.append(ExpertFormula("silu", limit=bound))
            if bound is not None:
                candidates.append(ExpertFormula("capped_silu", limit=bound))
            if alpha is not None:
                candidates.append(ExpertFormula("swiglu_oai", alpha, bound))
    with torch.device("cpu"), torch.no_grad():
        # Where the curves bend, and from far beyond the bounds.
        line = torch.cat([torch.linspace(-end, end, 33) for end in (8.0, 3.0 * (limit or 1.0))]).float()
        gate, up = line.repeat(len(line), 1), line.repeat_interleave(len(line)).reshape(-1, len(line))
        try:
            observed = _applied(module, gate, up)
        except Exception:  # whatever a foreign activation raises: it is none of ours
            return None
        for candidate in candidates:
            expected = _activated(candidate, gate, up)
            if observed.shape == expected.shape and torch.allclose(observed.float(), expected, 1e-5, 1e-5):
                return candidate
    return None


def _applied(module: Any, gate: Tensor, up: Tensor) -> Tensor:
    """What the module makes of its first projections' outputs, in its own layout."""
    if not module.has_gate:
        return module.act_fn(up)
    both = torch.cat([gate, up], -1) if module.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    return module._apply_gate(both)


def _activated(formula: ExpertFormula, gate: Tensor, up: Tensor) -> Tensor:
    one = torch.zeros(1, 1, 1, dtype=torch.float32)
    gated = formula.activation != "relu2"
    experts = ExpertWeights(
        one if gated else None,
        one,
        one,
        activation=formula.activation,
        alpha=formula.alpha,
        limit=formula.limit,
    )
    return activate(experts, gate if gated else None, up)


def _number(module: Any, names: tuple[str, ...]) -> float | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int | float) and 0 < value < math.inf:
            return float(value)
    return None
