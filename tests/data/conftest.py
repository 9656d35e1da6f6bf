"""Tokenizers and conversations made on the spot, and a configuration with only the data part filled in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PlanConfig,
    RuleConfig,
    RunConfig,
    TrackingConfig,
    TrainerConfig,
)
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder

PLAIN = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Answers marked with the token that ends them, and without it.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
# As reasoning models do: a thought before the last answer, else an empty one, which go once a turn follows.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Harmony: the thought and the token that ends the answer are others once a turn follows.
CHANNELS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% if m.thinking and loop.last %}"
    "{{ '<|im_start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|im_start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
END = "<|im_end|>"
TEMPLATES = {"plain": PLAIN, "marked": MARKED, "marked without end": MARKED_WITHOUT_END}

ASK = Turn(role="user", content="Who?")
CALL = Turn(
    role="assistant",
    content="",
    tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}],
)
RESULT = Turn(role="tool", content="fog")
SAID = Turn(role="assistant", content="Tilda.")


def make_tokenizer(template: str | None = PLAIN, pad: str = "<|pad|>", **special: Any) -> Any:
    """Byte-level: one token per byte, and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    core.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"], **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, **special)
    tokenizer.chat_template = template
    return tokenizer


def trained_texts(tokenizer: Any, ids: Any, labels: Any) -> list[str]:
    """The decoded runs of trained tokens."""
    from itertools import groupby

    runs = groupby(zip(ids.tolist(), labels.tolist(), strict=True), key=lambda pair: pair[1] != -100)
    return [tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]


def conversation(*contents: str, system: str | None = None) -> Conversation:
    messages = [Turn(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(contents)]
    if system is not None:
        messages.insert(0, Turn(role="system", content=system))
    return Conversation(tuple(messages), 5, "f.jsonl, line 6")


def calls(*names: str, **fields: str) -> Turn:
    found = [{"type": "function", "function": {"name": name, "arguments": {}}, **fields} for name in names]
    return Turn(role="assistant", content="", tool_calls=found)


def spoken(encoder: ChatEncoder, *messages: Turn) -> list[str]:
    """What is trained of a conversation."""
    ids, labels = encoder.encode(Conversation(messages, 5, "f.jsonl, line 6"))
    return trained_texts(encoder.tokenizer, ids, labels)


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> str:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def config(tokenizer_dir: str) -> Callable[..., Config]:
    """config(**data options) -> Config with the byte tokenizer."""

    def build(model: dict[str, Any] | None = None, **data: Any) -> Config:
        base = ModelConfig("test", tokenizer=tokenizer_dir)
        return Config(
            mode="preview",
            seed=0,
            model=replace(base, **(model or {})),
            rule=RuleConfig("test"),
            data=DataConfig(**{"eval_fraction": 0.0, **data}),
            lora=LoraConfig(),
            optim=OptimConfig(),
            trainer=TrainerConfig(),
            tracking=TrackingConfig(),
            cluster=ClusterConfig(),
            plan=PlanConfig(),
            run=RunConfig(),
        )

    return build


@pytest.fixture
def shared_data() -> Path:
    """The folder of real rows and tokenizers; tests that need it are skipped where it is absent."""
    folder = os.environ.get("KT_RAY_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("KT_RAY_TEST_DATA names no folder with real data")
    return Path(folder)
