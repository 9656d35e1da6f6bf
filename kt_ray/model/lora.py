"""LoRA on the modules outside the routed experts, injected by PEFT.

`init_lora_a` also serves the routed experts, so this module imports only torch at the top.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.checkpoint.names import MAGNITUDE, ONE_BY_ONE, layer_of
from kt_ray.checkpoint.quantized_linear import QuantizedLinear
from kt_ray.config.lora_patterns import module_lora
from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.model.dropout import CounterDropout, DropoutContext
from kt_ray.model.pissa import take_principal
from kt_ray.pulse import beat

ADAPTER = "default"  # PEFT's name of the one adapter
# Linear modules whose weight others multiply with by themselves (Mamba layers, LongCat-Flash's router): an
# adapter would never be called.
_BYPASSED = frozenset({"classifier", "dt_proj"})
# PEFT refuses an adapter of these (Mamba kernels multiply with their weight by themselves).
_REFUSED = {"nemotron_h": frozenset({"out_proj"})}
_OF_EXPERTS = frozenset(leaf for leaves in ONE_BY_ONE for leaf in leaves.values())
# Sparse attention's indexer only chooses positions: no gradient passes through a choice. Hyper-connections
# are gates of the residual streams.
_GATES = re.compile(
    r"(^|\.)(gate|router|indexer|[a-z0-9_]*_gate|router_[a-z0-9_]+|[a-z0-9_]+_hyper_connection)(\.|$)"
)


def init_lora_a(seed: int, name: str, shape: Sequence[int], init: str = "default") -> Tensor:
    """Initial value of a LoRA A matrix [rank, in], a pure function of (seed, name): float32, on the CPU.

    Uniform in ±1/sqrt(in), which is PEFT's kaiming_uniform_(a=sqrt(5)); "gaussian" is normal with
    deviation 1/rank, as PEFT's. PiSSA's A comes from the weight (kt_ray/model/pissa.py) and not from here.

    Args:
        name: canonical name of the parameter, e.g. "model.layers.3.self_attn.q_a_proj.lora_A.weight".
        init: see LoraConfig.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    value = torch.empty(tuple(shape), dtype=torch.float32)
    if init == "gaussian":
        return value.normal_(0.0, 1.0 / shape[0], generator=generator)
    bound = 1.0 / math.sqrt(shape[-1])
    return value.uniform_(-bound, bound, generator=generator)


def initial_lora(seed: int, name: str, shape: Sequence[int], init: str = "default") -> Tensor:
    """Initial value of a LoRA parameter by its canonical name: A by `init_lora_a`, B zero; float32, CPU."""
    if name.endswith(".lora_A.weight"):
        return init_lora_a(seed, name, shape, init)
    return torch.zeros(tuple(shape), dtype=torch.float32)


def is_gate(name: str) -> bool:
    """Whether a module name is (part of) a router, gate or indexer: never a LoRA target of "auto"."""
    return _GATES.search(name) is not None


def resolve_targets(
    target_modules: str | Sequence[str],
    names: Sequence[str],
    layers: Sequence[int] | None = None,
    *,
    experts: bool = False,
) -> tuple[str, ...]:
    """Names of the modules that get LoRA.

    Args:
        target_modules: "auto", "none", a list of module name suffixes, or a regex (full match).
        names: Hugging Face names of every linear module of the whole model that could be adapted.
        layers: lora.layers; a regex and names with a layer's number are not held to it.
        experts: lora.experts; names of their projections (gate_proj, w1) then need mean nothing outside them.

    Raises:
        UserError: a suffix (or the regex) matches nothing; lists the suffixes that exist.
    """

    def reached(name: str, suffix: str = "") -> bool:
        layer = layer_of(name)
        inside = name.rpartition(f"layers.{layer}.")[2]
        return layers is None or layer in layers or len(suffix) > len(inside)

    if isinstance(target_modules, str):
        if target_modules == "none":
            return ()
        if target_modules == "auto":
            return tuple(name for name in names if not is_gate(name) and reached(name))
        try:
            pattern = re.compile(target_modules)
        except re.error as error:
            raise UserError(
                "lora.target_modules is not a regular expression",
                observed=repr(target_modules),
                required=f"'auto', 'none', a list of suffixes, or a Python regex ({error})",
                remedy="correct lora.target_modules",
            ) from error
        chosen = tuple(name for name in names if pattern.fullmatch(name))
        unmatched = [] if chosen else [target_modules]
    else:
        found = {
            suffix: [name for name in names if f".{name}".endswith(f".{suffix}") and reached(name, suffix)]
            for suffix in target_modules
        }
        some = {name for own in found.values() for name in own}
        chosen = tuple(name for name in names if name in some)
        elsewhere = _OF_EXPERTS if experts else frozenset()
        unmatched = [suffix for suffix, own in found.items() if not own and suffix not in elsewhere]
    if unmatched:
        known = sorted({name.rpartition(".")[2] for name in names if reached(name)})
        raise UserError(
            "lora.target_modules names modules that this model does not have outside its routed experts"
            + ("" if layers is None else " in lora.layers"),
            observed=", ".join(unmatched),
            required="among the suffixes " + ", ".join(known) if known else "no module can be adapted",
            remedy="change lora.target_modules (lm_head, embeddings and routed experts are never targets; "
            "lora.experts trains the routed experts)",
        )
    return chosen


