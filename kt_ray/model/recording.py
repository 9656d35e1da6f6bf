"""The arguments a family's inner model gives to each of its decoder layers.

Masks, rotary embeddings, position ids and whatever else a family passes are made by the inner model's
own forward. It runs with every layer replaced by a stub that notes its call and hands the hidden
state on; so nothing of this is written again here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.errors import UserError


@dataclass(frozen=True)
class RecordedCall:
    """One layer's call, without its hidden state.

    Attributes:
        args: positional arguments after the hidden state.
        kwargs: keyword arguments without the hidden state.
        keyword: name the hidden state was passed under, or None when it came first by position.
        carried: names under which the family hands a layer's second output to the next (see `check_carry`);
            None where layers have no second output.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None
    carried: tuple[str, ...] | None = None

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Call the layer with these arguments. Returns its hidden state, of `hidden`'s shape."""
        return self.outputs(layer, hidden)[0]

    def outputs(self, layer: nn.Module, hidden: Tensor) -> tuple[Any, ...]:
        """All outputs of the layer, the hidden state first."""
        if self.keyword is None:
            out = layer(hidden, *self.args, **self.kwargs)
        else:
            out = layer(*self.args, **{self.keyword: hidden}, **self.kwargs)
        if not isinstance(out, tuple):
            return (out,)
        if any(extra is not None for extra in out[1:]) and self.carried is None:
            raise _refuse(type(layer).__name__, f"{len(out)} outputs of one layer", "any placement")
        return out


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

    Args:
        hidden_size: H. dtype: of the hidden state.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_size, self.dtype = hidden_size, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return ids.to(self.dtype).unsqueeze(-1).expand(*ids.shape, self.hidden_size)


