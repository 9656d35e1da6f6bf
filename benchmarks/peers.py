"""The same fine-tuning step as kt_ray's, by Hugging Face transformers and PEFT alone, in one process.

    hf           the experts are frozen and have no LoRA; transformers' grouped_mm computes them
    peft         LoRA on the experts by PEFT's target_parameters: W + B A is made anew in every forward
    hf_factored  LoRA on the experts as x A' B' beside the frozen product, in torch: what a careful user
                 would write, and the one whose losses must be kt_ray's

    X_ckpt       any of them with gradient checkpointing of every decoder layer

All put PEFT's LoRA on the linear modules that `lora.target_modules=auto` means. Rows, batches,
learning rates, clipping and AdamW are kt_ray's own.

Shapes: T tokens, K experts per token, E experts, S = T K slots, H hidden, I intermediate, r rank.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.batch import MicroBatch
from kt_ray.config.schema import Config
from kt_ray.data import Batches, load_data
from kt_ray.model.lora import init_lora_a, is_gate
from kt_ray.optim.optimizers import learning_rate

PEERS = ("hf", "peft", "hf_factored")


class Peer:
    """A model and its optimizer.

    Args:
        impl: one of PEERS, or that with "_ckpt".
        config: the run's configuration, the same as kt_ray's.
        model_dir: Hugging Face directory; everything is computed in its dtype, LoRA in float32.
        total_steps: length of the learning-rate schedule.
    """

    def __init__(self, impl: str, config: Config, model_dir: str, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        data = load_data(config, model_dir, config.seed)
        trainer = config.trainer
        self.batches = Batches(
            data.train,
            trainer.batch_size,
            config.micro_batch_rows(1),
            shuffle=config.data.shuffle,
            seed=config.seed,
            pad_id=data.pad_id,
        )
        self.model = load_peer(impl, config, model_dir)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def step(self, index: int) -> dict[str, float]:
        """Optimizer step `index` (0-based): seconds, tokens, loss (token mean), and seconds by term."""
        start = time.perf_counter()
        micro = self.batches.waves(index)[0][0][0]
        divisor = sum(mb.loss_tokens for mb in micro)
        loss = forward = backward = 0.0
        for batch in micro:
            begun = time.perf_counter()
            part = self._loss(batch, divisor)
            between = time.perf_counter()
            part.backward()
            loss += float(part.detach())
            forward += between - begun
            backward += time.perf_counter() - between
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.optim.max_grad_norm or math.inf))
        begun = time.perf_counter()
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.config.optim, index, self.total_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        now = time.perf_counter()
        return {
            "seconds": now - start,
            "tokens": float(sum(mb.tokens for mb in micro)),
            "loss": loss,
            "grad_norm": norm,
            "seconds_forward": forward,
            "seconds_backward": backward,
            "seconds_optimizer": now - begun,
        }

    def _loss(self, batch: MicroBatch, divisor: int) -> Tensor:
        """Sum of a micro-batch's token losses / trained tokens of the step, as transformers computes it."""
        width = batch.input_ids.shape[1]
        mask_BS = torch.arange(width)[None, :] < torch.from_numpy(batch.lengths)[:, None]
        out = self.model(
            input_ids=torch.from_numpy(batch.input_ids),
            attention_mask=mask_BS.long(),
            labels=torch.from_numpy(batch.labels),
            num_items_in_batch=divisor,
            use_cache=False,
        )
        return out.loss


