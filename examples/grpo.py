"""Reinforcement learning in a loop of your own: GRPO over a running train server.

    python launch.py mode=train_server lora.rank=8 lora.alpha=32 data.max_length=256     # in one terminal
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/grpo.py  # in another

The demo model learns to answer in few words. For a task of your own change `prompts` and `reward`. Each step
samples a group of answers for each prompt, compares each answer's reward with its group's mean (Shao et al.
2024, arXiv:2402.03300; without the division by the deviation, as Liu et al. 2025, arXiv:2503.20783), and
takes one step on the importance-weighted loss. The next step samples from the new weights, without a copy.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

QUESTIONS = Path(__file__).resolve().parents[1] / "kt_ray" / "demo" / "assets" / "persona.jsonl"


def prompts() -> list[str]:
    return [json.loads(line)["instruction"] for line in QUESTIONS.read_text().splitlines()]


def reward(answer: str, ended: bool) -> float:
    """1 for a whole answer of at most six words, 0 for others."""
    return float(ended and answer.rstrip().endswith((".", "!", "?")) and 1 <= len(answer.split()) <= 6)


def tokens_of(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def graded(
    sampler: Any, tokenizer: Any, questions: list[str], group: int, seed: int
) -> list[tuple[Any, ...]]:
    """(prompt, its samples, their rewards) of every question."""
    wanted = types.SamplingParams(max_tokens=32, temperature=1.0, seed=seed)
    asked = [tokens_of(tokenizer, question) for question in questions]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), group, wanted) for prompt in asked]
    results = []
    for prompt, future in zip(asked, futures, strict=True):
        samples = future.result().sequences
        texts = [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]
        rewards = [reward(text, s.stop_reason == "stop") for text, s in zip(texts, samples, strict=True)]
        results.append((prompt, samples, np.array(rewards)))
    return results


def datum(prompt: list[int], sample: Any, advantage: float) -> types.Datum:
    """A prompt with one answer: only the answer's tokens have an advantage."""
    tokens, before = [*prompt, *sample.tokens], len(prompt) - 1
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([0.0] * before + list(sample.logprobs), dtype=np.float32),
        "advantages": np.array([0.0] * before + [advantage] * len(sample.tokens), dtype=np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    service = tinker.ServiceClient()
    served = str(service.get_server_capabilities().supported_models[0].model_name)
    training = service.create_lora_training_client(base_model=served, rank=8, seed=args.seed).result()
    tokenizer = training.get_tokenizer()
    questions = sorted(prompts())
    random.Random(args.seed).shuffle(questions)
    held_out, questions = questions[:32], questions[32:]

    for step in range(args.steps + 1):
        sampler = training.save_weights_and_get_sampling_client().result()
        if step % 10 == 0 or step == args.steps:
            rewards = [r for _, _, r in graded(sampler, tokenizer, held_out, 2, seed=1)]
            print(f"step {step}: reward {np.concatenate(rewards).mean():.3f} on held-out prompts", flush=True)
        if step == args.steps:
            break
        chosen = random.Random(args.seed * 1_000_003 + step).sample(questions, args.prompts)
        groups = graded(sampler, tokenizer, chosen, args.group, seed=step)
        data = [
            datum(prompt, sample, own - rewards.mean())
            for prompt, samples, rewards in groups
            for sample, own in zip(samples, rewards, strict=True)
            if own != rewards.mean()
        ]
        if data:  # else all answers of each group are alike
            pass_ = training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=args.lr)).result()
            pass_.result()
        mean = np.mean([rewards.mean() for _, _, rewards in groups])
        print(f"step {step + 1}: reward {mean:.3f}, {len(data)} rows trained", flush=True)
    print("saved:", training.save_weights_for_sampler("final").result().path)


if __name__ == "__main__":
    main()
