"""The README's first night, typed as a stranger would: how long each command takes, and is silent.

    python benchmarks/first_night.py --scratch DIR --json out.json

A checkpoint of DeepSeek-V3's architecture in small, in FP8 as released, with random weights (`tools random`),
and rows of the demo's data set. The commands are read from README.md, section "My model on my GPUs". The
overnight run saves every fourth step; in its middle all its processes are killed at once, as by a power cut,
and README's command goes on with it. Then the adapter answers in the terminal (README's last command) and in
mode=predict, and PEFT loads it on the same weights in BF16 (`tools convert`): its held-out loss must be the
run's. Exit code 1: something was not so.

`longest_silence_s` is the longest wait between two pieces of output, `silent_after` the last line before it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import psutil

SHAPE = (
    *("vocab_size=2048", "hidden_size=256", "intermediate_size=768", "moe_intermediate_size=128"),
    *("n_routed_experts=32", "q_lora_rank=128", "kv_lora_rank=128"),
    *("num_attention_heads=4", "num_key_value_heads=4"),
)
LAYERS = 5  # three of them dense, as in the release
SAVED = "trainer.save_every=4"  # steps: the rehearsal is over before the usual 30 minutes are
QUESTION = "Will there be a storm tonight?\n/exit\n"
RUN = Path("runs", "night")
# PEFT rounds W + BA to BF16 where kt_ray adds the adapter's part to the product.
LOSS_TOLERANCE = 0.002


def readme_commands(text: str, model: Path) -> tuple[list[list[str]], list[str]]:
    """The section's commands for a model's directory, and the one for after a power cut; without `python`.

    Args:
        text: of README.md.
    """
    section = text.partition("## My model on my GPUs")[2].partition("\n## ")[0]
    block = section.split("```")[1]
    lines = [re.sub(r"\bmodel=\S+", f"model.path={model}", line) for line in block.strip().splitlines()]
    after = re.search(r"power cut, `python ([^`]+)`", section)
    assert after, "README.md names no command for a power cut"
    return [shlex.split(line, comments=True)[1:] for line in lines], shlex.split(after[1])


class Command:
    """One command of the rehearsal, whose output is read as it comes."""

    def __init__(self, words: Sequence[str], folder: Path, typed: str = "") -> None:
        self.words, self.lines, self.code = list(words), [""], 0
        self._start = self._last = time.monotonic()
        self._longest, self._after = 0.0, ""
        program = [str(common.REPO / words[0]), *words[1:]] if words[0] == "launch.py" else words
        # What mode=doctor measures in a rehearsal is not for this machine's other plans.
        own = {"PYTHONPATH": str(common.REPO), "XDG_CACHE_HOME": str(folder / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, *program],
            cwd=folder,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self.process.stdin is not None
        self.process.stdin.write(typed)
        self.process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while piece := os.read(self.process.stdout.fileno(), 1 << 16):
            self._heard()
            first, *more = piece.decode(errors="replace").split("\n")
            self.lines[-1] += first
            self.lines += more
        self.process.stdout.close()

    def _heard(self) -> None:
        now = time.monotonic()
        if now - self._last > self._longest:
            said = [line for line in self.lines if line.strip()]
            self._longest, self._after = now - self._last, said[-1] if said else ""
        self._last = now

    def wait(self) -> dict[str, Any]:
        """The record of the command, once it has ended."""
        self.code = self.process.wait()
        self._reader.join(timeout=60)
        self._heard()
        record = {
            "impl": "kt_ray",
            "command": shlex.join(["python", *self.words]),
            "seconds": round(time.monotonic() - self._start, 1),
            "longest_silence_s": round(self._longest, 1),
            "silent_after": self._after[:120],
            "exit_code": self.code,
        }
        print(json.dumps(record), flush=True)
        return record

    def power_cut(self) -> None:
        """Kills the command and all that it started."""
        root = psutil.Process(self.process.pid)
        below = root.children(recursive=True)
        for process in [root, *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=5)  # the root's exit code is `wait`'s to take


def steps_done(run: Path) -> list[int]:
    """Steps with a recorded loss, in the order of the file."""
    file = run / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record["step"] for record in records if "loss" in record]


def overnight(words: Sequence[str], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The overnight run until its middle, where it is killed. Returns its record and what was wrong."""
    run = folder / RUN
    command = Command(words, folder)
    while command.process.poll() is None:
        time.sleep(0.1)
        total = next((int(m[1]) for line in command.lines if (m := re.match(r"(\d+) steps of ", line))), 0)
        done = steps_done(run)
        if total and done and done[-1] >= total / 2 and (run / "checkpoints" / "latest").exists():
            command.power_cut()
            record = command.wait()
            return {**record, "killed_after_step": done[-1], "steps": total}, []
    return command.wait(), ["the overnight run ended before it could be killed", *command.lines[-20:]]