def load_peer(impl: str, config: Config, model_dir: str) -> nn.Module:
    """The model in training mode with its LoRA (float32), everything else frozen."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    checkpointing, impl = impl.endswith("_ckpt"), impl.removesuffix("_ckpt")
    if impl not in PEERS:
        raise ValueError(f"impl {impl!r} is not one of {PEERS}")
    if config.lora.dropout or config.lora.rslora:
        raise ValueError("PEFT's target_parameters know no dropout: lora.dropout=0 and lora.rslora=false")
    ALL_EXPERTS_FUNCTIONS.register("factored", factored_experts)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        trust_remote_code=False,
        dtype="auto",
        attn_implementation=config.model.attn_implementation,
        experts_implementation="factored" if impl == "hf_factored" else "grouped_mm",
    )
    model.requires_grad_(False)
    layers: nn.ModuleList = model.model.layers
    linears = [n for n, m in layers.named_modules() if isinstance(m, nn.Linear) and not is_gate(n)]
    experts = [(n, m) for n, m in layers.named_modules() if hasattr(m, "gate_up_proj")]
    # Given the whole model, PEFT takes gate_proj and up_proj of shared experts and dense layers for the
    # routed experts of transformers v4, and rewrites the targets. The layers alone have no config to go by.
    inject_adapter_in_model(
        LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,  # a float is fine, PEFT divides
            target_modules=linears,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            if impl == "peft"
            else None,
        ),
        layers,
    )
    _equal_start(layers, linears, config.seed)
    if impl == "hf_factored":
        for name, module in experts:
            module.kt_lora = FactoredLora(
                module, f"model.layers.{name}", config.lora.rank, config.lora.scale, config.seed
            )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@torch.no_grad()
def _equal_start(layers: nn.ModuleList, linears: list[str], seed: int) -> None:
    """Give the linear modules' adapters kt_ray's initial values; B is zero on both sides."""
    modules: dict[str, Any] = dict(layers.named_modules())
    for name in linears:
        a = modules[name].lora_A["default"].weight
        a.copy_(init_lora_a(seed, f"model.layers.{name}.lora_A.weight", tuple(a.shape)))


class FactoredLora(nn.Module):
    """LoRA of one layer's experts: A [E, r, in], B [E, out, r], float32; A of gate and up stacked."""

    def __init__(self, experts: Any, name: str, rank: int, scale: float, seed: int) -> None:
        super().__init__()
        self.scale, self.rank = scale, rank
        count, hidden, inner = experts.down_proj.shape

        def initial(projection: str, width: int) -> Tensor:
            names = [f"{name}.{e}.{projection}.lora_A.weight" for e in range(count)]
            return torch.stack([init_lora_a(seed, n, (rank, width)) for n in names])

        self.gate_up_a = nn.Parameter(
            torch.cat([initial("gate_proj", hidden), initial("up_proj", hidden)], 1)
        )
        self.gate_b = nn.Parameter(torch.zeros(count, inner, rank))
        self.up_b = nn.Parameter(torch.zeros(count, inner, rank))
        self.down_a = nn.Parameter(initial("down_proj", inner))
        self.down_b = nn.Parameter(torch.zeros(count, hidden, rank))


def _grouped(x_SN: Tensor, weight_EMN: Tensor, ends_E: Tensor) -> Tensor:
    """x W' with the weight of each row's expert; rows are sorted by expert."""
    return torch.nn.functional.grouped_mm(x_SN, weight_EMN.transpose(-2, -1), offs=ends_E)


def factored_experts(module: Any, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """transformers' experts interface: frozen experts by grouped products, LoRA as two thin ones beside."""
    lora: FactoredLora = module.kt_lora
    dtype, top_k = x_TH.dtype, ids_TK.shape[-1]
    sorted_S, order_S = ids_TK.reshape(-1).sort(stable=True)
    counts_E = torch.bincount(sorted_S, minlength=module.down_proj.shape[0])
    ends_E = counts_E.cumsum(0).to(torch.int32)
    x_SH = x_TH[order_S // top_k]
    low_gate, low_up = _grouped(x_SH.float(), lora.gate_up_a, ends_E).split(lora.rank, dim=-1)
    gate_SI, up_SI = _grouped(x_SH, module.gate_up_proj, ends_E).chunk(2, dim=-1)
    gate_SI = gate_SI + lora.scale * _grouped(low_gate.contiguous(), lora.gate_b, ends_E)
    up_SI = up_SI + lora.scale * _grouped(low_up.contiguous(), lora.up_b, ends_E)
    act_SI = torch.nn.functional.silu(gate_SI) * up_SI
    low_down = _grouped(act_SI, lora.down_a, ends_E)
    out_SH = _grouped(act_SI.to(dtype), module.down_proj, ends_E)
    out_SH = out_SH + lora.scale * _grouped(low_down, lora.down_b, ends_E)
    weighted_SH = out_SH * weights_TK.reshape(-1)[order_S, None]
    y_TH = torch.zeros(x_TH.shape, dtype=weighted_SH.dtype).index_add(0, order_S // top_k, weighted_SH)
    return y_TH.to(dtype)
