"""What layers hand to later ones beside their hidden state: handed results.

GLM-5.2's and Hy4's sparse attention chooses keys in some layers, and the layers after each take its choice.
Some of Mistral Large 4's last layers take the latent keys of an earlier one. transformers passes the first
as a second output, the second through a dict in which layers leave it. Who leaves and who takes is found
by trying (`find_hands`).

A pass keeps a result from the layer that leaves it to the last one that takes it, and a training pass until
its backward has come to the layer that left it: a recomputed layer takes what it took in forward, and the
gradients of all that took it are the gradient of that layer's result.

Shapes: those of the family, b rows of s positions first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from kt_ray.model.hidden_shelf import Kept
from kt_ray.model.layer_calls import LayerCallCapture, RecordedCall, Result, is_place, unsupported

Tensors = tuple[Tensor, ...]
Place = tuple[int, Result]  # the layer that left it, and what


@dataclass(frozen=True)
class Hands:
    """Who hands what to whom. takes: layer -> result -> the layer that left it."""

    takes: Mapping[int, Mapping[Result, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.takes)

    def left_by(self, layer: int) -> set[Result]:
        """A layer's results that later ones take."""
        return {result for taken in self.takes.values() for result, by in taken.items() if by == layer}

    def last_taker(self, place: Place) -> int:
        """The last layer that takes a result."""
        layer, result = place
        return max(taker for taker, taken in self.takes.items() if taken.get(result) == layer)

    def given(
        self,
        layers: Mapping[int, nn.Module],
        calls: Mapping[int, RecordedCall],
        hidden: Tensor,
        run: Callable[[RecordedCall, int, dict[Result, Tensors]], object] | None = None,
    ) -> dict[int, RecordedCall]:
        """The calls, with what earlier layers leave where each is given `hidden`: to try layers one by one.

        Args:
            run: runs a layer, by its call and number; None = on `hidden`. The caller answers for the experts.
        """
        left: dict[Place, Tensors] = {}
        complete = dict(calls)
        for layer in sorted(layers):
            if layer in self.takes:
                taken = {result: left[by, result] for result, by in self.takes[layer].items()}
                complete[layer] = replace(calls[layer], given=taken)
            if wanted := self.left_by(layer):
                results: dict[Result, Tensors] = {}
                with torch.no_grad():
                    if run is None:
                        complete[layer].run(layers[layer], hidden, results)
                    else:
                        run(complete[layer], layer, results)
                left |= {(layer, result): results[result] for result in wanted}
        return complete


def find_hands(
    capture: LayerCallCapture,
    layers: Mapping[int, nn.Module],
    calls: Mapping[int, RecordedCall],
    hidden: Tensor,
) -> Hands:
    """Which of a stage's layers take what from which, found by running each on `hidden`.

    A layer that lacks what it takes raises, or gives something else. The caller answers for the experts.

    Raises:
        UserError: a layer takes what none of these has left.
    """
    if capture.carried in (None, "") and not any(
        is_place(v) for call in calls.values() for v in call.kwargs.values()
    ):
        return Hands()
    last: dict[Result, int] = {}
    values: dict[Result, Tensors] = {}
    takes: dict[int, dict[Result, int]] = {}
    placement = "any placement" if 0 in layers else "more than one stage"
    for layer in sorted(layers):
        given, left = _taken(capture, layer, layers[layer], calls[layer], hidden, values, placement)
        if given:
            takes[layer] = {result: last[result] for result in given}
        values |= left
        last |= dict.fromkeys(left, layer)
    return Hands(takes)


