"""Products that a recomputed layer need not repeat, since their outputs are known or nobody asks for them.

Backward needs W of a frozen product W x, but W x itself only where some other operation keeps it:

- What a shared expert's or a dense MLP's last projection gives is added to the residual, and that is all. The
  recomputed layer takes zeros in its place.
- What attention's output projection gives goes into the norm before the experts. It can be kept from the
  forward pass (rule.attention_output=retain): H numbers per token, while the projection's input, all heads'
  values, is often twice as wide, and the product half of what the layer multiplies.

Which modules these are is found by trying (`find_all`): every gradient has to be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from kt_ray.checkpoint.quantized_linear import QuantizedLinear
from kt_ray.model.layer_calls import LayerContext, RecordedCall
from kt_ray.model.lora_linear import LoraLinear, input_gradient
from kt_ray.model.streamed_weights import bring


@dataclass(frozen=True)
class KnownOutputs:
    """Of one layer. unused: modules whose outputs nobody asks for. retained: the one whose output is kept;
    None = none is."""

    unused: tuple[nn.Module, ...] = ()
    retained: nn.Module | None = None

    @contextmanager
    def recorded(self, keep: Callable[[Tensor], None]) -> Iterator[None]:
        """Inside, hand every output [b, s, H] of `retained` to `keep`."""
        if self.retained is None:
            yield
            return
        with self.retained.register_forward_hook(lambda module, args, output: keep(output)):
            yield

    @contextmanager
    def given(self, output: Tensor | None) -> Iterator[None]:
        """Inside, the layer leaves these products out. output: of `retained`; None = it multiplies."""
        with ExitStack() as stack:
            for module in self.unused:
                stack.enter_context(_unmultiplied(module))
            if output is not None and self.retained is not None:
                stack.enter_context(_unmultiplied(self.retained))
                hook = partial(_replace, output)
                stack.enter_context(self.retained.register_forward_hook(hook))
            yield


def _replace(known: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    replaced: Tensor = _Known.apply(output, known)
    return replaced


@contextmanager
def _unmultiplied(module: nn.Module) -> Iterator[None]:
    """Inside, a linear module gives zeros, to which PEFT may add its adapter's part."""
    base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    base.forward = partial(_Unmultiplied.apply, base)
    if isinstance(module, LoraLinear):
        module.multiplies = False
    try:
        yield
    finally:
        del base.forward
        if isinstance(module, LoraLinear):
            module.multiplies = True


class _Unmultiplied(torch.autograd.Function):
    """Zeros [..., N] in the place of W x + b, with the gradient of W x + b at x. Those of a row lie side
    by side: Llama 4 rotates queries as complex numbers, which float32 ones are viewed as."""

    @staticmethod
    def forward(ctx: Any, base: Any, x: Tensor) -> Tensor:
        ctx.base = base
        return x.new_zeros(base.out_features).expand(*x.shape[:-1], base.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (dy,) = grads
        dx = input_gradient(ctx.base, dy.reshape(-1, dy.shape[-1]))
        return None, dx.view(*dy.shape[:-1], dx.shape[-1])


class _Known(torch.autograd.Function):
    """A known value in the place of a computed one, whose gradient it passes on."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, known: Tensor) -> Tensor:
        return known.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def find_all(
    layers: Mapping[int, nn.Module],
    calls: Mapping[int, RecordedCall],
    contexts: Mapping[int, LayerContext],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[int, KnownOutputs]:
    """Layer -> its known outputs, found on one layer of each kind, on random numbers.

    Args:
        calls: of every layer, for `shape`. contexts: of layers with routed experts.
        shape: of the hidden state, [b, s, H] or [b, s, streams, H]. dtype: that layers compute in.
    """
    names: dict[object, tuple[tuple[str, ...], str | None]] = {}
    found = {}
    for index, layer in layers.items():
        context, candidates = contexts.get(index), _candidates(layer, shape[-1])
        sizes = [(name, type(module), module.in_features) for name, module in candidates.items()]
        kind = (type(layer), context is None, *sizes)
        if kind not in names:
            known, own = _Probe(layer, calls[index], context, shape, dtype).known(candidates), _names(layer)
            retained = None if known.retained is None else own[known.retained]
            names[kind] = (tuple(own[module] for module in known.unused), retained)
        unused, retained = names[kind]
        kept = None if retained is None else candidates[retained]
        found[index] = KnownOutputs(tuple(candidates[name] for name in unused), kept)
    return found


def _names(layer: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in layer.named_modules()}


def _candidates(layer: nn.Module, hidden_size: int) -> dict[str, Any]:
    """Name -> linear module with frozen weights whose outputs are as wide as the hidden state."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if (
            isinstance(base, nn.Linear)
            and type(base).forward in (nn.Linear.forward, QuantizedLinear.forward)
            and base.out_features == hidden_size
            and not any(parameter.requires_grad for parameter in base.parameters())
            and not any(name.startswith(f"{outer}.") for outer in found)  # the base of one that is adapted
        ):
            found[name] = module
    return found


