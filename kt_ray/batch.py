"""Token batches and the description of one pass, as they travel from the driver to every worker.

numpy only: the driver's side of a step holds token ids and scalars, never activations.
Shapes: b rows, s tokens per row (right-padded), all int64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

# Name under which actors keep the adapter that a preference run starts from.
REFERENCE = "reference"
IGNORE = -100  # label of a token that is not trained, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class MicroBatch:
    """Rows that pass a layer together."""

    input_ids: np.ndarray  # [b, s] token ids, right-padded
    labels: np.ndarray  # [b, s] the token itself where it is trained, IGNORE elsewhere (not shifted)
    lengths: np.ndarray  # [b] valid tokens of each row
    sample_ids: np.ndarray  # [b] index of each row in its data set: the key of counter-based dropout
    # [b] +1 chosen or wanted, -1 rejected or unwanted, 0 neither; a pair's rows follow each other
    signs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # float64 [b] log-probability of each answer under the reference, where it is known
    reference: np.ndarray | None = None
    samples_BS: np.ndarray | None = None  # packed rows only: [b, s] sample id of each position's document
    # packed rows only: [b, s] position within the document; a document begins where it is 0. None = every row
    # is one document
    positions_BS: np.ndarray | None = None
    # float32 [b, s] each, what a TokenLoss reads: at a position, for the label behind it
    loss_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    # whose LoRA these rows train: True = the present training's, a name = that of one of `PassSpec.joined`
    training: bool | str = True
    # rows of several trainings, one part after another (kt_ray.data.batches.side_by_side); () = of one
    parts: tuple[MicroBatch, ...] = ()

    @property
    def of_one_training(self) -> tuple[MicroBatch, ...]:
        """Its parts, or itself."""
        return self.parts or (self,)

    @property
    def tokens(self) -> int:
        """Valid (not padded) tokens."""
        return int(self.lengths.sum())

    @property
    def loss_tokens(self) -> int:
        """Tokens that contribute to the loss (labels after the shift)."""
        return int((self.labels[:, 1:] != IGNORE).sum())

    def named(self, samples_per_row: int) -> str:
        """The first rows of the data set that are in it, for a message; see `PassSpec.samples_per_row`."""
        rows = dict.fromkeys(int(sample) // samples_per_row for sample in self.sample_ids)
        return ", ".join(map(str, [*rows][:8])) + (", ..." if len(rows) > 8 else "")


Wave = tuple[tuple[tuple[MicroBatch, ...], ...], ...]
"""What one pass takes: per replica, per group, the micro-batches. A replica may have empty groups."""


def trained_tokens(wave: Wave) -> int:
    """Trained tokens of a pass: the divisor of its loss."""
    return sum(mb.loss_tokens for groups in wave for group in groups for mb in group)


@dataclass(frozen=True)
class LoraPart:
    """What one of several trainings changes of the LoRA: see kt_ray.model.lora_part."""

    rank: int | None = None  # rows of every A, columns of every B; None = all
    attn: bool = True  # modules of attention, and what stands in its place (linear attention, Mamba)
    mlp: bool = True  # routed experts, shared experts, dense MLPs


WHOLE = LoraPart()


@dataclass(frozen=True)
class Objective:
    """A preference loss: see kt_ray.model.preference_losses."""

    stage: str  # "dpo", "orpo" or "kto"
    units: int  # pairs (dpo, orpo) or rows (kto) of the whole step: what the loss is the mean over
    # kind, beta, gamma, label_smoothing, desirable_weight, undesirable_weight: as configured
    kind: str = "sigmoid"
    beta: float = 0.1
    gamma: float = 0.5
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    nll_tokens: int = 0  # orpo: tokens of the step's chosen rows, prompts included
    kl: float = 0.0  # kto: its reference point


# cispo: no lower bound, as in its paper; gspo: its paper's
_BOUNDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}


@dataclass(frozen=True)
class TokenLoss:
    """A loss of the labels' log-probabilities, summed over them: see kt_ray.model.policy_losses."""

    name: str  # "cross_entropy", "importance_sampling", "ppo", "cispo", "dro" or "gspo"
    # ppo, cispo, gspo: bounds of the probability ratio; None = the loss's own
    clip_low: float | None = None
    clip_high: float | None = None
    beta: float = 0.05  # dro: strength of the quadratic term

    @property
    def bounds(self) -> tuple[float, float]:
        """Of clip."""
        own = _BOUNDS.get(self.name, (0.0, 0.0))
        low = own[0] if self.clip_low is None else self.clip_low
        return low, own[1] if self.clip_high is None else self.clip_high


Tops = tuple[np.ndarray, np.ndarray]
"""The k most probable tokens behind each position, in descending order: int64 [b, s - 1, k] ids, float32
[b, s - 1, k] log-probabilities; -1 and 0 where there is no label."""


@dataclass(frozen=True)
class PassSpec:
    """One pass of all micro-batches through all layers."""

    number: int  # increases by one with every pass of a run (train and eval alike): names messages
    step: int  # optimizer step (0-based): the counter of dropout
    kind: str  # "train" (forward and backward) or "eval" (forward and loss)
    seed: int  # the run's seed
    wave: Wave  # the micro-batches
    loss_tokens: int  # the divisor of the loss: all trained tokens of the step, over all replicas
    # eval only: workers of the last stage hand back float32 logits (tests, small runs)
    return_logits: bool = False
    timeline: bool = False  # actors report every span of the pass, not only their sums (kt_ray.timeline)
    # attention workers write a torch.profiler trace of the pass into this directory; None = none
    profile: str | None = None
    # eval only: False = the model without LoRA, on workers and expert actors alike; REFERENCE = with the one
    # that they keep under that name
    adapters: bool | str = True
    return_logps: bool = False  # workers of the last stage hand back the rows' log-probabilities
    # the loss, where it is not the mean token loss; `loss_tokens` is then its `units`, for a TokenLoss any
    # divisor of the sum. With a TokenLoss workers of the last stage hand back the labels' log-probabilities
    objective: Objective | TokenLoss | None = None
    return_top: int = 0  # with a TokenLoss: how many of the most probable tokens they hand back, too
    # eval only: count what routers choose, with a training pass's dropout (kt_ray.model.routing)
    routing: bool = False
    # train only: gradient of the load-balancing loss in a probability of each expert
    router_slopes: tuple[float, ...] | None = None
    noise_alpha: float = 0.0  # NEFTune's, where `dropout` is on (kt_ray.model.embedding_noise)
    # sample ids that a row of the data set has: two of a preference pair, one for each answer to a prompt
    samples_per_row: int = 1
    # train only: trainings put aside in the actors whose micro-batches are in the wave, too, and their losses
    joined: Mapping[str, TokenLoss] = field(default_factory=dict)

    def objective_of(self, micro: MicroBatch) -> Objective | TokenLoss | None:
        """The loss of a micro-batch's rows."""
        return self.objective if micro.training is True else self.joined[str(micro.training)]

    @property
    def dropout(self) -> bool:
        """Whether LoRA's dropout and noise on the embeddings are on."""
        return self.kind == "train" or self.routing

    @property
    def tokens(self) -> int:
        return sum(mb.tokens for groups in self.wave for group in groups for mb in group)
