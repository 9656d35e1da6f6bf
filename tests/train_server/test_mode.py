"""`mode=train_server` under Ray, through the SDK: an actor's death, an end and a new beginning."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from kt_ray.demo.builder import ensure_demo_model
from tests.helpers.ray_place import Place, ray_place
from tests.helpers.train_server import collect_clients

# The SDK leaves connections open, which are noticed whenever memory is collected.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = types.ModelInput.from_ints(list(range(10, 20)))
SAMPLED = types.SamplingParams(max_tokens=8, temperature=1.0, seed=4)


@contextlib.contextmanager
def served(place: Place, log: Path, *arguments: str) -> Iterator[Any]:
    """A client of a server."""
    with place.serving("Ctrl-C ends", log, "mode=train_server", *arguments) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-any")
        yield client
        client.close("success").result()


def row(seed: int, length: int = 20) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(5, 200, size=length)
    inputs = {"target_tokens": tokens[1:], "weights": np.full(length - 1, 0.05, dtype=np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


def steps(training: Any, first: int, count: int, rows: int = 4) -> list[float]:
    losses = []
    for step in range(first, first + count):
        passed = training.forward_backward([row(10 * step + i) for i in range(rows)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def trained_through_a_death(client: Any, victim: int) -> tuple[str, str, list[list[int]]]:
    """Paths of a training's state and of its weights, and what they answer."""
    alone = client.create_lora_training_client("demo", rank=4, seed=1).result()
    expected = steps(alone, 0, 4)
    training = client.create_lora_training_client("demo", rank=4, seed=1).result()
    seen = steps(training, 0, 2)
    waiting = training.forward_backward([row(20 + i) for i in range(4)], "cross_entropy")
    os.kill(victim, signal.SIGKILL)
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    seen += [waiting.result().metrics["loss:sum"], *steps(training, 3, 1)]
    assert seen == expected
    sampler = training.save_weights_and_get_sampling_client().result()
    answers = [s.tokens for s in sampler.sample(PROMPT, 2, SAMPLED).result().sequences]
    state, weights = training.save_state("here").result(), training.save_weights_for_sampler("here").result()
    assert steps(training, 4, 1) == steps(client.create_training_client_from_state(state.path).result(), 4, 1)
    return state.path, weights.path, answers


def found_again(client: Any, state: str, weights: str) -> list[list[int]]:
    again = client.create_training_client_from_state_with_optimizer(state).result()
    assert np.isfinite(steps(again, 4, 1)).all()
    loaded = client.create_sampling_client(model_path=weights).result()
    return [s.tokens for s in loaded.sample(PROMPT, 2, SAMPLED).result().sequences]


@pytest.fixture
def clients_end() -> Iterator[None]:
    """Before another test may be blamed for what they left open."""
    yield
    collect_clients()


def test_a_server_from_beginning_to_end(tmp_path: Path, clients_end: None) -> None:
    model = ensure_demo_model("demo", 0, tmp_path / "cache")
    with ray_place() as place:
        arguments = (
            *("cluster.address=local", "cluster.dashboard=false", "model.dtype=float32", "lora.rank=4"),
            *(f"model.path={model}", "serve.name=demo", "data.max_length=64", "generate.max_new_tokens=16"),
            *(
                "rule=cpu_1worker_1socket",
                "rule.experts.sockets=2",
                f"train_server.directory={tmp_path / 'saved'}",
            ),
        )
        log = tmp_path / "log.txt"
        (tmp_path / "saved" / "snapshots").mkdir(parents=True)  # not the server's
        with served(place, log, *arguments) as client:
            named = re.search(r"experts-1 is process (\d+)", (tmp_path / "saved" / "server.log").read_text())
            assert named is not None
            state, weights, answers = trained_through_a_death(client, int(named[1]))
            assert "starting it again" in log.read_text()
        with served(place, tmp_path / "log2.txt", *arguments) as client:
            assert found_again(client, state, weights) == answers
        assert place.left() == [] and (tmp_path / "saved" / "snapshots").is_dir()