class _Probe:
    """Gradients through a layer, for random numbers and random gradients of all that it gives."""

    def __init__(
        self,
        layer: nn.Module,
        call: RecordedCall,
        context: LayerContext | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.layer, self.call, self.context = layer, call, context
        bring(layer)
        self.device = next(layer.parameters()).device
        self.generator = torch.Generator().manual_seed(0)
        self.h, self.y = self._normal(shape, dtype), self._normal((*shape[:2], shape[-1]), dtype)
        self.grads: list[Tensor] = []

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def known(self, candidates: Mapping[str, Any]) -> KnownOutputs:
        sizes: dict[nn.Module, int] = {module: module.in_features for module in candidates.values()}
        outputs: dict[nn.Module, Tensor] = {}
        with ExitStack() as stack:
            for module in candidates.values():
                stack.enter_context(module.register_forward_hook(partial(self._note, outputs)))
            expected = self._run(KnownOutputs(), outputs=outputs)

        def same(known: KnownOutputs, output: Tensor | None = None) -> bool:
            return _equal(self._run(known, output).gradients, expected.gradients)

        def matters(module: nn.Module) -> bool:
            """What chooses positions, or sums windows of them, does not in rows as short as the probe's."""
            nothing = self._run(KnownOutputs(retained=module), torch.zeros_like(outputs[module]))
            return not _equal(nothing.values, expected.values)

        mattering = [module for module in outputs if matters(module)]
        unused = tuple(module for module in mattering if same(KnownOutputs((module,))))
        early = [module for module in [*outputs][: expected.before] if module in mattering]
        needed = (module for module in reversed(early) if module not in unused)
        retained = max(needed, key=lambda module: sizes[module], default=None)  # the last of the widest
        if retained is not None and same(KnownOutputs(unused, retained), outputs[retained]):
            return KnownOutputs(unused, retained)
        return KnownOutputs(unused) if same(KnownOutputs(unused)) else KnownOutputs()

    def _note(self, outputs: dict[nn.Module, Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad and output.shape == self.y.shape:
            outputs[module] = output.detach().clone()

    def _run(
        self,
        known: KnownOutputs,
        output: Tensor | None = None,
        outputs: Mapping[nn.Module, Tensor] | None = None,
    ) -> _Found:
        h, y = self.h.clone().requires_grad_(), self.y.clone().requires_grad_()
        ends: list[Tensor] = []
        before = None

        def experts(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            nonlocal before
            ends.extend((hidden, weights))
            before = len(outputs or ())
            return y.reshape(hidden.shape)

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(known.given(output))
            if self.context is not None:
                stack.enter_context(self.context.handled_by(experts))
            ends.append(self.call.run(self.layer, h))
        values: list[Tensor | None] = [end.detach() for end in ends]
        ends = [end for end in ends if end.requires_grad]
        if not self.grads:
            self.grads = [self._normal(tuple(end.shape), end.dtype) for end in ends]
        trained = [p for p in self.layer.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(ends, [h, y, *trained], self.grads, allow_unused=True)
        return _Found(list(gradients), values, before)


class _Found(NamedTuple):
    """gradients: of the hidden state, the experts' output and every parameter that trains. values: what the
    layer gives to the experts and to the next. before: outputs noted when the experts were called."""

    gradients: list[Tensor | None]
    values: list[Tensor | None]
    before: int | None


def _equal(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )
