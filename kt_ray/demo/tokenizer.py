"""The demo tokenizer: byte-level BPE trained on the demo data, so the project ships no vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kt_ray.demo.recipes import base_path
from kt_ray.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, IM_START, IM_END = "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, BOS, IM_START, IM_END)  # ids 0..3, in this order


def train_tokenizer(data: Path, vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab` tokens learned from the texts of an alpaca jsonl file.

    Deterministic: the same file gives the same merges. All 256 bytes are tokens, so any text encodes.
    """
    texts: list[str] = []
    for line in data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts += [row["instruction"], row["input"], row["output"]]
    return learn_tokenizer(texts, vocab, str(data))


def learn_tokenizer(texts: Iterable[str], vocab: int, source: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `vocab` tokens, with the demo's chat template.

    Raises:
        UserError: the texts (from `source`) hold too little for that many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(["system\nuser\nassistant\n", *texts], trainer)
    if core.get_vocab_size() != vocab:
        raise UserError(
            "the text is too little for the tokenizer",
            where=source,
            observed=f"{core.get_vocab_size()} tokens",
            required=f"{vocab} tokens",
            remedy="give more text, or a tokenizer",
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    # The base model's: {% generation %} marks what is trained, the answer and the token that ends it.
    tokenizer.chat_template = (base_path() / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer
