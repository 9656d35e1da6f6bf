"""Clients of a train server that train at the same time; started by train_server.py, maybe with an older SDK.

{"do": "prepare", ...} creates the trainings; {"do": "train"} takes steps of all and answers with seconds, and
each training's losses per token.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import tinker
from child import Message, serve
from tinker import types

_held: dict[str, Any] = {}


def answer(question: Message) -> Message:
    if question["do"] == "prepare":
        return prepare(question)
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(_held["trainings"])) as threads:
        losses = list(threads.map(lambda training: train(training, question["steps"]), _held["trainings"]))
    return {"seconds": time.perf_counter() - begun, "losses": losses, "versions": _held["versions"]}


def prepare(job: Message) -> Message:
    service = _held["service"] = tinker.ServiceClient()
    _held["rows"] = rows(job)
    _held["trainings"] = [create(service, job, seed) for seed in range(1, job["trainings"] + 1)]
    installed = {package.metadata["Name"] for package in metadata.distributions()}
    names = sorted(installed & {"tinker", "skyrl-tx", "jax"})
    _held["versions"] = {name: metadata.version(name) for name in names}
    return {}


def rows(job: Message) -> list[types.Datum]:
    """Rows of random tokens, the mean loss of which is trained."""
    draw, count = random.Random(0), job["rows"] * job["tokens"]
    data = []
    for _ in range(job["rows"]):
        tokens = [draw.randrange(5, job["vocab"]) for _ in range(job["tokens"] + 1)]
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1 / count] * job["tokens"]}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def create(service: Any, job: Message, seed: int) -> Any:
    made = service.create_lora_training_client(
        base_model=job["base"], rank=job["rank"], seed=seed, train_unembed=False
    )
    return made.result() if hasattr(made, "result") else made  # old SDKs wait for it


def train(training: Any, steps: int) -> list[float]:
    losses = []
    adam = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
    for _ in range(steps):
        passed = training.forward_backward(_held["rows"], "cross_entropy")
        stepped = training.optim_step(adam)
        values = [value for output in passed.result().loss_fn_outputs for value in output["logprobs"].data]
        stepped.result()
        losses.append(-sum(values) / len(values))
    return losses


if __name__ == "__main__":
    serve(answer)
