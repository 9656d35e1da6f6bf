"""NekoQA with a base model of our own: split, text for the base, answers to score.

    python benchmarks/nekoqa.py prepare --data ALPACA --prompts NEKOBENCH --out WORK
    python benchmarks/nekoqa.py answer --base DIR [--adapter DIR] --data WORK/eval.json --out answers.jsonl

`prepare` holds a tenth of the prompts out with all their rows. The base's text is the training split's
questions with plain neutral replies, NekoBench's prompts (it has no answers), and Chinese written for this
purpose (nekoqa_text.yaml): no answer of the data set, and nothing of the held-out rows. docs/nekoqa.md has
the commands in order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HELD_OUT = 0.1
SEED = 0
STORIES = 2200


def prepare(data: Path, prompts: Path, out: Path) -> dict[str, int]:
    """Write train.json, eval.json (rows of `data` as they are) and base.jsonl; their numbers of rows."""
    rows: list[dict[str, str]] = json.loads(data.read_text(encoding="utf-8"))
    order = sorted({_prompt(row) for row in rows}, key=lambda p: hashlib.sha256(p.encode()).digest())
    held = set(order[: round(HELD_OUT * len(order))])
    chosen = {
        "train": [row for row in rows if _prompt(row) not in held],
        "eval": [row for row in rows if _prompt(row) in held],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, part in chosen.items():
        (out / f"{name}.json").write_text(json.dumps(part, ensure_ascii=False, indent=1), encoding="utf-8")
    others = [row["question"].strip() for row in json.loads(prompts.read_text(encoding="utf-8"))]
    text = base_text([_prompt(row) for row in chosen["train"]], [p for p in others if p not in held])
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in text]
    (out / "base.jsonl").write_text("".join(lines), encoding="utf-8")
    return {**{name: len(part) for name, part in chosen.items()}, "base": len(text)}


def _prompt(row: dict[str, str]) -> str:
    return "\n".join(filter(None, (row["instruction"].strip(), row["input"].strip())))


def base_text(questions: Sequence[str], prompts: Sequence[str]) -> list[dict[str, str]]:
    """The base's rows, {"text"} and alpaca, in an order that is always the same.

    Args:
        questions: of the training split; they get neutral replies.
        prompts: of NekoBench, which has no answers; they are plain text.
    """
    import yaml

    parts: dict[str, Any] = yaml.safe_load(
        Path(__file__).with_name("nekoqa_text.yaml").read_text(encoding="utf-8")
    )
    rng = random.Random(SEED)
    rows = [*_replies(parts["replies"], questions), *_facts(parts["facts"]), *_sums(parts["sums"])]
    rows += [{"text": prompt} for prompt in prompts]
    rows += _stories(parts["stories"], rng)
    unique = list({json.dumps(row): row for row in rows}.values())
    rng.shuffle(unique)
    return unique


def _replies(replies: Sequence[Any], questions: Sequence[str]) -> Iterator[dict[str, str]]:
    for question in questions:
        answers = next(answers for word, answers in replies if word in question)
        yield {"text": question}
        for answer in answers:
            yield _ask(question, answer)


def _facts(facts: Sequence[str]) -> Iterator[dict[str, str]]:
    for line in facts:
        question, answer = (cell.strip() for cell in line.split("|"))
        yield {"text": answer}
        for form in ("{}", "请问，{}", "请回答：{}", "你知道吗？{}"):
            yield _ask(form.format(question), answer)


def _sums(numbers: Sequence[str]) -> Iterator[dict[str, str]]:
    for a in range(1, 10):
        for b in range(1, 10):
            yield _ask(
                f"{numbers[a]}加{numbers[b]}等于多少？", f"{numbers[a]}加{numbers[b]}等于{numbers[a + b]}。"
            )


def _stories(parts: dict[str, list[str]], rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(STORIES):
        one, two = rng.sample(parts["people"], 2)
        time, goes, scene, event, act, end = (
            rng.choice(parts[k]) for k in ("times", "goes", "scene", "events", "acts", "ends")
        )
        who = rng.choice((one, two, f"{one}和{two}"))
        text = (
            rng.choice((f"{time}，{one}{goes}。", f"{one}{time}{goes}。"))
            + f"{scene}{event}{who}{act}。{end}"
        )
        kind = rng.randrange(8)
        if kind == 0:
            yield _ask(rng.choice(("请讲一个短故事。", f"讲一个关于{one}的故事。")), text)
        elif kind == 1:
            yield _ask(f"{one}{time}做了什么？", f"{one}{goes}。")
        else:
            yield {"text": text}


def _ask(question: str, answer: str) -> dict[str, str]:
    return {"instruction": question, "input": "", "output": answer}


def answer(base: str, adapter: str | None, data: Path, out: Path, tokens: int) -> int:
    """Greedy answers of transformers, with PEFT's adapter if there is one, to the prompts of `data`.

    Writes {"id", "prompt", "predict", "label"} per line, as mode=predict does; returns their number.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.eval()
    rows = json.loads(data.read_text(encoding="utf-8"))
    with torch.no_grad(), out.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            chat = [{"role": "user", "content": _prompt(row)}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            said = model.generate(
                input_ids=prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            predicted = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            record = {"id": number, "prompt": _prompt(row), "predict": predicted, "label": row["output"]}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return len(rows)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/nekoqa.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("prepare", help="train.json, eval.json and base.jsonl")
    made.add_argument("--data", type=Path, required=True, help="neko_union_alpaca.json")
    made.add_argument("--prompts", type=Path, required=True, help="NekoBench_600_prompts.json")
    made.add_argument("--out", type=Path, required=True, help="directory for the three files")
    said = commands.add_parser("answer", help="greedy answers to the rows of a file")
    said.add_argument("--base", required=True, help="checkpoint directory")
    said.add_argument("--adapter", help="PEFT adapter directory of a run")
    said.add_argument("--data", type=Path, required=True, help="eval.json")
    said.add_argument("--out", type=Path, required=True, help="answers, one JSON object per line")
    said.add_argument("--tokens", type=int, default=160, help="at most, per answer (160)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    if given.command == "prepare":
        print(json.dumps(prepare(given.data, given.prompts, given.out)))
    else:
        print(answer(given.base, given.adapter, given.data, given.out, given.tokens), "answers")


if __name__ == "__main__":
    main()
