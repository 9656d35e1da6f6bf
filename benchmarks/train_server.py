"""The train server as its clients see it: one training and several, beside another server of the same API.

    python benchmarks/train_server.py --json out.json
    python benchmarks/train_server.py --peer PYTHON --json out.json

PYTHON is the interpreter of an environment with skyrl-tx, which is started there as it is (tx.tinker.api):
`pip install 'skyrl-tx[tinker]==0.3.0' jax flax optax tinker==0.14.0`. Each server is driven through the
released SDK of its environment: skyrl-tx 0.3.0 answers no newer one, kt_ray's needs 0.38.

Both load one checkpoint of random weights, a small Qwen3-MoE (SHAPE) in float32, and get LoRA of --rank with
alpha 32, which skyrl-tx does not let clients choose. Each of --trainings (each number is measured, by a
server started for it) loops in a thread of its own: forward_backward over the same --rows rows of --tokens
tokens, optim_step, --rounds times after --warmup. Records, over the steps of all trainings:

    median_s      of a step, from asking to the answers of both calls
    tokens_per_s  of all trainings together
    first_s       the longest first step: skyrl-tx compiles in it
    losses        per token, of the first training's steps. B is zero at first, so all trainings of both
                  servers must begin with the same loss; first_difference: how far they are apart, relative.
                  Later ones differ: A begins elsewhere, and skyrl-tx divides the experts' rank by how many
                  they are
    ratio         by how much the first server with as many trainings has more tokens/s
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common

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
        for python in filter(None, (sys.executable, args.peer)):
            for trainings in args.trainings:
                place = Path(scratch, f"server {len(records)}")
                place.mkdir()
                with started(python, model, trainings, place, args) as url:
                    records.append(measured(python, url, model, trainings, args))
                _compare(records)
    if args.json:
        common.write_json(args.json, records, about)
    apart = max(record["first_difference"] for record in records)
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
    parser.add_argument("--warmup", type=int, default=1, help="steps before those that count")
    parser.add_argument("--rounds", type=int, default=5, help="steps that count")
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


# ------------------------------------------------------------------ servers


@contextlib.contextmanager
def started(python: str, model: Path, trainings: int, place: Path, args: argparse.Namespace) -> Iterator[str]:
    """A server's address while it runs; its files are in `place`."""
    port = _free_port()
    ours = python == sys.executable
    command = (
        _kt_ray(model, trainings, place, port, args)
        if ours
        else _skyrl_tx(model, trainings, place, port, args)
    )
    path = os.environ["PATH"] if ours else f"{_uv(place)}{os.pathsep}{os.environ['PATH']}"
    log = place / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path, "PEER": python, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        yield url
    except BaseException:
        print(log.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):  # what it left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _kt_ray(model: Path, trainings: int, place: Path, port: int, args: argparse.Namespace) -> list[str]:
    return [
        str(common.REPO / "launch.py"),
        "mode=train_server",
        "cluster=local",
        "model=custom",
        f"model.path={model}",
        "model.dtype=float32",
        f"lora.rank={args.rank}",
        f"lora.alpha={ALPHA}",
        f"train_server.adapters={trainings}",
        f"data.max_length={args.tokens + 1}",
        f"trainer.batch_size={trainings * args.rows}",  # a joined pass holds the rows of all trainings
        f"serve.port={port}",
        f"serve.name={model}",
        f"run.root={place}",
    ]


def _skyrl_tx(model: Path, trainings: int, place: Path, port: int, args: argparse.Namespace) -> list[str]:
    # One adapter is its base model's.
    backend = {"max_lora_adapters": trainings + 1, "max_lora_rank": args.rank}
    return [
        *("-m", "tx.tinker.api", "--base-model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--database-url", f"sqlite:///{place}/requests.db", "--checkpoints-base", str(place / "saved")),
        *("--backend-config", json.dumps(backend)),
    ]


def _uv(place: Path) -> Path:
    """A directory whose `uv run ... -m MODULE`, which the peer's server calls, runs in its environment."""
    directory = place / "bin"
    directory.mkdir()
    script = directory / "uv"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec "$PEER" "$@"\n', encoding="utf-8"
    )
    script.chmod(0o755)
    return directory


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(url: str, process: subprocess.Popen[bytes], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"no answer from {url} in {seconds:.0f} s")


# ------------------------------------------------------------------ clients


def measured(python: str, url: str, model: Path, trainings: int, args: argparse.Namespace) -> dict[str, Any]:
    """The record of what train_server_child.py found, which runs with `python` and its SDK."""
    job = {"base": str(model), "vocab": SHAPE["vocab_size"], "trainings": trainings}
    job |= {key: getattr(args, key) for key in ("rows", "tokens", "rank")}
    job["steps"] = args.warmup + args.rounds
    done = subprocess.run(
        [python, Path(__file__).with_name("train_server_child.py"), json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1200,
        env={**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any"},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    middle = statistics.median(s for steps in found["seconds"] for s in steps[args.warmup :])
    tokens = trainings * args.rows * args.tokens
    return {
        "impl": "kt_ray" if python == sys.executable else "skyrl_tx",
        "versions": found["versions"],
        "model": f"qwen3_moe, {args.layers} layers",
        "shape": SHAPE,
        "trainings": trainings,
        "rank": args.rank,
        "tokens": tokens,
        "median_s": middle,
        "tokens_per_s": tokens / middle,
        "first_s": max(steps[0] for steps in found["seconds"]),
        "rounds": args.rounds,
        "losses": found["losses"][0],
        "first_losses": [losses[0] for losses in found["losses"]],
    }


def _compare(records: list[dict[str, Any]]) -> None:
    """What the last record says beside those before, and a line about it."""
    last = records[-1]
    first = records[0]["losses"][0]
    last["first_difference"] = max(abs(loss / first - 1) for loss in last["first_losses"])
    same = next(record for record in records if record["trainings"] == last["trainings"])
    last["ratio"] = round(same["tokens_per_s"] / last["tokens_per_s"], 2)
    print(
        f"{last['impl']}, {last['trainings']} trainings: a step {last['median_s']:.2f} s, the first "
        f"{last['first_s']:.1f} s; {last['tokens_per_s']:.1f} tokens/s, {same['impl']} {last['ratio']} "
        f"times as many; loss {last['losses'][0]:.6f} -> {last['losses'][-1]:.4f}, first ones "
        f"{last['first_difference']:.1e} apart",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
