"""A train server's backend on a small model, and rows for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kt_ray.batch import IGNORE, PassSpec, TokenLoss
from kt_ray.data.row_types import Row
from kt_ray.data.tokenizer_files import load_tokenizer
from kt_ray.placement.generation_memory import within_server
from kt_ray.runs.generation import generation_of
from kt_ray.runs.prepare import prepare_model
from kt_ray.runs.start_cluster import started
from kt_ray.runs.train_backend import ClusterBackend
from kt_ray.train.reports import PassReport
from kt_ray.train_server.backend import AdamParams, Datum, Pass
from tests.helpers.composing import compose
from tests.helpers.devices import CARD

ADAM = AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)
ENTROPY = TokenLoss("cross_entropy")
LAYOUTS = {
    "one": ("rule=cpu_1worker_1socket",),
    "two": ("rule=cpu_2workers_2sockets",),
    "replicas": ("rule=cpu_replicas_2",),
    CARD: ("rule=cpu_1worker_1socket", "rule.device=cuda"),
}


@contextlib.contextmanager
def backend_on(model: Path, root: Path, *overrides: str) -> Iterator[ClusterBackend]:
    """overrides: "cluster=local" unless they say otherwise."""
    common = ("mode=train_server", "cluster=local", "model.dtype=float32", "lora.rank=4", "lora.alpha=8")
    small = ("data.max_length=64", "generate.max_new_tokens=32", "serve.max_batch=4", "rule.worker_threads=1")
    config = within_server(compose([f"model.path={model}", *common, *small, *overrides]))
    prepared = prepare_model(config, training=True)
    generation = generation_of(prepared, load_tokenizer(prepared.model_dir, "model.path"))
    with started(generation, "test") as cluster:
        yield ClusterBackend(generation, cluster, "base", str(model), root / "snapshots")


def rows(seed: int, count: int = 6) -> list[Row]:
    """Random tokens, of which the first few are a prompt."""
    generator = np.random.default_rng(seed)
    made = []
    for index in range(count):
        ids = generator.integers(5, 200, size=int(generator.integers(6, 24)))
        labels = ids.copy()
        labels[:3] = IGNORE
        made.append(Row(ids, labels, index))
    return made


def data_of(given: list[Row]) -> list[Datum]:
    """The rows as clients send them: shifted, each token with its share of the mean."""
    tokens = sum(int((row.labels[1:] != IGNORE).sum()) for row in given)
    share = np.float32(1 / tokens)
    return [
        Datum(
            row.input_ids[:-1],
            row.input_ids[1:],
            {"weights": np.where(row.labels[1:] != IGNORE, share, np.float32(0))},
        )
        for row in given
    ]


def passes_of(backend: ClusterBackend) -> list[PassSpec]:
    """Those that the cluster is given from now on."""
    seen: list[PassSpec] = []
    run_pass = backend._cluster.run_pass

    def noted(spec: PassSpec) -> PassReport:
        seen.append(spec)
        return run_pass(spec)

    backend._cluster.run_pass = noted  # type: ignore[method-assign]
    return seen


def several() -> list[Pass]:
    """Passes of three trainings with different rows, losses and numbers of waves."""
    made = []
    for seed, (model, count, loss) in enumerate(
        (("a", 6, ENTROPY), ("b", 4, TokenLoss("importance_sampling")), ("c", 11, ENTROPY))
    ):
        data = data_of(rows(seed, count))
        if loss is not ENTROPY:
            zeros = [np.zeros(len(datum.tokens), dtype=np.float32) for datum in data]
            data = [
                replace(datum, inputs={**datum.inputs, "advantages": zero - 1, "logprobs": zero - 5})
                for datum, zero in zip(data, zeros, strict=True)
            ]
        made.append(Pass(model, data, loss))
    return made
