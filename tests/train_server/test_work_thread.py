"""Order and turns of the models' requests, passes joined, what waits for room."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tinker.proto import tinker_public_pb2 as proto

from kt_ray.train_server import work_queue
from kt_ray.train_server.backend import NoRoomYet
from tests.helpers.fake_train_backend import FakeBackend, wrong
from tests.helpers.train_server import Raw, running, until


def test_requests_run_by_their_numbers_not_as_they_arrive(raw: Raw) -> None:
    model = raw.model()
    third, second = raw.step(model, 3), raw.passed(model, 2, rows=2)
    time.sleep(0.1)
    assert not raw.calls("backward", "step")
    first = raw.passed(model, 1)
    assert raw.result(third) == {"metrics": {"grad_norm": 6.0}}
    assert raw.calls("backward", "step") == [("backward", model, 1), ("backward", model, 2), ("step", model)]
    assert raw.result(first) and raw.result(second)


def test_models_take_turns_step_by_step(raw: Raw) -> None:
    models = [raw.model(0), raw.model(1)]
    raw.server.backend.gate.clear()
    last = [raw.passed(models[0], 1)]
    until(lambda: raw.calls("backward"))
    for model in models:
        for number in range(1, 9, 2):
            last.append(raw.passed(model, number))
            last.append(raw.step(model, number + 1))
    raw.server.backend.gate.set()
    for one in last:
        raw.result(one)
    stepped = [models.index(call[1]) for call in raw.calls("step")]
    assert stepped == [0, 1, 0, 1, 0, 1, 0, 1]


def test_passes_that_wait_are_joined_and_each_fails_by_itself(raw: Raw) -> None:
    models, backend = [raw.model(number) for number in range(3)], raw.server.backend
    numbers = dict.fromkeys(models, 0)

    def next_of(model: str) -> int:
        numbers[model] += 1
        return numbers[model]

    def held() -> Any:
        """A pass that runs until the gate opens."""
        backend.gate.clear()
        running, promise = len(raw.calls("backward")), raw.passed(models[0], next_of(models[0]))
        until(lambda: len(raw.calls("backward")) > running)
        return promise

    promises = [held()]
    first = [raw.passed(model, next_of(model), rows=rows) for rows, model in enumerate(models, 1)]
    for model in models:
        promises += [raw.step(model, next_of(model)), raw.passed(model, next_of(model))]
        promises.append(raw.step(model, next_of(model)))
    backend.gate.set()
    replies = [proto.ForwardBackwardOutput.FromString(raw.result(promise)) for promise in first]
    assert [reply.metrics["tokens:sum"] for reply in replies] == [2.0, 4.0, 6.0]
    assert all(isinstance(reply, bytes) or "metrics" in reply for reply in map(raw.result, promises))
    assert raw.calls("join") == [("join", *models)] * 2
    assert [call[1] for call in raw.calls("step")] == models * 2

    backend.on_disk = {models[1]}  # it joins nobody, and nobody joins it
    promises = [held()]
    promises += [raw.passed(model, next_of(model)) for model in models]
    promises += [raw.step(model, next_of(model)) for model in models]
    backend.gate.set()
    assert all(map(raw.result, promises))
    assert raw.calls("join")[2:] == [("join", models[0], models[2])]
    backend.on_disk = set()

    other = held()
    passes = [raw.passed(model, next_of(model)) for model in models]
    steps = [raw.step(model, next_of(model)) for model in models]
    backend.faults |= {"join": wrong("a batch is wrong"), "backward": wrong("this batch is wrong")}
    backend.gate.set()
    assert raw.result(other) and "this batch is wrong" in raw.result(passes[0])["error"]
    assert "no step was taken" in raw.result(steps[0])["error"]
    for promise, step in zip(passes[1:], steps[1:], strict=True):
        assert isinstance(raw.result(promise), bytes) and raw.result(step)["metrics"]["grad_norm"] > 0


def test_a_training_that_has_no_room_yet_waits_and_its_client_is_told(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kt_ray.train_server.endpoints.LONG_POLL", 0.05)
    monkeypatch.setattr("kt_ray.train_server.work_thread._PAUSE", 0.5)
    monkeypatch.setattr(work_queue, "GAP", 0.0)  # what waits for room has come
    model, other, faults = raw.model(0), raw.model(1), raw.server.backend.faults
    faults["backward"] = NoRoomYet("the disk is full")
    promises = [raw.passed(model, 1), raw.step(model, 2)]
    until(lambda: not faults)
    told = "the disk is full"
    until(lambda: told in raw.http.post("retrieve_future", json=promises[0]).text)
    answer = raw.http.post("retrieve_future", json=promises[0])
    state = {"queue_state": "paused_capacity", "queue_state_reason": told}
    assert answer.status_code == 408 and answer.json() == {"type": "try_again", **promises[0], **state}
    raw.result(raw.step(other, 1))  # others go on
    raw.server.backend.gate.clear()
    until(lambda: len(raw.calls("backward")) == 2)
    answer = raw.http.post("retrieve_future", json=promises[0])
    assert answer.json() == {"type": "try_again", **promises[0], "queue_state": "active"}  # it runs
    raw.server.backend.gate.set()
    until(lambda: raw.calls("step") == [("step", other), ("step", model)])
    assert isinstance(raw.result(promises[0]), bytes) and raw.result(promises[1])["metrics"]["grad_norm"] > 0
    assert f"waits until there is room: {told}" in caplog.text


def test_the_latest_sampler_answers_while_its_training_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kt_ray.train_server.work_thread._PAUSE", 0.5)
    with running(tmp_path, FakeBackend(), most_samplers=1) as server:
        raw, backend = Raw(server), server.backend
        waiting, other = raw.model(0), raw.model(1)

        def asked(model: str, number: int, sampler: int) -> Any:
            body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": sampler}
            return raw.post("save_weights_for_sampler", **body)

        latest = raw.result(asked(waiting, 1, 0))["sampling_session_id"]
        raw.result(asked(other, 1, 1))  # for which the first one goes to disk
        backend.faults["take_up"] = NoRoomYet("the disk is full")
        newer = asked(waiting, 2, 2)
        until(lambda: not backend.faults)
        assert isinstance(raw.result(raw.sample(latest, 0)), bytes)
        newest = raw.result(newer)["sampling_session_id"]
        assert isinstance(raw.result(raw.sample(newest, 0)), bytes)
        raw.http.close()


def test_a_request_whose_predecessor_never_comes_fails(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    model = raw.model()
    promised = raw.step(model, 2)
    monkeypatch.setattr(work_queue, "GAP", 0.1)
    assert "request 1 of this model never came" in raw.result(promised)["error"]
    assert "no step was taken" in raw.result(raw.step(model, 3))["error"]  # it may have been a pass
    assert raw.result(raw.step(model, 4)) == {"metrics": {"grad_norm": 0.0}}


@pytest.mark.parametrize("seen", ["at once", "by its body", "in its turn"])
def test_after_a_load_that_failed_nothing_is_done_until_one_succeeds(raw: Raw, seen: str) -> None:
    """The SDK sends on what its client asked for behind it, before the client can know."""
    others, model = [raw.model(0), raw.model(1)], raw.model(2)
    paths = [raw.result(raw.post("save_weights", model_id=model, seq_id=n, path=f"p{n}")) for n in (1, 2)]
    path, good = (one["path"] for one in paths)
    raw.server.backend.gate.clear()
    raw.passed(others[0], 1)
    until(lambda: raw.calls("backward"))
    load = {"model_id": model, "seq_id": 3, "path": path, "optimizer": True}
    if seen == "in its turn":
        raw.post("load_weights", **load)
    assert raw.http.delete(f"training_runs/{model}/checkpoints/weights/p1").status_code == 204
    if seen != "in its turn":
        body = {**load, "path": 5} if seen == "by its body" else load
        assert raw.http.post("load_weights", json=body).status_code in (400, 404)
    raw.passed(others[1], 1)
    behind = [raw.passed(model, 4), raw.step(model, 5), raw.post("save_weights", model_id=model, seq_id=6)]
    behind.append(raw.post("save_weights_for_sampler", model_id=model, seq_id=7, sampling_session_seq_id=0))
    raw.server.backend.gate.set()
    for one in behind:
        failed = raw.result(one)
        assert failed["category"] == "user" and "request 3, had failed" in failed["error"]
    assert not raw.calls("join", "step", "keep") and len(raw.calls("save_state")) == 2
    assert raw.result(raw.post("load_weights", **{**load, "seq_id": 8, "path": good}))["path"] == good
    assert isinstance(raw.result(raw.passed(model, 9)), bytes) and "metrics" in raw.result(
        raw.step(model, 10)
    )