class Recorder:
    """Runs a model with stubbed layers.

    Args:
        causal: the ...ForCausalLM.
        base: its inner model, whose `layers` are replaced while recording.
        originals: every decoder layer, own or not.
    """

    def __init__(self, causal: Any, base: Any, originals: list[nn.Module]) -> None:
        self.causal = causal
        self.base = base
        self.stubs = [LayerStub(layer) for layer in originals]
        self.outputs = 0  # of this family's layers: 0 = a tensor, else a tuple of that many
        self.extra: Tensor | None = None  # what stubs return as their second output
        self.carried: tuple[str, ...] | None = None  # arguments that take the layer before's second output
        self.output_shape: tuple[int, ...] = ()  # of the last recording
        # of the hidden state between layers, after [b, s]: (H,), or (streams, H) with hyper-connections
        self.state_shape: tuple[int, ...] = ()

    @contextmanager
    def _stubbed(
        self, on_call: Callable[[int, Tensor], Tensor], calls: dict[int, RecordedCall]
    ) -> Iterator[None]:
        def make(index: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
            def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if args:
                    hidden, rest, keyword = args[0], args[1:], None
                else:
                    keyword = "hidden_states"
                    kwargs = dict(kwargs)
                    hidden, rest = kwargs.pop("hidden_states"), ()
                calls[index] = RecordedCall(rest, dict(kwargs), keyword, self.carried)
                out = on_call(index, hidden)
                return (out, self.extra)[: self.outputs] if self.outputs else out

            return call

        real = self.base.layers
        for index, stub in enumerate(self.stubs):
            stub.__dict__["on_call"] = make(index)
        self.base.layers = nn.ModuleList(self.stubs)
        try:
            yield
        finally:
            self.base.layers = real

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


def check_family(recorder: Recorder, first: bool, last: bool, hidden_size: int, device: str) -> None:
    """Learn how layers pass their hidden state; refuse a family whose layers pass more than that.

    Raises:
        UserError: layers depend on each other by more than h, or (more than one stage) on the tokens.
    """
    model_type = recorder.causal.config.model_type
    b, s = 1, 5

    def inputs(token: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((b, s), token, dtype=torch.int64, device=device)}

    shapes: set[tuple[int, ...]] = set()

    def noisy(index: int, hidden: Tensor) -> Tensor:
        if not isinstance(hidden, Tensor):
            raise TypeError("the hidden state is not a tensor")
        shapes.add(tuple(hidden.shape))
        return hidden + torch.full_like(hidden, 1.0 + index)

    refusal: Exception | None = None
    for recorder.outputs in (0, 1, 2):
        shapes.clear()
        try:
            with_noise = recorder.record(inputs(0), None, noisy)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            refusal = refusal or error
            continue
        state = next(iter(shapes))
        if (
            len(shapes) == 1
            and state[:2] == (b, s)
            and len(state) in (3, 4)
            and state[-1] == hidden_size
            and (not last or recorder.output_shape == (b, s, hidden_size))
        ):
            recorder.state_shape = state[2:]
            break
    else:
        raise _refuse(
            model_type,
            f"layers whose input is not one hidden state ({_first_line(refusal) or sorted(shapes)})",
            "any placement",
        )
    if recorder.outputs == 2:
        recorder.extra = torch.zeros(1, device=device)
        found = recorder.record(inputs(0), None)
        recorder.carried = tuple(
            sorted({k for call in found.values() for k, v in call.kwargs.items() if v is recorder.extra})
        )
        for index, call in found.items():
            if any(value is recorder.extra for value in call.args):
                raise _refuse(
                    model_type, f"layer {index} receives what an earlier layer computed", "any placement"
                )
        recorder.extra = None
    plain_calls = recorder.record(inputs(0), None)
    for index, call in plain_calls.items():
        odd = _odd(call)
        if odd:
            raise _refuse(model_type, f"layer {index} receives {odd}", "any placement")
        if not _same(call, with_noise[index]):
            raise _refuse(
                model_type, f"layer {index} receives what an earlier layer computed", "any placement"
            )
    if not (first and last):
        other = recorder.record(inputs(1), None)
        for index, call in plain_calls.items():
            if not _same(call, other[index], _ids):
                raise _refuse(
                    model_type, f"layer {index} receives a tensor made from the tokens", "more than one stage"
                )


def check_carry(
    recorder: Recorder,
    layers: Mapping[int, nn.Module],
    calls: Mapping[int, RecordedCall],
    hidden: list[Tensor],
) -> None:
    """Refuse a family whose layers use the second output of the layer before, found by trying.

    GLM-5's layers hand their sparse attention's choice on, but each makes its own unless its
    configuration says that it shares.

    Args:
        recorder: of the family. layers, calls: of this stage, experts answered by the caller.
        hidden: two different hidden states of the calls' shape.
    """
    if not recorder.carried:
        return
    for index, layer in layers.items():
        with torch.no_grad():
            try:
                alone = calls[index].run(layer, hidden[0])
                other = calls[index].outputs(layer, hidden[1])[1]
                given = replace(calls[index], kwargs={**calls[index].kwargs, recorder.carried[0]: other})
                same = torch.equal(alone, given.run(layer, hidden[0]))
            except (ValueError, TypeError, AttributeError, RuntimeError):
                same = False
        if not same:
            raise _refuse(
                recorder.causal.config.model_type,
                f"layer {index} uses {recorder.carried[0]} of the layer before",
                "any placement",
            )


def _refuse(model_type: str, observed: str, what: str) -> UserError:
    return UserError(
        f"{model_type} cannot run with {what}",
        observed=observed,
        required="decoder layers that pass only a hidden state on",
        remedy="use rule.stages=1" if what == "more than one stage" else "choose another model family",
    )


def _odd(value: Any) -> str:
    """Name of the first argument that a layer could change or that cannot be kept, or ""."""
    if isinstance(value, RecordedCall):
        return _odd(value.args) or next((f"{k}: {o}" for k, v in value.kwargs.items() if (o := _odd(v))), "")
    if isinstance(value, Mapping):
        if not value:
            return "an empty dict (a place for layers to leave results)"
        return next((o for v in value.values() if (o := _odd(v))), "")
    if isinstance(value, list) and not value:
        return "an empty list (a place for layers to leave results)"
    if isinstance(value, (tuple, list)):
        return next((o for v in value if (o := _odd(v))), "")
    if value is None or isinstance(
        value, (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size)
    ):
        return ""
    return f"a {type(value).__name__}"


def _same(a: Any, b: Any, also: Callable[[Tensor, Tensor], bool] = lambda a, b: False) -> bool:
    """Whether two calls have equal arguments, or tensors that `also` lets pass."""
    if isinstance(a, RecordedCall):
        return _same(a.args, b.args, also) and _same(a.kwargs, b.kwargs, also)
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.shape != b.shape:
            return False
        return torch.equal(a, b) or also(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k], also) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y, also) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _ids(a: Tensor, b: Tensor) -> bool:
    """The token ids themselves, of check_family's two inputs: every stage has them."""
    whole = a.dtype == b.dtype == torch.int64
    return whole and bool((a == 0).all()) and bool((b == 1).all())


def _first_line(error: Exception | None) -> str:
    return "" if error is None else (str(error).strip().splitlines() or [type(error).__name__])[0]