def peft_losses(base: Path, adapter: Path, rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Mean loss per answered token of PEFT's model in BF16 on held-out rows: without the adapter, with it.

    Args:
        rows: lines of predictions.jsonl, whose prompt is as the model sees it.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, trust_remote_code=False)

    def mean_loss() -> float:
        total, count = 0.0, 0
        with torch.no_grad():
            for row in rows:
                prompt = row["prompt"]
                ids, start = (
                    tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
                    for text in (prompt + row["label"] + tokenizer.eos_token, prompt)
                )
                first = start.shape[1]
                logits = model(ids).logits[0, first - 1 : -1].float()
                total += float(torch.nn.functional.cross_entropy(logits, ids[0, first:], reduction="sum"))
                count += ids.shape[1] - first
        return total / count

    before = mean_loss()
    model = PeftModel.from_pretrained(model, adapter).eval()
    return before, mean_loss()


def rehearse(folder: Path, rows: int, more: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """All commands in order. Returns their records and what was not as it should be.

    Args:
        folder: an empty directory, where the stranger stands.
        rows: of the demo's data set.
        more: options added to every command that does not resume.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = (common.REPO / "kt_ray" / "demo" / "assets" / "persona.jsonl").read_text(encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(data.splitlines(keepends=True)[:rows]), encoding="utf-8")
    model, plain = Path("models", "DeepSeek-V3-small"), Path("models", "DeepSeek-V3-small-bf16")
    tools = ("-m", "kt_ray.tools")
    made = ("--model", "deepseek_v3", "--layers", str(LAYERS), "--format", "fp8", "--set", *SHAPE)
    subprocess.run(
        [sys.executable, *tools, "random", str(folder / model), *made], check=True, cwd=common.REPO
    )

    text = (common.REPO / "README.md").read_text(encoding="utf-8")
    (*looks, night, chat), resume = readme_commands(text, model)
    records = [Command([*words, *more], folder).wait() for words in looks]
    record, problems = overnight([*night, SAVED, *more], folder)
    records.append(record)
    if problems:
        return records, problems
    resumed, talk = Command(resume, folder), None
    records.append(resumed.wait())
    talk = Command(chat, folder, QUESTION)
    records.append(talk.wait())
    records.append(Command([*resume, "mode=predict"], folder).wait())
    records.append(Command([*tools, "convert", str(model), str(plain), "--to", "bf16"], folder).wait())

    problems += [
        f"exit code {r['exit_code']}: {r['command']}"
        for r in records
        if r["exit_code"] and "killed_after_step" not in r
    ]
    if problems:
        return records, [*problems, *resumed.lines[-20:], *talk.lines[-20:]]
    if (done := steps_done(folder / RUN)) != list(range(1, record["steps"] + 1)):
        problems.append(f"steps of the run: {done}")
    from_step = next(int(m[1]) for line in resumed.lines if (m := re.search(r"after step (\d+)$", line)))
    held_out = [
        json.loads(line) for line in (folder / RUN / "predictions.jsonl").read_text("utf-8").splitlines()
    ]
    begun = time.monotonic()
    before, after = peft_losses(folder / plain, folder / RUN / "adapter", held_out)
    metrics = [json.loads(line) for line in (folder / RUN / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [one["eval_loss"] for one in metrics if one.get("eval_loss") is not None]
    records.append(
        {
            "impl": "peft",
            "command": "PeftModel.from_pretrained",
            "seconds": round(time.monotonic() - begun, 1),
            "steps_repeated": record["killed_after_step"] - from_step,
            "held_out_rows": len(held_out),
            "held_out_loss": [losses[0], losses[-1]],
            "peft_held_out_loss": [before, after],
        }
    )
    if max(abs(before - losses[0]), abs(after - losses[-1])) > LOSS_TOLERANCE or after >= before:
        problems.append(f"PEFT's held-out losses {before}, {after}; the run's {losses[0]}, {losses[-1]}")
    return records, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="a new directory")
    parser.add_argument("--rows", type=int, default=100, help="rows of the data set, some of them held out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="options added to the README's commands")
    given = parser.parse_args()
    about = common.machine()
    records, problems = rehearse(given.scratch.resolve(), given.rows, given.overrides)
    if given.json:
        facts = {"model": f"deepseek_v3, {LAYERS} layers, fp8", "rows": given.rows}
        common.write_json(given.json, [{**one, **facts} for one in records], about)
    print("\n".join(problems) or f"as it should be: {sum(r['seconds'] for r in records):.0f} s in all")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
