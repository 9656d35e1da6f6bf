"""Speed of a model's own layers beside the experts: real weights, the worker's own layer loop.

One layer of each kind is loaded (kt_ray.model.stage.Stage) and run with an exchange that answers zeros at
once. So the time is all that a worker spends on a micro-batch, without waiting for experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import MicroBatch, PassSpec
from kt_ray.hardware.rates import LayerRate
from kt_ray.measure.timing import torch_threads
from kt_ray.model.layer_loop import LayerLoop
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.placement.order import Op
from kt_ray.timing.layer_rates import ENDS, KINDS, ends_signature, layer_signature, rate_of
from kt_ray.timing.layer_work import LayerWork

REPEATS = 5  # of a pass at least; their median counts
SECONDS = 0.25  # for them at least
ROUNDS = 2  # the faster one counts: what disturbs a machine lasts longer than a few passes
TOO_LONG = 1.0  # seconds of a forward beyond which no longer rows are tried


class Zeros:
    """An `ExpertExchange` (kt_ray.model.layer_loop) whose experts answer zeros at once."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], tuple[int, int, int]] = {}

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def after(self, ready: Any) -> None:
        ready.synchronize()

    def submit_forward(
        self,
        layer: int,
        group: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        keys_T: Tensor,
        keep: bool,
    ) -> None:
        self._sizes[layer, group] = (x_TH.shape[0], x_TH.shape[1], weights_TK.shape[1])

    def join_forward(self, layer: int, group: int) -> Tensor:
        tokens, width, _ = self._sizes[layer, group]
        return torch.zeros(tokens, width)

    def submit_backward(self, layer: int, group: int, dy_TH: Tensor) -> None:
        return

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        tokens, width, k = self._sizes[layer, group]
        return torch.zeros(tokens, width), torch.zeros(tokens, k)


class Neighbours:
    """A `StageExchange` whose other stages send random numbers at once, and take everything.

    Args:
        values: [1, s, *state_shape] on the stage's device.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def send_hidden(self, group: int, tensors: list[Tensor]) -> None:
        return

    def receive_hidden(self, group: int) -> list[Tensor]:
        return [self._values]

    send_grad, receive_grad = send_hidden, receive_hidden


def measure_layers(
    spec: StageSpec,
    works: Sequence[LayerWork],
    threads: Sequence[int],
    widths: Sequence[int],
    say: Callable[[str], None] = lambda text: None,
) -> tuple[LayerRate, ...]:
    """Positions/s of one layer of each kind that the model has, and of its head.

    Args:
        spec: of any stage of the model.
        works: every layer's counted work: layers of one signature are measured once.
        threads: torch threads to measure with; ignored on a GPU.
        widths: positions of one row, ascending; longer ones are left out where a forward takes a second.

    Raises:
        UserError: the model cannot be built or loaded.
    """
    last = len(works) - 1
    # The last layer of each kind: the last of all comes with the head. A layer that takes what an earlier
    # one computed does not run alone: such kinds keep their nominal rates, and the ends, if one is the last.
    dims = works[0].dims
    alone = {number: work for number, work in enumerate(works) if not dims.takes(number)}
    kinds = {layer_signature(work): number for number, work in alone.items()}
    model = dims.model_type
    rates: list[LayerRate] = []
    for signature, layer in kinds.items():
        say(f"layer {layer} of {model}")
        stage = Stage(spec.of_layer(layer))
        for count in threads if stage.device.type == "cpu" else (0,):
            seconds: dict[str, dict[int, float]] = {kind: {} for kind in (*KINDS, *ENDS)}
            with torch_threads(count or torch.get_num_threads()):
                for _ in range(ROUNDS):
                    for width in widths:
                        took = _median(stage, layer, width)
                        for kind, value in took.items():
                            seconds[kind][width] = min(value, seconds[kind].get(width, value))
                        if took["forward"] > TOO_LONG:
                            break
            layers = {k: seconds[k] for k in KINDS}
            rates.append(rate_of(signature, f"{model} layer {layer}", count, layers))
            if layer == last:
                ends = {k: seconds[k] for k in ENDS}
                rates.append(rate_of(ends_signature(works[0]), f"{model} ends", count, ends))
        del stage
    return tuple(rates)


def _median(stage: Stage, layer: int, width: int) -> dict[str, float]:
    """Of passes that follow one which does not count: torch prepares its products for the width in it."""
    _pass(stage, layer, width, 0)
    passes: list[dict[str, float]] = []
    start = time.perf_counter()
    while len(passes) < REPEATS or time.perf_counter() - start < SECONDS:
        passes.append(_pass(stage, layer, width, len(passes) + 1))
        if time.perf_counter() - start > 4 * TOO_LONG:
            break
    return {kind: statistics.median(one[kind] for one in passes) for kind in passes[0]}


def _pass(stage: Stage, layer: int, width: int, number: int) -> dict[str, float]:
    """Seconds by kind of one row of `width` positions through the layer and back."""
    rng = np.random.default_rng(number)
    ids = rng.integers(0, stage.vocab_size, (1, width))
    row = MicroBatch(ids, ids, np.array([width]), np.array([number]))
    spec = PassSpec(number, number, "train", 0, (((row,),),), width)
    seconds: dict[str, float] = {}

    def timed(kind: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        if stage.device.type == "cuda":
            torch.cuda.synchronize(stage.device)
        seconds[kind] = time.perf_counter() - start

    values = torch.randn(1, width, *stage.state_shape, generator=torch.Generator().manual_seed(number))
    loops: list[LayerLoop] = []
    neighbours = Neighbours(values.to(stage.device, stage.dtype))
    timed("begin", lambda: loops.append(stage.begin(spec, 0, Zeros(), neighbours)))
    (loop,) = loops
    loop.run(Op("embed" if stage.first else "recv_hidden", layer, 0))
    timed("forward", lambda: loop.forward(layer, 0))
    if layer in stage.moe_layers:
        loop.join(layer, 0)
    if stage.last:
        timed("loss", lambda: loop.loss(layer, 0))
    else:
        loop.send_hidden(layer, 0)
        loop.recv_grad(layer, 0)
    timed("recompute", lambda: loop.recompute(layer, 0))
    timed("backward", lambda: loop.backward(layer, 0))
    stage.zero_grad()
    return seconds