def linear_names(layers: Mapping[str, nn.Module], model_type: str = "") -> list[str]:
    """Names of every linear module inside these decoder layers (name of the layer -> layer).

    Only modules that compute x Wᵀ + b: subclasses with a forward of their own (DeepSeek-V4's grouped
    output) are none, nor modules whose forward is never called, that have no weights (no shared experts), or
    whose adapter PEFT would refuse.
    """
    without = _BYPASSED | _REFUSED.get(model_type, frozenset())
    return [
        f"{prefix}.{name}"
        for prefix, layer in layers.items()
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward in (nn.Linear.forward, QuantizedLinear.forward)
        and module.in_features * module.out_features
        and name.rpartition(".")[2] not in without
    ]


def inject_lora(
    layers: Mapping[str, nn.Module],
    targets: Sequence[str],
    config: LoraConfig,
    seed: int,
    context: DropoutContext,
    device: torch.device,
) -> dict[str, nn.Parameter]:
    """Put PEFT LoRA layers in the place of the targets.

    Args:
        layers: Hugging Face name of each own decoder layer -> the layer, weights loaded.
        targets: full names of the linear modules to adapt, from `resolve_targets`.
        context: what the dropout modules read.
        device: where the adapters go.

    Returns:
        Canonical name -> float32 parameter, in the order of the model's modules: A drawn by
        `init_lora_a`, B zero; or both out of the weights, which are changed (PiSSA). With DoRA also the norms
        of the weight's rows, [out].
    """
    if not targets:
        return {}
    import peft

    from kt_ray.model.lora_linear import LoraLinear

    # The holder has no `config`, so PEFT does not rewrite the targets by a family's v4 names.
    holder = nn.ModuleList(layers.values())
    names = {
        f"{number}.{name.removeprefix(prefix + '.')}": name
        for number, prefix in enumerate(layers)
        for name in targets
        if name.startswith(prefix + ".")
    }
    if len(names) < len(targets):
        raise ValueError(f"{sorted({*targets} - {*names.values()})} lie in none of this stage's layers")
    settings = {name: module_lora(config, name) for name in names.values()}

    def patterns(key: str) -> dict[str, Any]:
        """One per value: PEFT compares every module with every pattern."""
        modules: dict[Any, list[str]] = {}
        for relative, name in names.items():
            modules.setdefault(getattr(settings[name], key), []).append(re.escape(relative))
        modules.pop(getattr(config, key), None)
        return {"|".join(escaped): value for value, escaped in modules.items()}

    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a float is fine, PEFT divides
        rank_pattern=patterns("rank"),
        alpha_pattern=patterns("alpha"),
        use_rslora=config.rslora,
        use_dora=config.dora,
        lora_dropout=config.dropout,
        target_modules="|".join(map(re.escape, names)),
        bias="none",
    )
    # low_cpu_mem_usage: adapters start on meta, so PEFT draws no random numbers of its own
    peft.inject_adapter_in_model(peft_config, holder, adapter_name=ADAPTER, low_cpu_mem_usage=True)

    parameters: dict[str, nn.Parameter] = {}
    for relative, module in holder.named_modules():
        name = names.get(relative)
        if name is None:
            continue
        assert isinstance(module, peft.tuners.lora.Linear), f"{name} was not adapted by PEFT"
        if config.dropout == 0.0 and not config.dora:
            module.__class__ = LoraLinear  # another forward, nothing else
        for side in ("A", "B"):
            linear = getattr(module, f"lora_{side}")[ADAPTER]
            key = f"{name}.lora_{side}.weight"
            value = initial_lora(seed, key, linear.weight.shape, config.init)
            linear.weight = nn.Parameter(value.to(device), requires_grad=True)
            parameters[key] = linear.weight
        if config.dora:
            magnitude = module.lora_magnitude_vector[ADAPTER]
            base: Any = module.get_base_layer()
            # On the device, where a streamed layer's weight is not yet: the same sums wherever it waits.
            norms = torch.linalg.norm(base.weight.detach().to(device, torch.float32), dim=1)
            magnitude.weight = nn.Parameter(norms.to(device), requires_grad=True)
            parameters[name + MAGNITUDE] = magnitude.weight
            # PEFT's DoRA drops nothing in a module that is not in training; CounterDropout knows by itself.
            module.train(config.dropout > 0.0)
        if config.init.startswith("pissa"):
            a, b = (parameters[f"{name}.lora_{side}.weight"] for side in "AB")
            take_principal(module.get_base_layer(), a, b, settings[name], f"{seed}:{name}")
            beat()  # the decomposition of a wide weight takes a minute
        if config.dropout > 0.0:
            module.lora_dropout[ADAPTER] = CounterDropout(config.dropout, name, context)
    each = 3 if config.dora else 2
    assert len(parameters) == each * len(targets), "PEFT adapted other modules than asked"
    return parameters


