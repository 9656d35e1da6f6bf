"""How transformers' decoder layers are called, and how their calls of the experts come back.

Into a layer: a family's inner model makes masks, rotary embeddings, position ids and whatever else its layers
take. `LayerCallCapture` runs that inner model with every layer replaced by a stub, which notes its call and
hands the hidden state on; so nothing of this is written again here.

Out of a layer: transformers' ExpertsInterface calls the function registered as "kt_ray" in the place of every
experts module's forward: `fn(module, hidden_states [N, H], top_k_index [N, K], top_k_weights [N, K]) -> [N,
H]`. Under a stage the call goes to the layer loop; without one it is the simple integration
(kt_ray.model.autograd).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.errors import UserError

NAME = "kt_ray"
Handler = Callable[[Tensor, Tensor, Tensor], Tensor]
# A result that a layer hands on: the argument that it comes by, and its key where that is a dict
Result = tuple[str, Any]


@dataclass(frozen=True)
class RecordedCall:
    """One layer's call, without its hidden state."""

    args: tuple[Any, ...]  # positional arguments after the hidden state
    kwargs: dict[str, Any]  # keyword arguments without the hidden state
    by_name: bool  # whether the hidden state was passed as `hidden_states`, not first by position
    # the argument by which the family hands a layer's second output to the next; "" = none, None = layers
    # have no second output
    carried: str | None = None
    # what the layer takes from earlier ones beside its hidden state (handed_results.py)
    given: Mapping[Result, tuple[Tensor, ...]] = field(default_factory=dict)
    # whether the family's layers take streams [b, s, streams, H] side by side, [b, s, streams * H]
    side_by_side: bool = False

    def run(
        self, layer: nn.Module, hidden: Tensor, left: dict[Result, tuple[Tensor, ...]] | None = None
    ) -> Tensor:
        """Call the layer with these arguments. Returns its hidden state, of `hidden`'s shape.

        Args:
            left: gets what the layer hands on beside it.
        """
        kwargs = dict(self.kwargs)
        places: dict[str, dict[Any, Any]] = {name: {} for name, value in kwargs.items() if is_place(value)}
        for (name, key), tensors in self.given.items():
            if name in places:
                places[name][key] = tensors
            else:
                (kwargs[name],) = tensors
        kwargs |= places
        given = hidden.flatten(2) if self.side_by_side else hidden
        out = layer(hidden_states=given, **kwargs) if self.by_name else layer(given, *self.args, **kwargs)
        result, *more = out if isinstance(out, tuple) else (out,)
        if any(extra is not None for extra in more) and self.carried is None:
            raise unsupported(type(layer).__name__, f"{len(out)} outputs of one layer")
        if left is not None:
            found = {(name, key): value for name, place in places.items() for key, value in place.items()}
            if self.carried and more and more[0] is not None:
                found[self.carried, None] = (more[0],)
            left |= {place: value for place, value in found.items() if not self._passed_on(place, value)}
        return result.view(hidden.shape) if self.side_by_side else result

    def _passed_on(self, result: Result, value: tuple[Tensor, ...]) -> bool:
        """Whether a layer handed on what it was given."""
        given = self.given.get(result)
        return given is not None and all(a is b for a, b in zip(value, given, strict=True))


def is_place(value: Any) -> bool:
    """Whether an argument is an empty dict, in which layers leave results for later ones."""
    return isinstance(value, MutableMapping) and not value


