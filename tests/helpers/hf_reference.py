"""Tiny random checkpoints of real families, and what plain Hugging Face + factored LoRA makes of them.

Nothing here goes through kt_ray's layer loop, its hook, or PEFT: the reference runs the family's own
forward, row by row and without padding, with experts looped in torch and adapters added by hand. Only
the definitions that both sides must share are imported: the LoRA initialisation and the dropout mask.

    path = build_checkpoint(tmp_path, "deepseek_v3", expert_dtype=torch.bfloat16)
    reference = Reference(path, LoraConfig(rank=4), seed=0)
    reference.randomize_b(1)                        # B starts at zero: its gradient alone would be tested
    result = reference.run(rows, step=0)            # rows: list of Row
    result.logits, result.loss, result.grads, result.expert_ids
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from kt_ray.batch import IGNORE, MicroBatch
from kt_ray.config.schema import LoraConfig
from kt_ray.model.dropout import expert_stream, keep_mask, module_stream, row_hash
from kt_ray.model.lora import init_lora_a, is_gate

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# Each family's shape: 8 experts (one dense layer first where the family has such), all dimensions apart.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
    },
    "deepseek_v2": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
    },
    "qwen3_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "mixtral": {
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "olmoe": {
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm4_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "granitemoe": {
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.2,
    },
}


def build_checkpoint(
    root: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    expert_dtype: torch.dtype | None = None,
    seed: int = 0,
    residual_scale: float = 1.0,
    **overrides: Any,
) -> Path:
    """A random model of a family under `root/<family>`, as `save_pretrained` writes it.

    Args:
        dtype: of everything.
        expert_dtype: of the routed experts, when another one (torch.bfloat16).
        residual_scale: factor on what writes into the residual stream (o_proj, down_proj), as GPT-2's
            initialisation has it: with 1 every layer doubles the stream and rounding errors compound.
        overrides: config values.
    """
    config = AutoConfig.for_model(family, **{**_SMALL, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name and tensor.dim() == 1:
                tensor.copy_(1.0 + 0.1 * torch.randn_like(tensor))
            else:  # wide enough for distinct routing and gradients of order one
                tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
                if "o_proj" in name or "down_proj" in name:
                    tensor.mul_(residual_scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
    path = root / family
    model.to(dtype).save_pretrained(path)
    if expert_dtype is not None:
        _retype_experts(path, expert_dtype)
    return path


def _retype_experts(path: Path, dtype: torch.dtype) -> None:
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as reader:
            metadata, tensors = reader.metadata(), {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
        for key, value in tensors.items():
            if ".experts." in key:
                tensors[key] = value.to(dtype)
        save_file(tensors, file, metadata=metadata)


@dataclass(frozen=True)
class Row:
    """One sample: token ids, labels (IGNORE where not trained), index in its data set."""

    ids: list[int]
    labels: list[int]
    sample: int


def random_rows(
    count: int, vocab: int = 96, seed: int = 0, lengths: Sequence[int] = (9, 5, 12, 7)
) -> list[Row]:
    """Rows of unequal lengths; the first two tokens of each are not trained."""
    rng = np.random.default_rng(seed)
    rows = []
    for sample in range(count):
        ids = rng.integers(3, vocab, lengths[sample % len(lengths)]).tolist()
        rows.append(Row(ids, [IGNORE, IGNORE, *ids[2:]], sample + 100))
    return rows


def micro_batch(rows: Sequence[Row], pad: int = 0) -> MicroBatch:
    """Rows as one right-padded micro-batch."""
    width = max(len(row.ids) for row in rows)
    return MicroBatch(
        input_ids=np.array([row.ids + [pad] * (width - len(row.ids)) for row in rows], dtype=np.int64),
        labels=np.array([row.labels + [IGNORE] * (width - len(row.labels)) for row in rows], dtype=np.int64),
        lengths=np.array([len(row.ids) for row in rows], dtype=np.int64),
        sample_ids=np.array([row.sample for row in rows], dtype=np.int64),
    )


def loss_tokens(rows: Sequence[Row]) -> int:
    """Trained tokens after the shift."""
    return sum(label != IGNORE for row in rows for label in row.labels[1:])


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


@contextlib.contextmanager
def forced_routing(
    router: nn.Module, num_experts: int, top_k: int, ids: Callable[[], Tensor]
) -> Iterator[None]:
    """Make a router's final top-k choose given experts; it computes their weights itself.

    Families choose by `torch.topk` over [N, E] scores with k = top_k; group choices have other shapes.
    Each forward of the router within the context takes `ids()`: int64 [N, K].
    """
    original, topk = router.forward, torch.topk

    def forced(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted = ids()

        def patched(scores: Tensor, k: int, *a: Any, **kw: Any) -> Any:
            if scores.dim() == 2 and scores.shape[-1] == num_experts and k == top_k:
                return torch.return_types.topk((scores.gather(1, wanted), wanted))
            return topk(scores, k, *a, **kw)

        with mock.patch("torch.topk", patched):
            return original(x, *args, **kwargs)

    router.forward = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del router.forward


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
                path, dtype=dtype, experts_implementation="eager", attn_implementation="eager", **load
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
        self.names = _checkpoint_expert_names(path)
        for index, layer in enumerate(self.layers):
            self._adapt(index, layer)

    # -- construction

    def _adapt(self, index: int, layer: nn.Module) -> None:
        for name, module in list(layer.named_modules()):
            full = f"model.layers.{index}.{name}"
            if hasattr(module, "is_concatenated") and hasattr(module, "gate_up_proj"):
                self._adapt_experts(index, module)
            elif isinstance(module, nn.Linear) and self._is_target(full):
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

        def forward(x: Tensor) -> Tensor:
            low = torch.nn.functional.linear(self._drop(x.float(), module_stream(name)), self._p(name, "A"))
            return (base(x) + self.lora.scale * torch.nn.functional.linear(low, self._p(name, "B"))).to(
                x.dtype
            )

        module.forward = forward  # type: ignore[method-assign]

    def _adapt_experts(self, index: int, module: nn.Module) -> None:
        self.experts[index] = module
        hidden, inner = module.down_proj.shape[1], module.down_proj.shape[2]
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
        return self.experts_output(layer, x_TH, ids_TK, weights_TK, samples_T, positions_T)

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
            gate_w, up_w = module.gate_up_proj[expert].to(x.dtype).chunk(2, dim=0)
            down_w = module.down_proj[expert].to(x.dtype)

            def lora(
                value: Tensor, projection: str, expert: int = expert, token: Tensor = token
            ) -> Tensor | float:
                if not self.lora.experts:
                    return 0.0
                prefix = self.names[layer][projection].format(expert)
                stream = expert_stream(layer, expert, projection)
                dropped = self._mask(value.float(), stream, samples_T[token], positions_T[token])
                return scale * (dropped @ self._p(prefix, "A").T @ self._p(prefix, "B").T)

            gate = x @ gate_w.T + lora(x, "gate")
            up = x @ up_w.T + lora(x, "up")
            act = torch.nn.functional.silu(gate) * up
            out = act @ down_w.T + lora(act, "down")
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
                count = self.experts[layer].down_proj.shape[0]
                ids = lambda by_sample=by_sample: by_sample[self._sample]  # noqa: E731
                stack.enter_context(forced_routing(router, count, first.shape[1], ids))
            yield


def find_router(layer: nn.Module) -> nn.Module:
    """The router module of a decoder layer."""
    for name, module in layer.named_modules():
        if name.rsplit(".", 1)[-1] in ("gate", "router"):
            return module
    raise ValueError("this layer has no router")


def _checkpoint_expert_names(path: Path) -> dict[int, dict[str, str]]:
    """Layer -> projection -> the checkpoint's own name, {} for the expert."""
    config = json.loads((path / "config.json").read_text())
    mixtral = config["model_type"] == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    projections = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    return {
        layer: {
            kind: f"model.layers.{layer}.{block}.experts.{{}}.{projection}"
            for kind, projection in zip(("gate", "up", "down"), projections, strict=True)
        }
        for layer in range(config["num_hidden_layers"])
    }
