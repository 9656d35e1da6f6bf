"""What plain Hugging Face + factored LoRA makes of a checkpoint.

Nothing here goes through kt_ray's layer loop, its hook, or PEFT: the reference runs the family's own
forward, row by row and without padding, with experts looped in torch and adapters added by hand. Only
the definitions that both sides must share are imported: the LoRA initialisation and the dropout mask.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import _default_apply_gate

from kt_ray.batch import IGNORE
from kt_ray.config.schema import LoraConfig
from kt_ray.model.dropout import module_stream
from kt_ray.model.lora import init_lora_a, is_gate
from kt_ray.native.dropout_hash import expert_stream, keep_mask, row_hash
from tests.helpers.reference.families import expert_names
from tests.helpers.reference.routing import find_router, forced_routing
from tests.helpers.reference.rows import Row, loss_tokens


@dataclass
class ReferenceResult:
    """What one step of the reference gives.

    Attributes:
        logits: per row, float32 [length, V].
        loss: summed token losses / trained tokens.
        grads: canonical name -> gradient of `loss`.
        expert_ids: layer -> sample -> int64 [length, K].
        weights: layer -> sample -> [length, K].
    """

    logits: list[Tensor]
    loss: float
    grads: dict[str, Tensor]
    expert_ids: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    weights: dict[int, dict[int, Tensor]] = field(default_factory=dict)


ExpertIds = Mapping[int, Mapping[int, Tensor]]  # layer -> sample -> [length, K]


class Reference:
    """The whole model in one process: Hugging Face's forward, experts in a torch loop, LoRA factored.

    Args:
        path: checkpoint directory.
        lora: rank, alpha, dropout, targets ("auto" or a list of suffixes), experts.
        seed: of LoRA's initialisation and of dropout.
        dtype: everything is computed in it; BF16 experts are widened exactly.

    Attributes:
        model: the Hugging Face model, frozen.
        parameters: canonical name -> leaf tensor.
        names: layer -> {"gate" | "up" | "down" -> prefix format with {} for the expert}.
    """

    def __init__(
        self, path: Path, lora: LoraConfig, seed: int = 0, dtype: torch.dtype = torch.float32, **load: Any
    ) -> None:
        self.lora, self.seed = lora, seed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own, about mixed checkpoint types
            self.model = AutoModelForCausalLM.from_pretrained(
                path,
                trust_remote_code=False,
                dtype=dtype,
                experts_implementation="eager",
                attn_implementation="eager",
                **load,
            )
        self.model.requires_grad_(False).eval()
        self.layers: list[nn.Module] = list(self.model.model.layers)
        self.experts: dict[int, nn.Module] = {}
        self.parameters: dict[str, Tensor] = {}
        self._sample = 0
        self._length = 0
        self._step = 0
        self._train = False
        self._forced: ExpertIds | None = None
        self._result = ReferenceResult([], 0.0, {})
        self.names = expert_names(json.loads((path / "config.json").read_text()))
        for index, layer in enumerate(self.layers):
            self._adapt(index, layer)

    # -- construction

    def _adapt(self, index: int, layer: nn.Module) -> None:
        for name, module in list(layer.named_modules()):
            full = f"model.layers.{index}.{name}"
            if type(module).__name__ == "LongcatFlashExperts":  # what transformers writes beside others'
                module.is_concatenated, module.is_transposed, module.has_bias = True, False, False
                module._apply_gate = partial(_default_apply_gate, module)
            if hasattr(module, "is_concatenated") and hasattr(module, "gate_up_proj"):
                self._adapt_experts(index, module)
            elif type(module).forward is nn.Linear.forward and self._is_target(full):
                self._adapt_linear(full, module)

    def _is_target(self, name: str) -> bool:
        targets = self.lora.target_modules
        if targets == "auto":
            return not is_gate(name)
        return targets != "none" and any(name.endswith("." + suffix) for suffix in targets)

    def _pair(self, prefix: str, out_features: int, in_features: int) -> None:
        a = f"{prefix}.lora_A.weight"
        self.parameters[a] = init_lora_a(self.seed, a, (self.lora.rank, in_features)).requires_grad_()
        self.parameters[f"{prefix}.lora_B.weight"] = torch.zeros(
            out_features, self.lora.rank
        ).requires_grad_()

    def _adapt_linear(self, name: str, module: nn.Linear) -> None:
        self._pair(name, module.out_features, module.in_features)
        base = module.forward
        if self.lora.dora:
            key = f"{name}.lora_magnitude_vector"
            self.parameters[key] = module.weight.detach().norm(dim=1).requires_grad_()

        def with_magnitude(x: Tensor) -> Tensor:
            """DoRA, the norm without a gradient; as in PEFT dropout also acts on W x, but not on its bias."""
            dropped = self._drop(x.float(), module_stream(name))
            update = self.lora.scale * self._p(name, "B") @ self._p(name, "A")
            norm = (module.weight + update).norm(dim=1).detach()
            share = self.parameters[f"{name}.lora_magnitude_vector"] / norm
            plain = torch.nn.functional.linear(dropped, module.weight)
            return base(x) - plain + share * (plain + torch.nn.functional.linear(dropped, update))

        def forward(x: Tensor) -> Tensor:
            if self.lora.dora:
                return with_magnitude(x)
            low = torch.nn.functional.linear(self._drop(x.float(), module_stream(name)), self._p(name, "A"))
            return (base(x) + self.lora.scale * torch.nn.functional.linear(low, self._p(name, "B"))).to(
                x.dtype
            )

        module.forward = forward  # type: ignore[method-assign]

    def _adapt_experts(self, index: int, module: nn.Module) -> None:
        self.experts[index] = module
        inner, hidden = module.down_proj.shape[1:]
        if not module.is_transposed:
            inner, hidden = hidden, inner
        if self.lora.experts:
            for expert in range(module.down_proj.shape[0]):
                self._pair(self.names[index]["gate"].format(expert), inner, hidden)
                self._pair(self.names[index]["up"].format(expert), inner, hidden)
                self._pair(self.names[index]["down"].format(expert), hidden, inner)
        module.forward = lambda x, ids, w: self.moe(index, x, ids, w)  # type: ignore[method-assign]

    def _p(self, prefix: str, side: str) -> Tensor:
        return self.parameters[f"{prefix}.lora_{side}.weight"]

    def randomize_b(self, seed: int, scale: float = 0.1) -> None:
        """Give every B random values, a function of (seed, name)."""
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                if ".lora_B." in name:
                    rank_in = init_lora_a(seed, name, tuple(tensor.shape))
                    tensor.copy_(rank_in * scale * tensor.shape[-1] ** 0.5)

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Take parameters from elsewhere (a run's adapter)."""
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    # -- the experts, also used on their own by tests' in-process exchange

    def moe(self, layer: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Routed experts of the current row."""
        self._result.expert_ids.setdefault(layer, {})[self._sample] = ids_TK.detach().clone()
        self._result.weights.setdefault(layer, {})[self._sample] = weights_TK.detach().clone()
        samples_T = torch.full((x_TH.shape[0],), self._sample)
        positions_T = torch.arange(x_TH.shape[0])
        y_TH = self.experts_output(layer, x_TH, ids_TK, weights_TK, samples_T, positions_T)
        zero_TK = ids_TK >= self.experts[layer].down_proj.shape[0]  # LongCat-Flash: their output is x
        return y_TH + x_TH * (weights_TK * zero_TK).sum(1, keepdim=True) if zero_TK.any() else y_TH

    def experts_output(
        self,
        layer: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        samples_T: Tensor,
        positions_T: Tensor,
    ) -> Tensor:
        """y [T, H] = Σ_k w_k · expert_k(x), differentiable in x, w and the adapters."""
        module, scale = self.experts[layer], self.lora.scale
        y_TH = torch.zeros_like(x_TH)
        for expert in range(module.down_proj.shape[0]):
            token, k = (ids_TK == expert).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            x = x_TH[token]

            def lora(
                value: Tensor, projection: str, expert: int = expert, token: Tensor = token
            ) -> Tensor | float:
                if not self.lora.experts:
                    return 0.0
                prefix = self.names[layer][projection].format(expert)
                stream = expert_stream(layer, expert, ("gate", "up", "down").index(projection))
                dropped = self._mask(value.float(), stream, samples_T[token], positions_T[token])
                return scale * (dropped @ self._p(prefix, "A").T @ self._p(prefix, "B").T)

            gate, up = _halves(module, _linear(module, "gate_up_proj", expert, x))
            both = _joined(module, gate + lora(x, "gate"), up + lora(x, "up"))
            act = module._apply_gate(both)  # the family's own
            out = _linear(module, "down_proj", expert, act) + lora(act, "down")
            y_TH = y_TH.index_add(0, token, (out * weights_TK[token, k, None]).to(y_TH.dtype))
        return y_TH

    # -- dropout

    def _drop(self, x: Tensor, stream: int) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return self._mask(
            x.reshape(rows, -1), stream, torch.full((rows,), self._sample), torch.arange(rows)
        ).view_as(x)

    def _mask(self, x: Tensor, stream: int, samples_T: Tensor, positions_T: Tensor) -> Tensor:
        if not self._train or self.lora.dropout == 0.0:
            return x
        row = row_hash(self.seed, self._step, stream, samples_T, positions_T)
        keep = keep_mask(row, x.shape[-1], self.lora.dropout)
        return x * keep / (1.0 - self.lora.dropout)

    # -- running

    def set_pass(self, step: int, train: bool) -> None:
        """Which dropout masks apply."""
        self._step, self._train = step, train

    def run(
        self,
        rows: Sequence[Row],
        *,
        step: int = 0,
        train: bool = True,
        forced_ids: ExpertIds | None = None,
        divisor: int | None = None,
    ) -> ReferenceResult:
        """Loss, logits and gradients of these rows.

        Args:
            train: dropout on (when p > 0).
            forced_ids: experts to use instead of the router's choice (layer -> sample -> [length, K]).
            divisor: of the loss; None = trained tokens of these rows.
        """
        self.set_pass(step, train)
        self._result = ReferenceResult([], 0.0, {})
        divisor = divisor or max(loss_tokens(rows), 1)
        for tensor in self.parameters.values():
            tensor.grad = None
        with self._forcing(forced_ids):
            for row in rows:
                self._sample = row.sample
                logits = self.model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0].float()
                targets = torch.tensor(row.labels[1:])
                loss = torch.nn.functional.cross_entropy(
                    logits[:-1], targets, ignore_index=IGNORE, reduction="sum"
                )
                if loss.requires_grad:
                    (loss / divisor).backward()
                self._result.loss += float(loss.detach()) / divisor
                self._result.logits.append(logits.detach())
        self._result.grads = {
            name: torch.zeros_like(t) if t.grad is None else t.grad.clone()
            for name, t in self.parameters.items()
        }
        return self._result

    @contextlib.contextmanager
    def _forcing(self, forced: ExpertIds | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for layer, by_sample in (forced or {}).items():
                router = find_router(self.layers[layer])
                first = next(iter(by_sample.values()))
                count = self.experts[layer].gate_up_proj.shape[0]
                ids = lambda by_sample=by_sample: by_sample[self._sample]  # noqa: E731
                stack.enter_context(forced_routing(router, count, first.shape[1], ids))
            yield


def _linear(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    """One expert's projection in the module's own layout, with its bias."""
    weight = getattr(module, name)[expert].to(x.dtype)
    y = x @ (weight if module.is_transposed else weight.T)
    return y + getattr(module, name + "_bias")[expert].to(x.dtype) if module.has_bias else y


def _halves(module: Any, both: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up out of one projection's outputs."""
    if module.is_concatenated:
        gate, up = both.chunk(2, dim=-1)
        return gate, up
    return both[..., ::2], both[..., 1::2]


def _joined(module: Any, gate: Tensor, up: Tensor) -> Tensor:
    """The inverse of `_halves`."""
    if module.is_concatenated:
        return torch.cat((gate, up), dim=-1)
    return torch.stack((gate, up), dim=-1).flatten(-2)
