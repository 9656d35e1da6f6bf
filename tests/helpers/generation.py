"""Generation in tests: random prompts, kt_ray's answers, and Hugging Face's `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kt_ray.actors.cluster import ActorCluster
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling
from kt_ray.model.family import read_family


def random_prompts(lengths: Sequence[int], vocab: int = 96, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of these lengths without special tokens."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, vocab, length).tolist()) for length in lengths]


def hugging_face(
    path: Path, prompts: Sequence[Sequence[int]], *, attention: str = "sdpa", **settings: Any
) -> list[list[int]]:
    """New tokens of each prompt alone, by transformers' `generate` (greedy unless told otherwise)."""
    model = (
        getattr(transformers, read_family(path).auto)
        .from_pretrained(
            path,
            trust_remote_code=False,
            dtype=torch.float32,
            experts_implementation="eager",
            attn_implementation=attention,
        )
        .eval()
    )
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{"do_sample": False, "pad_token_id": 0, **settings},
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def answers(
    cluster: ActorCluster,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    *,
    adapter: bool = True,
    **options: Any,
) -> list[list[int]]:
    """New tokens of each prompt, all handed in at once."""
    with Generator(cluster, **options) as generator:
        asked = [generator.submit(Request(prompt, sampling, adapter)) for prompt in prompts]
        return [answer.result(120).tokens for answer in asked]


def replicas_answers(cluster: ActorCluster, rows: int, *, joined: bool) -> tuple[list[Any], int]:
    """Tokens and log-probabilities of so many rows, whose answers end one by one; an actor's engine calls."""
    asked = [
        Request(prompt, Sampling(max_new_tokens=4 + n // 2, temperature=1.0, seed=n, logprobs=0))
        for n, prompt in enumerate(random_prompts([3 + n % 9 for n in range(rows)]))
    ]
    with Generator(cluster, max_rows=64, joined=joined) as generator:
        got = [answer.result(120) for answer in generator.submit_all(asked)]
    calls = next(report.steps for report in generator.reports if "engine" in report.seconds)
    return [(answer.tokens, [token.logprob for token in answer.logprobs]) for answer in got], calls


def one_rounding(gaps: np.ndarray) -> bool:
    """Whether most of the distances between log-probabilities in bfloat16 are nothing: a sum in another order
    moves few of them, by one bit of a logit."""
    return bool((gaps > 1e-3).mean() <= 1 / 3 and gaps.max() < 5e-2)
