"""The train server as its clients see it: one training and several, beside another server of the same API.

    python benchmarks/train_server.py --json out.json
    python benchmarks/train_server.py --peer PYTHON --json out.json

PYTHON is the interpreter of an environment with skyrl-tx, whose server is started there as it is:
`pip install 'skyrl-tx[tinker]==0.3.0' jax flax optax tinker==0.14.0`. Each server is driven through the
released SDK of its environment, for no version speaks to both: 0.38 asks skyrl-tx for what it does not
answer, and 0.14 sends JSON, which kt_ray does not take.

Both load one checkpoint of random weights, a small Qwen3-MoE (SHAPE) in float32, and get LoRA of --rank with
alpha 32, which skyrl-tx does not let clients choose. Each of --trainings (each number is measured, by
servers started for it) loops in a thread of its own: forward_backward over the same --rows rows of --tokens
tokens, and optim_step. The servers take turns, round by round, there and back, and those whose turn it is
not are stopped. The first round is not counted. Records:

    median_s      of a step of all trainings: a round's seconds, as clients see them, / --steps
    tokens_per_s  of all trainings together
    first_s       the first step: skyrl-tx compiles in it
    losses        per token, of the first training's steps. B is zero at first, so all trainings of both
                  servers must begin with the same loss; first_difference: how far they are apart, relative.
                  Later ones differ: A begins elsewhere, and skyrl-tx divides the experts' rank by how many
                  they are
    ratio         by how much kt_ray has more tokens/s with as many trainings
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from child import Child, ChildError

sys.path.insert(0, str(common.REPO))

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
ALPHA = 32
CLOSE = 1e-5  # first losses: rounding of float32


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    about = common.quiet_machine(args.wait_quiet)
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch, "model"), args.layers)
        for trainings in args.trainings:
            found = measured(model, trainings, Path(scratch, str(trainings)), args)
            records += [record(name, turns, trainings, args) for name, turns in found.items()]
    first = records[0]["losses"][0]
    for one in records:
        one["first_difference"] = max(abs(loss / first - 1) for loss in one.pop("first_losses"))
        base = next(other for other in records if other["trainings"] == one["trainings"])
        one["ratio"] = round(base["tokens_per_s"] / one["tokens_per_s"], 2)
        print(
            f"{one['impl']}, {one['trainings']} trainings: a step {one['median_s']:.2f} s, the first "
            f"{one['first_s']:.1f} s; {one['tokens_per_s']:.1f} tokens/s, kt_ray {one['ratio']} times; "
            f"loss {one['losses'][0]:.6f} -> {one['losses'][-1]:.4f}, first {one['first_difference']:.0e} off"
        )
    if args.json:
        common.write_json(args.json, records, about)
    apart = max(one["first_difference"] for one in records)
    if apart > CLOSE:
        print(f"first losses differ by {apart:.1e}, more than {CLOSE:.0e}", file=sys.stderr)
    return int(apart > CLOSE)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", metavar="PYTHON", help="measure the skyrl-tx of this interpreter, too")
    parser.add_argument("--trainings", type=int, nargs="+", default=[1, 4], help="at the same time")
    parser.add_argument("--rows", type=int, default=4, help="of each training")
    parser.add_argument("--tokens", type=int, default=64, help="of each row")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank")
    parser.add_argument("--steps", type=int, default=2, help="of each training in a round")
    parser.add_argument("--rounds", type=int, default=5)
    common.add_common_arguments(parser)
    return parser.parse_args(argv)


def make_model(directory: Path, layers: int) -> Path:
    """A checkpoint that both servers read: float32, a tokenizer named as transformers 4 knows it."""
    from safetensors.torch import load_file, save_file

    from kt_ray.tools.__main__ import main as tools

    command = ["random", str(directory), "--model", "qwen3_30b_a3b", "--layers", str(layers), "--set"]
    tools([*command, 'torch_dtype="float32"', *(f"{key}={value}" for key, value in SHAPE.items())])
    for file in directory.glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return directory


def measured(
    model: Path, trainings: int, scratch: Path, args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """What each server's clients found in each round; the first holds one step more, the very first."""
    found: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as ends:
        parties: dict[str, Party] = {}
        for name, python in (("kt_ray", sys.executable), ("skyrl_tx", args.peer)):
            if python:
                parties[name] = Party(name, python, model, trainings, scratch / name, args)
                ends.callback(parties[name].close)
                found[name] = [parties[name].turn(1)]
        for number in range(args.rounds + 1):
            for name in parties if number % 2 == 0 else reversed(parties):
                found[name].append(parties[name].turn(args.steps))
    return found