class LayerStub(nn.Module):
    """Stands in for a decoder layer: no parameters, the layer's plain attributes.

    Inner models read attributes of a layer (its attention type, say) to choose what to pass.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = layer  # outside the module tree: its parameters are not this stub's
        self.__dict__["on_call"] = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["on_call"](args, kwargs)


class Passthrough(nn.Module):
    """Stands in for a module whose result this stage does not use (norm, head, embedding)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class BlankEmbedding(nn.Module):
    """Stands in for the embedding on stages that get their hidden state from another one.

    Its values stand for the tokens, so that an argument made from them is noticed.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_size, self.dtype = hidden_size, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return ids.to(self.dtype).unsqueeze(-1).expand(*ids.shape, self.hidden_size)


class LayerCallCapture:
    """Runs a model with stubbed layers.

    Args:
        causal: the ...ForCausalLM. base: its inner model, whose `layers` are replaced meanwhile.
        originals: every decoder layer, own or not.
    """

    def __init__(self, causal: Any, base: Any, originals: list[nn.Module]) -> None:
        self.causal = causal
        self.base = base
        self.stubs = [LayerStub(layer) for layer in originals]
        self.outputs = 0  # of this family's layers: 0 = a tensor, else a tuple of that many
        self.extra: Tensor | None = None  # what stubs return as their second output
        self.carried: str | None = None  # see RecordedCall
        self.output_shape: tuple[int, ...] = ()  # of the last recording
        # of the hidden state between layers, after [b, s]: (H,), or (streams, H) with hyper-connections
        self.state_shape: tuple[int, ...] = ()
        self.side_by_side = False  # see RecordedCall

    @contextmanager
    def _stubbed(
        self, on_call: Callable[[int, Tensor], Tensor], calls: dict[int, RecordedCall]
    ) -> Iterator[None]:
        def note(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            calls[index] = RecordedCall(
                args[1:], kwargs, not args, self.carried, side_by_side=self.side_by_side
            )
            if self.side_by_side:
                out = on_call(index, hidden.unflatten(2, self.state_shape)).flatten(2)
            else:
                out = on_call(index, hidden)
            return (out, self.extra)[: self.outputs] if self.outputs else out

        real = self.base.layers
        for index, stub in enumerate(self.stubs):
            stub.__dict__["on_call"] = partial(note, index)
        self.base.layers = nn.ModuleList(self.stubs)
        try:
            yield
        finally:
            self.base.layers = real
            for stub in self.stubs:  # else they keep this recording, masks and all, until the next one
                stub.__dict__["on_call"] = None

    def record(
        self,
        inputs: Mapping[str, Tensor],
        attention_mask: Tensor | None,
        on_call: Callable[[int, Tensor], Tensor] = lambda index, hidden: hidden,
        *,
        cache: Any = None,
        position_ids: Tensor | None = None,
    ) -> dict[int, RecordedCall]:
        """Layer -> its call, for one micro-batch.

        Args:
            inputs: {"input_ids": int64 [b, s]}, or {"inputs_embeds": [b, s, H]} where only the head runs.
            attention_mask: int64 [b, s], 1 for valid tokens, or None when all are; with a cache [b, its
                columns + s].
            on_call: what a stub returns, from (layer, hidden state).
            cache: transformers' Cache, which layers then read and extend (generation).
            position_ids: int64 [b, s], with a cache.
        """
        calls: dict[int, RecordedCall] = {}
        cached = {} if cache is None else {"past_key_values": cache, "position_ids": position_ids}
        with torch.no_grad(), self._stubbed(on_call, calls):
            out = self.base(**inputs, attention_mask=attention_mask, use_cache=cache is not None, **cached)
        self.output_shape = tuple(out.last_hidden_state.shape)
        return calls

    def logits(self, inputs: Mapping[str, Tensor], attention_mask: Tensor | None, hidden: Tensor) -> Tensor:
        """Logits [b, s, V] of the whole causal model when its last layer returns `hidden`."""
        last = len(self.stubs) - 1
        with self._stubbed(lambda index, h: hidden if index == last else h, {}):
            return self.causal(**inputs, attention_mask=attention_mask, use_cache=False).logits


def unsupported(model_type: str, observed: str, what: str = "any placement") -> UserError:
    """A family whose layers pass on what they cannot be given here."""
    return UserError(
        f"{model_type} cannot run with {what}",
        observed=observed,
        required="decoder layers that pass only a hidden state on",
        remedy="use rule.stages=1" if what == "more than one stage" else "choose another model family",
    )


class LayerContext:
    """Ties an experts module to the stage that owns its layer.

    The loop sets a handler around each call of the layer; a call without one is a programming error.
    """

    def __init__(self, layer: int, num_experts: int) -> None:
        self.layer = layer
        self.num_experts = num_experts
        self.handler: Handler | None = None
        self.calls = 0

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Inside, the experts' calls go to `handler`."""
        self.handler = handler
        try:
            yield
        finally:
            self.handler = None

    def __call__(self, hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.handler is None:
            raise RuntimeError(f"the experts of layer {self.layer} were called outside the layer loop")
        self.calls += 1
        return self.handler(hidden_NH, ids_NK, weights_NK)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerContext:
        return self  # the probe's float32 copy of a layer keeps its context


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function transformers dispatches to under `experts_implementation="kt_ray"`."""
    context = getattr(module, "_kt_stage", None)
    if context is not None:
        return context(hidden_states, top_k_index, top_k_weights)
    from kt_ray.model.autograd import native_experts

    return native_experts(module, hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Make `experts_implementation="kt_ray"` known to transformers (idempotent)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def dispatch(model: nn.Module, ours: Mapping[type[nn.Module], type[nn.Module]], config: Any) -> None:
    """Where transformers does not dispatch: give modules of these classes ours, which call `experts_forward`.

    They get `config`, which tells the simple integration their family.
    """
    for module in model.modules():
        own = ours.get(type(module))
        if own is not None:
            module.__class__ = own
            module.config = config


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module through its experts interface."""
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    return all(hasattr(module, flag) for flag in flags)
