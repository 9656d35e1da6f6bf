"""trl's preference losses on logits of ours: its trainers' own methods, with a model that hands out logits.

    python -m tests.helpers.trl_losses      writes tests/golden/preference_losses.json (needs trl)

trl is not a dependency of the project; where it is installed the tests call it, elsewhere they use the
recorded values. The logits are a function of the case's number alone (numpy's Philox).
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "preference_losses.json"
PAIRS, WIDTH, VOCAB = 3, 9, 11

# name -> stage and options
CASES: dict[str, dict[str, Any]] = {
    "dpo sigmoid": {"stage": "dpo", "kind": "sigmoid", "beta": 0.1},
    "dpo sigmoid 0.5": {"stage": "dpo", "kind": "sigmoid", "beta": 0.5},
    "dpo hinge": {"stage": "dpo", "kind": "hinge", "beta": 0.2},
    "dpo ipo": {"stage": "dpo", "kind": "ipo", "beta": 0.3},
    "dpo robust": {"stage": "dpo", "kind": "robust", "beta": 0.3, "label_smoothing": 0.2},
    "orpo": {"stage": "orpo", "beta": 0.1},
    "orpo 0.7": {"stage": "orpo", "beta": 0.7},
    "kto": {"stage": "kto", "beta": 0.1},
    "kto weights": {"stage": "kto", "beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "simpo": {"stage": "dpo", "kind": "simpo", "beta": 2.0, "gamma": 1.6},
    "simpo 10": {"stage": "dpo", "kind": "simpo", "beta": 10.0, "gamma": 3.0},
}


@dataclass
class Batch:
    """Chosen rows, then rejected ones (KTO: half of each), all float32.

    logits, reference, kl_policy, kl_reference: [2B, s, V]. ids: [2B, s]. mask: [2B, s], 1 at the answer.
    lengths: [2B] valid tokens.
    """

    logits: Tensor
    reference: Tensor
    kl_policy: Tensor
    kl_reference: Tensor
    ids: Tensor
    mask: Tensor
    lengths: Tensor


def batch(number: int) -> Batch:
    """Logits, tokens and masks of a case; answers of unequal lengths after prompts of 2 or 3 tokens."""
    draw = np.random.Generator(np.random.Philox(number))
    logits = [torch.from_numpy(draw.normal(size=(2 * PAIRS, WIDTH, VOCAB)) * 2).float() for _ in range(4)]
    ids = torch.from_numpy(draw.integers(0, VOCAB, (2 * PAIRS, WIDTH)))
    lengths = torch.tensor([9, 6, 8, 7, 9, 5])
    prompts = torch.tensor([2, 3, 2, 2, 3, 2])
    at = torch.arange(WIDTH)[None, :]
    mask = ((at >= prompts[:, None]) & (at < lengths[:, None])).long()
    return Batch(*logits, ids, mask, lengths)


def trl_loss(case: dict[str, Any], data: Batch) -> Tensor:
    """trl's loss, differentiable in data.logits."""
    stage = "simpo" if case.get("kind") == "simpo" else case["stage"]
    return {"dpo": _dpo, "simpo": _simpo, "orpo": _orpo, "kto": _kto}[stage](case, data)


class _Model(torch.nn.Module):
    """Hands out logits in the place of a model; `several` in turn."""

    is_gradient_checkpointing = False

    def __init__(self, *several: Tensor) -> None:
        super().__init__()
        self.several = list(several)

    def forward(self, *args: Any, **options: Any) -> Any:
        from trl.trainer.utils import selective_log_softmax

        logits = self.several.pop(0)
        if "labels" not in options:
            return SimpleNamespace(logits=logits)
        labels = options["labels"][:, 1:]
        logps = selective_log_softmax(logits[:, :-1], labels.clamp(min=0))
        logps = torch.where(labels == -100, torch.zeros_like(logps), logps)
        nothing = torch.zeros_like(logps)
        return SimpleNamespace(log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def _trainer(**values: Any) -> Any:
    def same(x: Any) -> Any:
        return x

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=same, gather=same)
    return SimpleNamespace(
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **values,
    )


def _attention(data: Batch) -> Tensor:
    return (torch.arange(WIDTH)[None, :] < data.lengths[:, None]).long()