Which = bool | str | tuple[tuple[bool | str, int], ...]


class AdapterSwitch:
    """Which adapter the LoRA modules of each layer use: the trained one (True), none (False), or a named; or,
    of a batch of several trainings' rows, each training's and the number of its rows, in their order."""

    def __init__(self, layers: Mapping[int, nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
        self._modules: dict[int, list[Any]] = {index: [] for index in layers}
        if parameters:
            from peft.tuners.tuners_utils import BaseTunerLayer

            for index, layer in layers.items():
                self._modules[index] = [m for m in layer.modules() if isinstance(m, BaseTunerLayer)]
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = {
            index: {names[id(p)]: p for p in layer.parameters() if id(p) in names}
            for index, layer in layers.items()
        }
        self._trained = dict(parameters)
        self._values: dict[bool | str, Mapping[str, Tensor]] = {}
        self.find_trained()
        self._grads: dict[bool | str, Mapping[str, Tensor]] = {}
        self._names = names
        self._leaves: dict[tuple[bool | str, str], Tensor] = {}  # by adapter and parameter, with its gradient
        self._state: dict[int, Which] = dict.fromkeys(layers, True)
        self._loaded: dict[int, bool | str] = dict.fromkeys(layers, True)

    def find_trained(self) -> None:
        """The trained adapter's values are where all parameters point now."""
        self._values[True] = {n: p.data for n, p in self._trained.items()}

    def keep(self, name: str, *, copy: bool) -> None:
        """Keep the trained adapter's present values under a name; `copy` if they will change."""
        self._values[name] = {n: p.clone() if copy else p for n, p in self._values[True].items()}

    def kept(self, name: bool | str) -> Mapping[str, Tensor]:
        """A kept adapter's values."""
        return self._values[name]

    def drop(self, name: str) -> None:
        """Forget a kept adapter, if it is there, that no layer uses: after `switch_all(True)`."""
        self._values.pop(name, None)

    @contextmanager
    def lent(self, others: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]) -> Iterator[None]:
        """Inside, layers may also train other adapters: their values, and gradients to add to."""
        self._grads = {True: {n: p.grad for n, p in self._trained.items() if p.grad is not None}}
        for name, (values, grads) in others.items():
            self._values[name], self._grads[name] = values, grads
        try:
            yield
        finally:
            self.switch_all(True)
            self._grads = {}
            self._leaves.clear()
            for name in others:
                self.drop(name)

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Inside, no adapter's values change: what products take of them is made once."""
        modules = [m for own in self._modules.values() for m in own if hasattr(m, "kept")]
        for module in modules:
            module.kept = {}
        try:
            yield
        finally:
            for module in modules:
                module.kept = None

    def switch(self, layer: int, which: Which) -> None:
        """Use an adapter from the next call of a layer on, or several (then, without dropout and DoRA)."""
        if self._state[layer] == which:
            return
        for module in self._modules[layer]:
            # not enable_adapters(): that sets requires_grad of the parameters, too
            module._disable_adapters = which is False
            module.shares = self._shares(module, which) if isinstance(which, tuple) else ()
        if not isinstance(which, tuple) and which is not False and self._loaded[layer] != which:
            values, grads = self._values[which], self._grads.get(which)
            for name, parameter in self._parameters[layer].items():
                parameter.data = values[name]
                if grads is not None:
                    parameter.grad = grads[name]
            self._loaded[layer] = which
        self._state[layer] = which

    def _shares(self, module: Any, several: tuple[tuple[bool | str, int], ...]) -> tuple[Any, ...]:
        """Of a module's input, whose rows are of these adapters."""
        from kt_ray.model.lora_linear import Share

        rows = sum(own for _, own in several)
        sides = [self._names[id(side[ADAPTER].weight)] for side in (module.lora_A, module.lora_B)]
        return tuple(Share(own, rows, *(self._leaf(which, name) for name in sides)) for which, own in several)

    def _leaf(self, which: bool | str, name: str) -> Tensor:
        """A parameter's value in an adapter, with the gradient to add to."""
        if (which, name) not in self._leaves:
            leaf = self._leaves[which, name] = self._values[which][name].detach().requires_grad_()
            leaf.grad = self._grads[which][name]
        return self._leaves[which, name]

    def switch_all(self, which: bool | str) -> None:
        """Use an adapter in all layers. Training needs True."""
        for layer in self._state:
            self.switch(layer, which)
