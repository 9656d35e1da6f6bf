"""Pretrain a small DeepSeek-V3 from nothing: every parameter, plain torch, one process.

    python -m benchmarks.pretrain.train_base --tokenizer kt_ray/demo/assets/base --out DIR     the demo's base
    python -m benchmarks.pretrain.train_base --recipe nekoqa --tokenizer DIR --text a.txt b.jsonl --out DIR

This is how the model of `model=demo` was made, and a way to a base for LoRA where there is no pretrained
checkpoint to be had. AdamW with warm-up and cosine; the router's correction bias balances the experts'
load without an auxiliary loss (arXiv 2408.15664, as in DeepSeek-V3). The same files, seed, threads,
torch and CPU type give the same bytes. For LoRA on large models see launch.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pretrain.corpus import CORPUS
from benchmarks.pretrain.documents import Document, PackedText, encode, read_documents
from kt_ray.demo.recipes import BASE, Recipe, built
from kt_ray.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

RECORD = "pretrain.json"  # beside the weights: what made them

RECIPES: dict[str, Recipe] = {
    "demo": built(BASE),
    # 10 M parameters, 5 M at work per token, with a 6,400-token tokenizer: a base for docs/nekoqa.md.
    "nekoqa": Recipe(
        config={
            **built(BASE).config,
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "moe_intermediate_size": 128,
        },
        vocab=6400,
        head_std=0.02,
    ),
}


@dataclass(frozen=True)
class Course:
    """How long and how fast to train.

    Attributes:
        steps: optimizer steps.
        rows: packed rows per step.
        length: tokens per row.
        lr: peak learning rate; warm-up takes 5 % of the steps, then a cosine to 2 % of the peak.
        weight_decay: on matrices (not on norms).
        smoothing: share of every target that is spread over the whole vocabulary. A base that has read little
            is sure of what it has read: without this, a word that it has not read in this place costs
            more than a guess among all words would.
        balance: what a step adds to or takes from an expert's correction bias.
        held_out: share of the documents that only measure.
        seed: initial weights and order.
        threads: torch threads; other numbers round differently.
    """

    steps: int = 600
    rows: int = 16
    length: int = 128
    lr: float = 4e-3
    weight_decay: float = 0.1
    smoothing: float = 0.1
    balance: float = 1e-3
    held_out: float = 0.02
    seed: int = 0
    threads: int = 1

    def rate(self, step: int) -> float:
        """The learning rate of step 0..steps-1."""
        warmup = max(1, self.steps // 20)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def pretrain(
    recipe: Recipe,
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerFast,
    course: Course,
    out: Path,
    show: bool = True,
) -> dict[str, Any]:
    """Train from the recipe's initial weights and save checkpoint, tokenizer and record into `out`.

    Args:
        recipe: dimensions and initial scales.
        documents: what to learn.
        tokenizer: sets the vocabulary; its chat template renders conversations.
        course: length and rates.
        out: directory, made if absent.
        show: a progress line on stderr.

    Returns:
        What RECORD holds: the course, loss in nats per token (training and held out), tokens, SHA-256 sums.
    """
    import torch

    from kt_ray.demo.builder import new_model, save_model

    torch.set_num_threads(course.threads)
    held, known = _divide(documents, course.held_out)
    text = PackedText([encode(tokenizer, d) for d in known], course.length, course.seed)
    model = new_model(replace(recipe, bias_std=0.0), tokenizer, course.seed, torch.float32)
    model.train()
    loads = _count_loads(model)
    optimizer = torch.optim.AdamW(_groups(model, course), lr=course.lr, betas=(0.9, 0.95), eps=1e-8)
    started, smooth = time.monotonic(), 0.0
    for step in range(course.steps):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        loads.clear()
        ids, positions = text.take(course.rows)
        loss = _loss(model, ids, positions, course.smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _balance(loads, course.balance)
        smooth = loss.item() if step == 0 else 0.95 * smooth + 0.05 * loss.item()
        if show and ((step + 1) % 10 == 0 or step + 1 == course.steps):
            seconds = time.monotonic() - started
            rate = (step + 1) * course.rows * course.length / seconds
            line = (
                f"\rstep {step + 1}/{course.steps}  loss {smooth:.3f}  {rate:,.0f} tokens/s  {seconds:.0f} s"
            )
            print(line, end="", file=sys.stderr, flush=True)
    if show:
        print(file=sys.stderr)
    after = _measure(model, tokenizer, held, course) if held else None
    out.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, out)
    record = {
        "course": vars(course),
        "parameters": sum(p.numel() for p in model.parameters()),
        "documents": len(documents),
        "tokens_in_text": text.tokens,
        "tokens_trained": course.steps * course.rows * course.length,
        "loss": round(smooth, 4),
        "held_out_loss": None if after is None else round(after, 4),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "sha256": {name: sha256(out / name) for name in ("model.safetensors", "tokenizer.json")},
    }
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _divide(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """(held out, to train on): by a hash of the document, so that its neighbours do not matter."""
    held: list[Document] = []
    known: list[Document] = []
    for document in documents:
        digest = hashlib.sha256("\0".join(document.texts).encode()).digest()
        (held if int.from_bytes(digest[:4], "little") < share * 2**32 else known).append(document)
    if not known:
        raise UserError(
            "every document is held out",
            where="--text",
            observed=f"{len(documents)} documents",
            remedy="give more text",
        )
    return held, known


def _groups(model: torch.nn.Module, course: Course) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": course.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _loss(model: Any, ids: torch.Tensor, positions: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Mean negative log-likelihood in nats; the first token of a document is not predicted."""
    import torch

    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    targets = ids[:, 1:].masked_fill(positions[:, 1:] == 0, -100)
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets.flatten(), label_smoothing=smoothing
    )