def _dpo(case: dict[str, Any], data: Batch) -> Tensor:
    from trl import DPOTrainer

    model = _Model(data.logits)
    trainer = _trainer(
        model=model,
        ref_model=_Model(data.reference),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[case["kind"]],
        loss_weights=[1.0],
        beta=case["beta"],
        label_smoothing=case.get("label_smoothing", 0.0),
        use_weighting=False,
    )
    inputs = {"input_ids": data.ids, "attention_mask": _attention(data), "completion_mask": data.mask}
    return DPOTrainer._compute_loss(trainer, model, inputs, False)


def _orpo(case: dict[str, Any], data: Batch) -> Tensor:
    from trl.experimental.orpo import ORPOTrainer

    trainer = _trainer(
        model=None,
        beta=case["beta"],
        is_encoder_decoder=False,
        padding_value=0,
        concatenated_inputs=ORPOTrainer.concatenated_inputs,
        get_batch_logps=ORPOTrainer.get_batch_logps,
    )
    trainer.concatenated_forward = lambda m, b: ORPOTrainer.concatenated_forward(trainer, m, b)
    trainer.odds_ratio_loss = lambda c, r: ORPOTrainer.odds_ratio_loss(trainer, c, r)
    return ORPOTrainer.get_batch_loss_metrics(trainer, _Model(data.logits), _labelled(data))[0]


def _simpo(case: dict[str, Any], data: Batch) -> Tensor:
    from trl.experimental.cpo import CPOTrainer

    trainer = _trainer(
        beta=case["beta"],
        simpo_gamma=case["gamma"],
        loss_type="simpo",
        label_smoothing=0.0,
        cpo_alpha=0.0,
        alpha=0.0,
        is_encoder_decoder=False,
        pad_token_id=0,
        concatenated_inputs=CPOTrainer.concatenated_inputs,
        get_batch_logps=CPOTrainer.get_batch_logps,
    )
    trainer.concatenated_forward = lambda m, b: CPOTrainer.concatenated_forward(trainer, m, b)
    trainer.cpo_loss = lambda c, r: CPOTrainer.cpo_loss(trainer, c, r)
    return CPOTrainer.get_batch_loss_metrics(trainer, _Model(data.logits), _labelled(data))[0]


def _labelled(data: Batch) -> dict[str, Tensor]:
    """The batch as ORPO's and CPO's trainers take it."""
    labels = data.ids.masked_fill(data.mask == 0, -100)
    rows = {}
    for name, part in (("chosen", slice(0, PAIRS)), ("rejected", slice(PAIRS, None))):
        rows[f"{name}_input_ids"] = data.ids[part]
        rows[f"{name}_attention_mask"] = _attention(data)[part]
        rows[f"{name}_labels"] = labels[part]
    return rows


def _kto(case: dict[str, Any], data: Batch) -> Tensor:
    from trl import KTOTrainer

    model = _Model(data.kl_policy, data.logits)
    trainer = _trainer(
        model=model,
        ref_model=_Model(data.kl_reference, data.reference),
        calculate_KL=True,
        loss_type="kto",
        beta=case["beta"],
        desirable_weight=case.get("desirable_weight", 1.0),
        undesirable_weight=case.get("undesirable_weight", 1.0),
    )
    trainer._compute_kl_logps = lambda m, b: KTOTrainer._compute_kl_logps(trainer, m, b)
    inputs = {
        "input_ids": data.ids,
        "attention_mask": _attention(data),
        "completion_mask": data.mask,
        "KL_input_ids": data.ids.roll(1, 0),
        "KL_attention_mask": _attention(data).roll(1, 0),
        "KL_completion_mask": data.mask.roll(1, 0),
        "label": torch.tensor([True] * PAIRS + [False] * PAIRS),
    }
    return KTOTrainer._compute_loss(trainer, model, inputs, False)


def record() -> dict[str, Any]:
    """Losses, and norms of the gradients at the logits, of all cases."""
    import trl

    found: dict[str, Any] = {"trl": trl.__version__}
    for number, (name, case) in enumerate(CASES.items()):
        data = batch(number)
        data.logits.requires_grad_()
        loss = trl_loss(case, data)
        (grad,) = torch.autograd.grad(loss, data.logits)
        found[name] = {"loss": float(loss.detach()), "gradient": grad.norm(dim=(1, 2)).tolist()}
    return found


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