def _taken(
    capture: LayerCallCapture,
    number: int,
    layer: nn.Module,
    call: RecordedCall,
    hidden: Tensor,
    values: Mapping[Result, Tensors],
    placement: str,
) -> tuple[dict[Result, Tensors], dict[Result, Tensors]]:
    """What a layer takes of `values`, and what it leaves."""
    given: dict[Result, Tensors] = {}
    places = [name for name, value in call.kwargs.items() if is_place(value)]
    second: list[Result] = [(call.carried, None)] if call.carried else []

    @torch.no_grad()
    def run(given: Mapping[Result, Tensors]) -> tuple[Tensor, dict[Result, Tensors]]:
        left: dict[Result, Tensors] = {}
        return replace(call, given=given).run(layer, hidden, left), left

    while True:
        try:
            alone, left = run(given)
            everything, _ = run(dict(values))
        except KeyError as error:
            lacking: list[Result] = [(name, error.args[0]) for name in places]
        except (ValueError, TypeError, AttributeError, RuntimeError):
            lacking = [*second]
        else:
            if torch.equal(alone, everything):
                return given, left
            lacking = [*second]
        more = next((result for result in lacking if result in values and result not in given), None)
        if more is None:
            observed = f"layer {number} receives what an earlier layer computed"
            raise unsupported(capture.causal.config.model_type, observed, placement)
        given[more] = values[more]


class HandedResults:
    """The handed results of one micro-batch in one pass."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands
        self._now: dict[Place, Tensors] = {}  # on the device
        self._kept: dict[Place, tuple[Kept, ...]] = {}  # for backward
        self._gradients: dict[Place, list[Tensor | None]] = {}  # float32, so far

    def given(self, layer: int) -> dict[Result, Tensors]:
        """What a layer takes in forward."""
        return {result: self._now[by, result] for result, by in self.hands.takes.get(layer, {}).items()}

    def leave(
        self, layer: int, left: Mapping[Result, Tensors], keep: Callable[[int, Tensor], Kept | None]
    ) -> None:
        """After a layer's forward: take what it left. keep: of (the last layer that takes it, a tensor)."""
        for result in self.hands.left_by(layer):
            place = (layer, result)
            last = self.hands.last_taker(place)
            self._now[place] = tuple(tensor.detach() for tensor in left[result])
            kept = [keep(last, tensor) for tensor in self._now[place]]
            if all(one is not None for one in kept):
                self._kept[place] = tuple(one for one in kept if one is not None)
        for result, by in self.hands.takes.get(layer, {}).items():
            if self.hands.last_taker((by, result)) == layer:
                del self._now[by, result]

    def fetch(self, layer: int) -> None:
        """Begin to bring back what a layer is recomputed from, if it is away."""
        for result, by in self.hands.takes.get(layer, {}).items():
            if (by, result) not in self._now:
                for one in self._kept[by, result]:
                    one.fetch()

    def leaves(self, layer: int, differentiated: int) -> dict[Result, Tensors]:
        """What a recomputed layer takes: leaves of its graph.

        Args:
            differentiated: the first layer that backward differentiates: results of those below need no
                gradients.
        """
        found = {}
        for result, by in self.hands.takes.get(layer, {}).items():
            place = (by, result)
            if place not in self._now:
                self._now[place] = tuple(one.take() for one in self._kept[place])
            found[result] = tuple(
                t.detach().requires_grad_(t.is_floating_point() and by >= differentiated)
                for t in self._now[place]
            )
        return found

    def add_gradients(self, layer: int, leaves: Mapping[Result, Tensors]) -> None:
        """After a layer was differentiated: add what its graph has at the results that it took."""
        for result, by in self.hands.takes.get(layer, {}).items():
            tensors = leaves[result]
            so_far = self._gradients.setdefault((by, result), [None] * len(tensors))
            for number, tensor in enumerate(tensors):
                if tensor.grad is not None:
                    before = so_far[number]
                    so_far[number] = tensor.grad.float() if before is None else before + tensor.grad

    def gradients(self, layer: int, left: Mapping[Result, Tensors]) -> list[tuple[Tensor, Tensor]]:
        """What a recomputed layer left, each with its gradient, where it has one."""
        return [
            (tensor, gradient)
            for result in sorted(self.hands.left_by(layer), key=str)
            for tensor, gradient in zip(left[result], self._gradients.get((layer, result), ()), strict=False)
            if gradient is not None
        ]

    def drop(self, layer: int) -> None:
        """Free a layer's results: backward is through it."""
        for held in (self._now, self._kept, self._gradients):
            for result in self.hands.left_by(layer):
                held.pop((layer, result), None)