def _measure(
    model: Any, tokenizer: PreTrainedTokenizerFast, held: Sequence[Document], course: Course
) -> float:
    """Mean loss per predicted token of held-out documents."""
    import torch

    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for document in held:
            ids = torch.tensor([encode(tokenizer, document)[: course.length]])
            total += float(_loss(model, ids, torch.arange(ids.shape[1])[None])) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    model.train()
    return total / count


def _count_loads(model: torch.nn.Module) -> dict[Any, torch.Tensor]:
    """Router -> tokens per expert of the last forward, filled by hooks."""
    loads: dict[Any, torch.Tensor] = {}

    def note(gate: Any, _inputs: Any, output: Any) -> None:
        loads[gate] = output[2].flatten().bincount(minlength=gate.num_experts)

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(note)
    return loads


def _balance(loads: dict[Any, torch.Tensor], rate: float) -> None:
    """Raise the correction bias of experts with less than the mean load, lower that of the others."""
    for gate, counts in loads.items():
        load = counts.float()
        gate.e_score_correction_bias += rate * (load.mean() - load).sign()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; prints the record. Returns the exit status."""
    defaults = Course()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretrain.train_base", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="demo", help="dimensions (demo)")
    parser.add_argument("--text", nargs="+", default=[CORPUS], help="text, jsonl, json (demo's corpus)")
    parser.add_argument("--tokenizer", help="its directory (default: a BPE learned from the text)")
    parser.add_argument("--steps", type=int, default=defaults.steps, help=f"({defaults.steps})")
    parser.add_argument("--rows", type=int, default=defaults.rows, help=f"rows per step ({defaults.rows})")
    parser.add_argument("--length", type=int, default=defaults.length, help=f"tokens ({defaults.length})")
    parser.add_argument("--lr", type=float, default=defaults.lr, help=f"peak rate ({defaults.lr})")
    parser.add_argument("--seed", type=int, default=defaults.seed, help=f"({defaults.seed})")
    parser.add_argument("--threads", type=int, default=defaults.threads, help=f"({defaults.threads})")
    parser.add_argument("--out", required=True, type=Path, help="directory for the checkpoint")
    given = parser.parse_args(arguments)
    names = ("steps", "rows", "length", "lr", "seed", "threads")
    course = replace(defaults, **{name: getattr(given, name) for name in names})
    try:
        _check(course)
        documents = read_documents(given.text)
        recipe = RECIPES[given.recipe]
        record = pretrain(
            recipe, documents, _tokenizer(given.tokenizer, documents, recipe), course, given.out
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(record, indent=1))
    return 0


def _check(course: Course) -> None:
    for name, least in (("steps", 1), ("rows", 1), ("length", 2), ("threads", 1)):
        if getattr(course, name) < least:
            raise UserError(
                "a number is too small",
                where=f"--{name}",
                observed=getattr(course, name),
                required=f"at least {least}",
                remedy="give a larger number",
            )


def _tokenizer(directory: str | None, documents: Sequence[Document], recipe: Recipe) -> Any:
    if directory is None:
        from kt_ray.demo.tokenizer import learn_tokenizer

        return learn_tokenizer((t for d in documents for t in d.texts), recipe.vocab, "--text")
    from kt_ray.data.tokenizer_files import load_tokenizer

    return load_tokenizer(directory, "--tokenizer")


if __name__ == "__main__":
    sys.exit(main())
