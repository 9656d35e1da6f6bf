"""What a stage holds during one pass.

Shapes: b rows of s positions, N = b·s, T valid tokens, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import MicroBatch, Tops
from kt_ray.model.handed_results import HandedResults, Hands
from kt_ray.model.hidden_shelf import Kept
from kt_ray.model.layer_calls import RecordedCall, Result

_WEIGHT_TOLERANCE = 1e-5  # routing weights recomputed on the same device are bit-equal in practice


@dataclass
class MicroState:
    """One micro-batch on the stage's device."""

    batch: MicroBatch  # as the driver sent it
    rows: Tensor | None  # int64 [T] flat indices of the valid positions, or None when all N are valid
    keys_T: Tensor  # int64 [T] on the CPU: sample · 2³² + position
    samples_N: Tensor  # int64 [N]
    positions_N: Tensor  # int64 [N]
    # int64 [b, s], 1 for valid positions; None when all are, or when rows are packed: then `documents`
    # keeps padding apart too. Padding follows a row
    mask: Tensor | None
    # int64 [b, s] position ids that restart with each document of packed rows, or None
    documents: Tensor | None = None
    calls: dict[int, RecordedCall] = field(default_factory=dict)  # own layer -> call arguments
    handed: HandedResults = field(default_factory=lambda: HandedResults(Hands()))
    embedded: Tensor | None = None  # [b, s, H] input of the first layer (first stage only, until `embed`)

    @classmethod
    def create(cls, batch: MicroBatch, device: torch.device) -> MicroState:
        """Rows, keys and the padding mask of a micro-batch."""
        b, s = batch.input_ids.shape
        position = np.arange(s, dtype=np.int64)[None, :].repeat(b, axis=0)
        sample = np.asarray(batch.sample_ids, dtype=np.int64)[:, None].repeat(s, axis=1)
        within, documents = position, None
        if batch.positions_BS is not None and batch.samples_BS is not None:
            # Dropout's counters are those of the unpacked rows: sample and position within it.
            sample, within = batch.samples_BS, batch.positions_BS
            documents = torch.from_numpy(within).to(device)
        valid = position < np.asarray(batch.lengths)[:, None]
        full = bool(valid.all())
        masked = not full and documents is None
        return cls(
            batch=batch,
            rows=None if full else torch.from_numpy(np.flatnonzero(valid)).to(device),
            keys_T=torch.from_numpy(((sample << 32) + within)[valid]),
            samples_N=torch.from_numpy(sample.reshape(-1)).to(device),
            positions_N=torch.from_numpy(within.reshape(-1)).to(device),
            mask=torch.from_numpy(valid.astype(np.int64)).to(device) if masked else None,
            documents=documents,
        )

    @property
    def tokens(self) -> int:
        return self.keys_T.numel()

    def take(self, values_NX: Tensor) -> Tensor:
        """Rows of the valid tokens, [T, X]; differentiable."""
        return values_NX if self.rows is None else values_NX.index_select(0, self.rows)

    def put(self, values_TX: Tensor, like_NX: Tensor) -> Tensor:
        """A tensor like `like_NX` with these rows at the valid tokens and zeros elsewhere; differentiable."""
        if self.rows is None:
            return values_TX.reshape(like_NX.shape)
        return torch.zeros_like(like_NX).index_copy(0, self.rows, values_TX)


class Routes(NamedTuple):
    """Experts that a micro-batch chose in its forward: what the recomputation is held against."""

    ids_TK: Tensor  # int32, on the device
    weights_TK: Tensor  # as the router made them


class _Compared(NamedTuple):
    """A micro-batch's recomputed MoE layer. found: float64 [3] on the device: tokens that chose other
    experts, largest difference of a routing weight, largest routing weight."""

    layer: int
    group: int
    tokens: int
    found: Tensor


class RecomputedRoutes:
    """Holds recomputed layers' routing against the forward's: on the device, read once per pass."""

    def __init__(self) -> None:
        self._compared: list[_Compared] = []

    def compare(self, layer: int, group: int, before: Routes, again: Routes) -> None:
        """Note how a micro-batch's routes differ."""
        if before.ids_TK.numel() == 0:
            return
        found = (
            (before.ids_TK != again.ids_TK).any(dim=1).sum(),
            (before.weights_TK.float() - again.weights_TK.float()).abs().max(),
            before.weights_TK.abs().max(),
        )
        compared = _Compared(layer, group, before.ids_TK.shape[0], torch.stack([f.double() for f in found]))
        self._compared.append(compared)

    def check(self) -> None:
        """At a pass's end: every layer was computed again as in its forward. Once, since the host waits here
        for all that the device has to do.

        Raises:
            RuntimeError: the first layer that was not, in the order of the recomputation.
        """
        compared, self._compared = self._compared, []
        if not compared:
            return
        found = torch.stack([c.found for c in compared]).tolist()
        for c, (differs, drift, largest) in zip(compared, found, strict=True):
            if differs:
                raise RuntimeError(
                    f"layer {c.layer}, group {c.group}: the recomputation chose other experts than the "
                    f"forward for {differs:.0f} of {c.tokens} tokens"
                )
            if not drift <= _WEIGHT_TOLERANCE * largest:
                raise RuntimeError(
                    f"layer {c.layer}, group {c.group}: recomputed routing weights differ by {drift:.3g}"
                )


@dataclass
class Graph:
    """One micro-batch's recomputed layer, waiting for the experts' gradients."""

    h_in: Tensor  # leaf
    out: Tensor
    y_TH: Tensor | None = None  # leaf, where dy is its gradient
    x_TH: Tensor | None = None
    weights_TK: Tensor | None = None
    balance: Tensor | None = None  # scalar: its share of the routers' load-balancing loss
    # handed results: leaves that the layer took, and what it left
    taken: dict[Result, tuple[Tensor, ...]] = field(default_factory=dict)
    left: dict[Result, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass
class GroupState:
    """What one group holds."""

    micro: list[MicroState]  # its micro-batches
    hidden: list[Tensor] | None = None  # h of each, between layers
    grads: list[Tensor] | None = None  # dH of each, between layers (backward)
    # layer -> h of each at the layer's input
    layer_inputs: dict[int, list[Kept]] = field(default_factory=dict)
    # layer -> of each, the output that a recomputed layer is given (kt_ray.model.known_outputs)
    known_outputs: dict[int, list[Kept]] = field(default_factory=dict)
    # non-affine layer -> y float32 [T_i, H] of each
    expert_outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    routes: dict[int, list[Routes]] = field(default_factory=dict)  # MoE layer -> experts chosen by each
    # layer -> recomputed graphs of the first micro-batches
    graphs: dict[int, list[Graph]] = field(default_factory=dict)
    logits: list[Tensor] | None = None  # float32 [b, s, V] of each, on the CPU, when asked for
    losses: list[float] = field(default_factory=list)  # summed losses of each, after `loss`
    logps: list[np.ndarray] = field(default_factory=list)  # float64 [b] of each, when asked for
    token_logps: list[np.ndarray] = field(default_factory=list)  # float32 [b, s - 1] of each, of a TokenLoss
    tops: list[Tops] = field(default_factory=list)  # of each, when asked for

    def drop(self, layer: int) -> None:
        """Free what was held of a layer for its backward."""
        for held in (self.graphs, self.layer_inputs, self.known_outputs, self.routes, self.expert_outputs):
            held.pop(layer, None)
        for micro in self.micro:
            micro.handed.drop(layer)

    @property
    def sizes(self) -> list[int]:
        return [m.tokens for m in self.micro]