def record(
    name: str, turns: list[dict[str, Any]], trainings: int, args: argparse.Namespace
) -> dict[str, Any]:
    median = statistics.median(turn["seconds"] for turn in turns[2:]) / args.steps
    tokens = trainings * args.rows * args.tokens
    by_training = zip(*(turn["losses"] for turn in turns), strict=True)
    losses = [list(itertools.chain(*parts)) for parts in by_training]
    return {
        "impl": name,
        "versions": turns[0]["versions"],
        "model": f"qwen3_moe, {args.layers} layers",
        "shape": SHAPE,
        "trainings": trainings,
        "rank": args.rank,
        "tokens": tokens,
        "median_s": median,
        "tokens_per_s": tokens / median,
        "first_s": turns[0]["seconds"],
        "rounds": args.rounds,
        "losses": losses[0],
        "first_losses": [one[0] for one in losses],
    }


class Party:
    """A server, and a process with its clients. Both are stopped but in their turns.

    Args:
        python: the interpreter of both.
        place: a new directory for the server's files.

    Raises:
        ChildError: the server ended or did not answer; its log's end is in the message.
    """

    def __init__(
        self, name: str, python: str, model: Path, trainings: int, place: Path, args: argparse.Namespace
    ) -> None:
        place.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._log = place / "log"
        self._client: Child | None = None
        make = _kt_ray if name == "kt_ray" else _skyrl_tx
        command, environment = make(python, model, trainings, place, port, args)
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
            )
        url = f"http://127.0.0.1:{port}"
        self._await(url)
        environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any"}
        script = Path(__file__).with_name("train_server_child.py")
        self._client = Child([python, str(script)], environment, place / "client.log")
        job = {"base": str(model), "vocab": SHAPE["vocab_size"], "trainings": trainings}
        self._ask({"do": "prepare", **job, "rows": args.rows, "tokens": args.tokens, "rank": args.rank})

    def turn(self, steps: int) -> dict[str, Any]:
        """So many steps of each training: seconds, and each training's losses per token."""
        return self._ask({"do": "train", "steps": steps})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._client is not None
        os.killpg(self._server.pid, signal.SIGCONT)
        self._client.resume()
        try:
            return self._client.ask(question)
        except ChildError as error:
            raise ChildError(f"{error}; the server: {self._last_words()}") from None
        finally:
            self._client.pause()
            os.killpg(self._server.pid, signal.SIGSTOP)

    def _await(self, url: str, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while self._server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
                return
            time.sleep(0.2)
        self.close()
        raise ChildError(f"no server at {url}: {self._last_words()}")

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]

    def close(self) -> None:
        """End both."""
        if self._client is not None:
            self._client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()


def _kt_ray(
    python: str, model: Path, trainings: int, place: Path, port: int, args: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Command and environment."""
    command = [
        *(python, str(common.REPO / "launch.py"), "mode=train_server", "cluster=local", "model=custom"),
        *(f"model.path={model}", "model.dtype=float32", f"lora.rank={args.rank}", f"lora.alpha={ALPHA}"),
        *(f"train_server.adapters={trainings}", f"data.max_length={args.tokens + 1}"),
        f"trainer.batch_size={trainings * args.rows}",  # a joined pass holds the rows of all trainings
        *(f"serve.port={port}", f"serve.name={model}", f"run.root={place}"),
    ]
    return command, {"OMP_NUM_THREADS": str(args.threads)}


def _skyrl_tx(
    python: str, model: Path, trainings: int, place: Path, port: int, args: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Command and environment."""
    # The server starts its engine by `uv run ... -m MODULE`: this `uv` runs that in the same environment.
    uv = place / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec "$PEER" "$@"\n', encoding="utf-8")
    uv.chmod(0o755)
    backend = {"max_lora_adapters": trainings + 1, "max_lora_rank": args.rank}  # one is the base model's
    command = [
        *(python, "-m", "tx.tinker.api", "--base-model", str(model), "--host", "127.0.0.1"),
        *("--port", str(port), "--database-url", f"sqlite:///{place}/requests.db"),
        *("--checkpoints-base", str(place / "saved"), "--backend-config", json.dumps(backend)),
    ]
    path = f"{uv.parent}{os.pathsep}{os.environ['PATH']}"
    return command, {"PATH": path, "PEER": python, "JAX_PLATFORMS": "cpu"}


if __name__ == "__main__":
    sys.exit(main())
