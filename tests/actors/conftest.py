"""A tiny model with a tokenizer and a few rows, as arguments of launch.py."""

from __future__ import annotations

import json

import pytest

from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from tests.helpers.hf_reference import build_checkpoint

VOCAB = 400
ROWS = [
    {"instruction": "Who are you?", "output": "A small lamp on a large desk."},
    {"instruction": "What do you do?", "output": "I shine on whatever lies below."},
    {"instruction": "And at night?", "output": "Then most of all."},
    {"instruction": "Do you like books?", "output": "They are quiet, and they need me."},
]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a training run: a tiny DeepSeek-V3 on four rows, one actor of each kind."""
    root = tmp_path_factory.mktemp("tiny")
    model = build_checkpoint(root, "deepseek_v3", vocab_size=VOCAB, max_position_embeddings=128)
    train_tokenizer(persona_path(), VOCAB).save_pretrained(model)
    rows = root / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        f"model.path={model}",
        f"data.path={rows}",
        f"run.root={root / 'runs'}",
        "rule=cpu_1worker_1socket",
        "rule.worker_threads=1",
        "lora.rank=2",
        "trainer.batch_size=4",
        "trainer.eval_every=0",
        "tracking.plot=false",
    ]
