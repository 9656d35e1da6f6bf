"""SIGKILL of actors between and in a train server's calls: everything ends as if nobody had died."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_ray.batch import WHOLE, PassSpec
from kt_ray.generate.requests import Request, Sampling
from kt_ray.runs import train_backend as module
from kt_ray.runs.train_backend import ClusterBackend
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.train_server.backend import Pass
from tests.helpers.ray_place import connected
from tests.helpers.train_backend import ADAM, ENTROPY, backend_on, data_of, rows

pytestmark = pytest.mark.ray

RAY = ("cluster=ray", "cluster.address=local", "cluster.dashboard=false")
LAYOUT = ("rule=cpu_2workers_2sockets", "trainer.recoveries=20")


@pytest.fixture(scope="module", autouse=True)
def on_ray() -> Iterator[None]:
    with connected():
        yield


def script(backend: ClusterBackend, disturb: Callable[[str], None]) -> list[Any]:
    """Two trainings that take turns, samplers of both, a state on disk; returns all that was seen."""
    seen: list[Any] = []
    for seed, name in enumerate("ab"):
        backend.create(name, seed, WHOLE)
    data = {name: data_of(rows(seed)) for seed, name in enumerate("ab")}
    for turn in range(3):
        for name in "ab":
            disturb(f"run {turn}{name}")
            seen.append(backend.run(name, data[name], ENTROPY, backward=True).loss)
        for name in "ba":
            disturb(f"step {turn}{name}")
            seen.append(backend.step(name, ADAM)["grad_norm"])
        disturb(f"keep {turn}")
        backend.keep("a", f"sampler {turn}")
        if turn:
            backend.drop(f"sampler {turn - 1}")
    disturb("adapter")
    backend.save_adapter("b", backend._directory.parent / "adapter")
    backend.load_sampler("loaded", lambda: backend._directory.parent / "adapter")
    disturb("score")
    for sampler in ("sampler 2", "loaded", False):
        seen += [scores.logprobs.tolist() for scores in backend.score(sampler, [data["a"][0].tokens], 0)]
    for name in "ab":
        seen.append(backend.run(name, data[name], ENTROPY, backward=False).loss)
    return seen


def pid_of(backend: ClusterBackend, actor: str) -> int:
    """Not during a session, or a pass: actors answer after it."""
    return next(fact["pid"] for fact in backend._cluster.info() if fact["actor"] == actor)


def test_everything_ends_as_if_nobody_had_died(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaths from before the first snapshot until after the last."""
    with backend_on(model, tmp_path / "alone", *LAYOUT) as backend:
        expected = script(backend, lambda what: None)
    monkeypatch.setattr(module, "SNAPSHOT_STEPS", 2)
    deaths = {"run 1b": "worker-0", "step 1a": "experts-1", "keep 2": "worker-1", "score": "experts-0"}
    with backend_on(model, tmp_path / "killed", *LAYOUT, *RAY) as backend:

        def disturb(what: str) -> None:
            if what in deaths:
                os.kill(pid_of(backend, deaths[what]), signal.SIGKILL)
            if what == "run 2a":  # in the middle of the pass
                pid = pid_of(backend, "experts-0")
                threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()

        assert script(backend, disturb) == expected
        assert len(backend._revivals._begun) >= len(deaths)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", ["experts", "layers"])
def test_a_death_in_a_joined_pass_repeats_it_for_all(model: Path, tmp_path: Path, shared: str) -> None:
    works = [Pass(name, data_of(rows(seed)), ENTROPY) for seed, name in enumerate("abc")]
    with backend_on(model, tmp_path, *LAYOUT, *RAY, f"train_server.shared={shared}") as backend:
        seen: list[list[Any]] = []
        for deaths in (0, 1):
            for seed, work in enumerate(works):
                backend.create(work.model, seed, WHOLE)
            found = [backend.run(works[1].model, works[1].data, ENTROPY, backward=True).loss]
            found += [result.loss for result in backend.join(works)]  # gradients that wait, of all
            run_pass = backend._cluster.run_pass
            pid = pid_of(backend, "experts-0")

            def dying(spec: PassSpec, run_pass: Any = run_pass, pid: int = pid) -> Any:
                del backend._cluster.run_pass
                threading.Timer(0.02, os.kill, (pid, signal.SIGKILL)).start()
                return run_pass(spec)

            if deaths:
                backend._cluster.run_pass = dying  # type: ignore[method-assign]
            found += [result.loss for result in backend.join(works[::-1])]
            found += [backend.step(work.model, ADAM)["grad_norm"] for work in works]
            assert len(backend._revivals._begun) == deaths
            found += [backend.run(work.model, work.data, ENTROPY, backward=False).loss for work in works]
            seen.append(found)
            for work in works:
                backend.forget(work.model)
        # a rebuild repeats each alone
        assert seen[1] == (seen[0] if shared == "experts" else pytest.approx(seen[0], rel=1e-3))


@pytest.mark.exhaustive
def test_a_session_that_a_death_ended_is_followed_by_another(model: Path, tmp_path: Path) -> None:
    request = Request(tuple(range(10, 20)), Sampling(max_new_tokens=30, temperature=1.0, seed=3), "sampler")
    with backend_on(model, tmp_path, *LAYOUT, *RAY) as backend:
        backend.create("mine", 1, WHOLE)
        backend.run("mine", data_of(rows(2)), ENTROPY, backward=True)
        backend.step("mine", ADAM)
        backend.keep("mine", "sampler")
        with backend.sampling() as session:
            expected = session.submit_all([request])[0].result(60).tokens
        pid = pid_of(backend, "experts-0")
        with backend.sampling() as session:
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorLost):
                session.submit_all([request])[0].result(120)
        with backend.sampling() as session:
            assert session.submit_all([request])[0].result(60).tokens == expected
        assert np.isfinite(backend.run("mine", data_of(rows(2)), ENTROPY, backward=True).loss)
