"""The adapter of a run, loaded by PEFT onto the full Hugging Face model, gives the run's own logits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.runs.prepare import prepare
from kt_ray.runs.saving import write_adapter
from kt_ray.runs.start_cluster import make_cluster
from kt_ray.train.trainer import Trainer
from tests.helpers.composing import compose
from tests.helpers.hf_reference import Row, build_checkpoint, random_rows
from tests.helpers.runs import by_row, one_pass, waves_of

VOCAB = 320
# Family -> what must be trained, by a part of the parameter's name: PEFT drops silently what it cannot place.
PARTS = {
    "deepseek_v3": ("q_b_proj", "layers.0.mlp.gate_proj", "shared_experts.up_proj", "experts.7.down_proj"),
    "qwen3_moe": ("k_proj", "layers.1.mlp.up_proj", "experts.7.down_proj"),
    "mixtral": ("o_proj", "experts.7.w1", "experts.7.w2", "experts.7.w3"),
}
LAYOUTS = ("rule=cpu_1worker_1socket", "rule=cpu_2workers_2sockets lora.rslora=true lora.dropout=0.1")


def _run(path: Path, root: Path, rows: list[Row], extra: str) -> tuple[Path, dict[int, Tensor]]:
    """Six steps at a high rate; returns the adapter's directory and logits by sample."""
    config = compose(
        f"model.path={path} data=demo data.limit=32 cluster=local model.dtype=float32 trainer.max_steps=6 "
        f"trainer.eval_every=0 optim.lr=0.02 optim.warmup=0 lora.rank=4 lora.alpha=8 run.root={root} "
        f"rule.worker_threads=1 trainer.micro_batch_size=4 {extra}".split()
    )
    prepared = prepare(config)
    cluster = make_cluster(prepared, "adapter")
    try:
        cluster.start()
        trainer = Trainer(config, cluster, prepared.batches)
        losses = trainer.run().losses
        assert len(losses) == 6 and losses[-1] < losses[0]
        adapter = write_adapter(prepared, root / "adapter", cluster)
        waves = waves_of(rows, config, cluster.plan)
        report = cluster.run_pass(one_pass(cluster, waves, "eval", number=100, logits=True))
        ends = [w for w, p in zip(report.workers, cluster.plan.workers, strict=True) if w.logits]
        return adapter, by_row(ends[-1].logits, waves[0])
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("extra", LAYOUTS, ids=["plain", "2 stages, 2 sockets, rsLoRA, dropout"])
@pytest.mark.parametrize("family", PARTS)
def test_peft_gives_the_logits_of_the_run(tmp_path: Path, family: str, extra: str) -> None:
    path = build_checkpoint(tmp_path, family, vocab_size=VOCAB, residual_scale=0.4)
    train_tokenizer(persona_path(), VOCAB).save_pretrained(path)
    rows = random_rows(4, vocab=VOCAB, lengths=(19, 5, 31, 12))
    adapter, expected = _run(path, tmp_path, rows, extra)

    tensors = load_file(adapter / "adapter_model.safetensors")
    for part in PARTS[family]:
        own = [t for name, t in tensors.items() if part in name and "lora_B" in name]
        assert own and all(bool(t.any()) for t in own), f"{part} was not trained"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(path)

    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = [torch.tensor([row.ids]) for row in rows]
    with torch.no_grad():
        before = [base(ids).logits[0] for ids in inputs]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PEFT warns of keys that it leaves out
            # Not of these: docs/adapter.md says why.
            warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
            model = PeftModel.from_pretrained(base, adapter).eval()
        after = [model(ids).logits[0] for ids in inputs]
    moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
    assert moved > 0.1, "the adapter must matter, or the comparison says nothing"
    for row, logits in zip(rows, after, strict=True):
        assert float((logits - expected[row.sample]).abs().max()) <= 1e-4
