"""Clients of a train server that train at the same time; started by train_server.py, maybe with an older SDK.

The job is the argument, a JSON object; the last line of output is what was found.
"""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import tinker
from tinker import types


def main() -> None:
    job = json.loads(sys.argv[1])
    service = tinker.ServiceClient()
    data = rows(job)
    trainings = [create(service, job["base"], job["rank"], seed) for seed in range(1, job["trainings"] + 1)]
    with ThreadPoolExecutor(len(trainings)) as threads:
        loops = list(threads.map(lambda training: loop(training, data, job["steps"]), trainings))
    installed = {package.metadata["Name"] for package in metadata.distributions()}
    names = sorted(installed & {"tinker", "skyrl-tx", "jax", "torch"})
    found = {
        "versions": {name: metadata.version(name) for name in names},
        "seconds": [seconds for seconds, _ in loops],
        "losses": [losses for _, losses in loops],
    }
    print(json.dumps(found))


def rows(job: dict[str, Any]) -> list[types.Datum]:
    """Rows of random tokens, the mean loss of which is trained."""
    draw, count = random.Random(0), job["rows"] * job["tokens"]
    data = []
    for _ in range(job["rows"]):
        tokens = [draw.randrange(5, job["vocab"]) for _ in range(job["tokens"] + 1)]
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1 / count] * job["tokens"]}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def create(service: Any, base: str, rank: int, seed: int) -> Any:
    made = service.create_lora_training_client(base_model=base, rank=rank, seed=seed, train_unembed=False)
    return made.result() if hasattr(made, "result") else made  # old SDKs wait for it


def loop(training: Any, data: list[types.Datum], steps: int) -> tuple[list[float], list[float]]:
    """Seconds and losses per token of each step."""
    seconds, losses = [], []
    adam = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
    for _ in range(steps):
        begun = time.perf_counter()
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam)
        outputs = passed.result().loss_fn_outputs
        stepped.result()
        seconds.append(time.perf_counter() - begun)
        values = [value for output in outputs for value in output["logprobs"].data]
        losses.append(-sum(values) / len(values))
    return seconds, losses


if __name__ == "__main__":
    main()
