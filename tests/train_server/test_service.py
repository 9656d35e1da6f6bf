"""Order, fairness, repetition, ends: what the SDK's clients do not show by themselves."""

from __future__ import annotations

import errno
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinker.proto import tinker_public_pb2 as proto

from kt_ray.train_server import work_queue
from kt_ray.train_server.backend import NoRoomYet
from kt_ray.train_server.http_server import allow_connections
from kt_ray.train_server.service import ENDS
from tests.helpers.fake_train_backend import FakeBackend, wrong
from tests.helpers.train_server import Raw, Running, running, until


@pytest.fixture
def raw(server: Running) -> Iterator[Raw]:
    made = Raw(server)
    yield made
    made.http.close()


def test_requests_run_by_their_numbers_not_as_they_arrive(raw: Raw) -> None:
    model = raw.model()
    third, second = raw.step(model, 3), raw.passed(model, 2, rows=2)
    time.sleep(0.1)
    assert not raw.calls("backward", "step")
    first = raw.passed(model, 1)
    assert raw.result(third) == {"metrics": {"grad_norm": 6.0}}
    assert raw.calls("backward", "step") == [("backward", model, 1), ("backward", model, 2), ("step", model)]
    assert raw.result(first) and raw.result(second)


def test_a_repeated_request_is_applied_once(raw: Raw) -> None:
    model = raw.model()
    assert raw.model() == model
    first = raw.passed(model, 1)
    assert raw.passed(model, 1) == first
    stepped = raw.step(model, 2)
    assert raw.result(stepped) == {"metrics": {"grad_norm": 2.0}} == raw.result(raw.step(model, 2))
    kept = [
        raw.post("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0)
        for _ in "ab"
    ]
    sampler = raw.result(kept[0])["sampling_session_id"]
    assert kept[0] == kept[1] and raw.result(kept[1])["sampling_session_id"] == sampler
    assert raw.sample(sampler, 0) == raw.sample(sampler, 0)
    until(lambda: len(raw.server.backend.requests) == 1)
    assert [len(raw.calls(name)) for name in ("create", "backward", "step", "keep")] == [1, 1, 1, 1]


def test_a_number_whose_request_was_refused_says_so_again(raw: Raw) -> None:
    model = raw.model()
    raw.result(raw.passed(model, 1))
    raw.server.service.promises._drop(f"{model}:1")  # as long after it was fetched
    failed = raw.result(raw.passed(model, 1))
    assert failed["category"] == "user" and "request 1 of this model ended long ago" in failed["error"]
    assert len(raw.calls("backward")) == 1


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


def test_samples_end_before_a_training_that_waits_and_none_is_added(raw: Raw) -> None:
    model, sampler = raw.model(), raw.sampler()
    raw.server.backend.gate.clear()
    first = [raw.sample(sampler, 0)]
    until(lambda: len(raw.server.backend.requests) == 1)
    first.append(raw.sample(sampler, 1))  # joins what runs
    until(lambda: len(raw.server.backend.requests) == 2)
    passed = raw.passed(model, 1)
    later = raw.sample(sampler, 2)
    time.sleep(0.1)
    assert len(raw.server.backend.requests) == 2
    raw.server.backend.gate.set()
    for one in (*first, passed, later):
        raw.result(one)
    order = [call[0] for call in raw.calls("sampling", "sampled", "submit", "backward")]
    assert order == [
        *("sampling", "submit", "submit", "sampled"),
        "backward",
        *("sampling", "submit", "sampled"),
    ]


def test_a_result_can_be_fetched_again_and_an_unknown_one_cannot(raw: Raw) -> None:
    model = raw.model()
    promised = raw.passed(model, 1)
    assert raw.result(promised) == raw.result(promised)
    assert proto.ForwardBackwardOutput.FromString(raw.result(promised)).metrics["loss:sum"] > 0
    answer = raw.http.post("retrieve_future", json={"request_id": "nobody:1"})
    assert answer.status_code == 410 and "there is no request" in answer.text


def test_a_result_that_is_not_there_yet(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.train_server.endpoints.LONG_POLL", 0.05)
    model = raw.model()
    raw.server.backend.gate.clear()
    promised = raw.passed(model, 1)
    answer = raw.http.post("retrieve_future", json=promised)
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "queue_state": "active", **promised}


def test_a_training_that_has_no_room_yet_waits_and_its_client_is_told(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kt_ray.train_server.endpoints.LONG_POLL", 0.05)
    monkeypatch.setattr("kt_ray.train_server.service._PAUSE", 0.5)
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
    until(lambda: raw.calls("step") == [("step", other), ("step", model)])
    assert isinstance(raw.result(promises[0]), bytes) and raw.result(promises[1])["metrics"]["grad_norm"] > 0
    assert f"waits until there is room: {told}" in caplog.text


def test_the_latest_sampler_answers_while_its_training_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kt_ray.train_server.service._PAUSE", 0.5)
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


def test_the_end_of_a_session_frees_what_it_had(raw: Raw) -> None:
    model, sampler = raw.model(), raw.sampler()
    kept = raw.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=1)
    raw.result(kept)
    raw.result(raw.post("save_weights", model_id=model, seq_id=2, path="stays"))
    waits = raw.step(model, 9)
    assert raw.http.post(f"sessions/{raw.session}/finish", json={}).status_code == 204
    assert "its session has ended" in raw.result(waits)["error"]
    backend = raw.server.backend
    until(lambda: not backend.models and not backend.samplers)
    for path, body in (
        ("session_heartbeat", {"session_id": raw.session}),
        ("get_info", {"model_id": model}),
    ):
        assert raw.http.post(path, json=body).status_code in (404, 410)
    assert raw.http.get(f"samplers/{sampler}").status_code == 404
    assert len(raw.server.service.saved.all()) == 1


def test_a_silent_session_ends(tmp_path: Path) -> None:
    with running(tmp_path, idle=60) as server:
        raw = Raw(server)
        raw.model()
        server.service._sessions[raw.session].heard -= 61
        until(lambda: not server.backend.models)
        assert raw.http.post("session_heartbeat", json={"session_id": raw.session}).status_code == 410
        raw.http.close()


def test_nobody_is_silent_while_the_server_is_stopped(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    model, service = raw.model(), raw.server.service
    ticked, tick = threading.Event(), service.tick
    monkeypatch.setattr(service, "tick", lambda: tick() if ticked.is_set() else None)
    after = time.monotonic() + 3600  # as behind a SIGSTOP of an hour
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    monkeypatch.setattr("kt_ray.train_server.service.time", clock)
    until(lambda: service._swept >= after)  # the worker wakes before the others
    ticked.set()
    until(lambda: service._ticked >= after)
    swept = service._swept
    until(lambda: service._swept > swept)
    assert raw.result(raw.passed(model, 1)) and model in raw.server.backend.models


def test_a_silent_client_makes_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, FakeBackend(slots=1)) as server:
        first, second = Raw(server), Raw(server)
        model = first.model()
        asked = {"session_id": second.session, "model_seq_id": 0, "base_model": "demo/model"}
        refused = second.http.post("create_model", json={**asked, "lora_config": {"rank": 8}})
        assert refused.status_code == 400 and "train_server.trainings=2" in refused.text
        monkeypatch.setattr("kt_ray.train_server.service.GONE", 0.0)
        assert second.model() != model
        assert [call[0] for call in server.backend.calls] == ["create", "forget", "create"]
        assert first.http.post("session_heartbeat", json={"session_id": first.session}).status_code == 410
        for raw in (first, second):
            raw.http.close()


def test_no_more_samplers_at_once_than_there_is_room_for(tmp_path: Path) -> None:
    """Saved weights are loaded in turn, and go before a nameless sampler that cannot come back."""
    with running(tmp_path, most_samplers=2) as server:
        raw, backend = Raw(server), server.backend
        model, most = raw.model(), 0

        def saved(number: int) -> str:
            asked = {"model_id": model, "seq_id": number, "path": f"w{number}"}
            path = raw.result(raw.post("save_weights_for_sampler", **asked))["path"]
            made = {"session_id": raw.session, "sampling_session_seq_id": number, "model_path": path}
            return raw.post("create_sampling_session", **made)["sampling_session_id"]

        load = backend.load_sampler

        def loaded(sampler: str, find: Callable[[], Path]) -> None:
            nonlocal most
            load(sampler, find)
            most = max(most, len(backend.samplers))

        backend.load_sampler = loaded  # type: ignore[method-assign]
        samplers = [saved(number) for number in range(1, 6)]
        asked = [raw.sample(sampler, 0) for sampler in samplers]
        assert all(isinstance(raw.result(promise), bytes) for promise in asked) and most == 2
        keep = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 6}
        nameless = raw.result(raw.post("save_weights_for_sampler", **keep))["sampling_session_id"]
        for number, sampler in enumerate((samplers[0], samplers[1], nameless), 1):
            assert isinstance(raw.result(raw.sample(sampler, number)), bytes)
        raw.http.close()


def test_a_sampler_never_changes_its_weights(tmp_path: Path) -> None:
    """Its path may be deleted and written again: then it fails when it would be read again."""
    with running(tmp_path, most_samplers=1) as server:
        raw = Raw(server)
        model, paths = raw.model(), []

        def made(number: int, name: str) -> str:
            asked = {"model_id": model, "seq_id": number, "path": name}
            paths.append(raw.result(raw.post("save_weights_for_sampler", **asked))["path"])
            body = {"session_id": raw.session, "sampling_session_seq_id": number, "model_path": paths[-1]}
            return raw.post("create_sampling_session", **body)["sampling_session_id"]

        first = made(1, "latest")
        assert isinstance(raw.result(raw.sample(first, 0)), bytes)
        run, kind, name = paths[0].removeprefix("tinker://").split("/")
        deleted = raw.http.delete(f"training_runs/{run}/checkpoints/{kind}/{name}")
        assert deleted.status_code == 204
        assert isinstance(raw.result(raw.sample(first, 1)), bytes)  # it is still loaded
        raw.result(raw.passed(model, 2))
        raw.result(raw.post("optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 3.0}))
        second = made(4, "latest")
        assert paths[0] == paths[1] and isinstance(raw.result(raw.sample(second, 0)), bytes)
        assert "was deleted or written again" in raw.result(raw.sample(first, 2))["error"]
        raw.http.close()


def test_a_state_that_is_deleted_while_its_load_waits(raw: Raw) -> None:
    model, backend = raw.model(), raw.server.backend
    path = raw.result(raw.post("save_weights", model_id=model, seq_id=1, path="a"))["path"]
    backend.gate.clear()
    raw.passed(model, 2)
    until(lambda: raw.calls("backward"))
    loads = [raw.post("load_weights", model_id=model, seq_id=3, path=path, optimizer=True)]
    loads.append(raw.post("load_weights", session_id=raw.session, model_seq_id=1, path=path, optimizer=True))
    assert raw.http.delete(f"training_runs/{model}/checkpoints/weights/a").status_code == 204
    backend.gate.set()
    for load in loads:
        failed = raw.result(load)
        assert failed["category"] == "user" and f"there is no checkpoint {path}" in failed["error"]
    assert not raw.calls("load_state") and list(backend.models) == [model]


def test_a_gap_in_a_models_numbers_spoils_its_step(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    model = raw.model()
    raw.result(raw.passed(model, 1))
    monkeypatch.setattr(work_queue, "GAP", 0.1)
    late = raw.passed(model, 3)  # number 2, of the same pass, never comes
    assert "never came" in raw.result(late)["error"]
    assert "no step was taken" in raw.result(raw.step(model, 4))["error"]
    assert not raw.calls("step")


def test_a_state_of_other_settings_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        raw = Raw(server)
        model = raw.model()
        path = raw.result(raw.post("save_weights", model_id=model, seq_id=1, path="here"))["path"]
        raw.http.close()
    with running(tmp_path, FakeBackend(alpha=32.0)) as server:
        raw = Raw(server)
        model = raw.model()
        asked = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True}
        refused = raw.http.post("load_weights", json=asked)
        assert refused.status_code == 400
        assert "lora.alpha=16.0 (this server: 32.0)" in refused.json()["error"]["message"]
        raw.http.close()


def test_a_sampler_of_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    before, after = FakeBackend(), FakeBackend()
    before.settings["model"], after.settings["model"] = "one fingerprint", "another"
    with running(tmp_path, before) as server:
        raw = Raw(server)
        saved = raw.post("save_weights_for_sampler", model_id=raw.model(), seq_id=1, path="here")
        path = raw.result(saved)["path"]
        asked = {"session_id": raw.session, "sampling_session_seq_id": 7, "model_path": path}
        assert raw.http.post("create_sampling_session", json=asked).status_code == 200
        raw.http.close()
    with running(tmp_path, after) as server:
        raw = Raw(server)
        refused = raw.http.post("create_sampling_session", json={**asked, "session_id": raw.session})
        assert refused.status_code == 400
        assert "other weights of the name demo/model" in refused.json()["error"]["message"]
        after.settings["model"] = "one fingerprint" + "'s second half, which earlier versions did not write"
        asked |= {"session_id": raw.session, "sampling_session_seq_id": 8}
        assert raw.http.post("create_sampling_session", json=asked).status_code == 200
        raw.http.close()


def test_unloading_frees_a_model(raw: Raw) -> None:
    model = raw.model()
    promised = raw.post("unload_model", model_id=model)
    assert raw.result(promised) == {"type": "unload_model", "model_id": model}
    assert not raw.server.backend.models and raw.post("unload_model", model_id=model) == promised


def test_a_model_that_cannot_be_made_leaves_its_place(raw: Raw) -> None:
    raw.server.backend.faults["create"] = MemoryError()
    made = raw.asked_for_model()
    assert raw.result(made)["category"] == "server"
    assert raw.model(1) and len(raw.server.service.models()) == 1


def test_nameless_samplers_beyond_the_limit_are_lost_and_say_so(tmp_path: Path) -> None:
    with running(tmp_path, FakeBackend(), most_samplers=2) as server:
        raw = Raw(server)
        model = raw.model()
        named = raw.result(raw.post("save_weights_for_sampler", model_id=model, seq_id=1, path="named"))
        samplers = []
        for number in range(3):
            body = {"model_id": model, "seq_id": number + 2, "sampling_session_seq_id": number}
            samplers.append(raw.result(raw.post("save_weights_for_sampler", **body))["sampling_session_id"])
        assert set(server.backend.samplers) == set(samplers[1:])
        assert "no longer kept" in raw.result(raw.sample(samplers[0], 0))["error"]
        saved = raw.post(
            "create_sampling_session",
            session_id=raw.session,
            sampling_session_seq_id=7,
            model_path=named["path"],
        )["sampling_session_id"]
        for number, sampler in enumerate((saved, samplers[2], saved)):
            assert isinstance(raw.result(raw.sample(sampler, number)), bytes)
        assert len(server.backend.samplers) == 2
        raw.http.close()


def test_a_training_that_makes_many_samplers_takes_no_other_ones_latest(tmp_path: Path) -> None:
    """One computes rewards meanwhile, say, and samples again."""
    with running(tmp_path, FakeBackend(), most_samplers=2) as server:
        raw = Raw(server)
        slow, fast = raw.model(0), raw.model(1)

        def made(model: str, step: int, number: int) -> str:
            body = {"model_id": model, "seq_id": step, "sampling_session_seq_id": number}
            return raw.result(raw.post("save_weights_for_sampler", **body))["sampling_session_id"]

        patient = made(slow, 1, 0)
        latest = [made(fast, step, step) for step in range(1, 4)][-1]
        for number, sampler in enumerate((latest, patient)):
            assert isinstance(raw.result(raw.sample(sampler, number)), bytes)
        raw.http.close()


def test_more_trainings_than_samplers_have_room_keep_their_latest_on_disk(tmp_path: Path) -> None:
    with running(tmp_path, FakeBackend(), most_samplers=1) as server:
        raw, steps = Raw(server), itertools.count(1)
        models = [raw.model(number) for number in range(3)]
        numbers = dict.fromkeys(models, 0)

        def made(model: str) -> str:
            numbers[model] += 1
            body = {"model_id": model, "seq_id": numbers[model], "sampling_session_seq_id": next(steps)}
            return raw.result(raw.post("save_weights_for_sampler", **body))["sampling_session_id"]

        for _ in range(2):
            latest = [made(model) for model in models]
            for sampler in (*latest, *reversed(latest)):
                assert isinstance(raw.result(raw.sample(sampler, next(steps))), bytes)
            assert len(list(server.backend.aside.iterdir())) <= len(models)  # no earlier ones
        server.backend.faults["put_aside"] = OSError(errno.ENOSPC, "no space")
        newer = made(models[0])
        assert isinstance(raw.result(raw.sample(newer, next(steps))), bytes)
        raw.result(raw.sample(latest[1], next(steps)))
        told = raw.result(raw.sample(newer, next(steps)))["error"]
        assert "had to go to disk" in told and "disk is full" in told
        assert raw.http.post(f"sessions/{raw.session}/finish", json={}).status_code == 204
        until(lambda: not list(server.backend.aside.iterdir()))
        raw.http.close()


def test_no_more_samplers_than_planned_although_all_are_waited_for(tmp_path: Path) -> None:
    """Nameless ones answer before another takes their place, though who came first wants one from a file."""
    with running(tmp_path, FakeBackend(), most_samplers=2) as server:
        raw, backend = Raw(server), server.backend
        model, numbers = raw.model(), itertools.count(1)
        named = raw.result(
            raw.post("save_weights_for_sampler", model_id=model, seq_id=next(numbers), path="n")
        )
        from_file = raw.post(
            "create_sampling_session",
            session_id=raw.session,
            sampling_session_seq_id=9,
            model_path=named["path"],
        )["sampling_session_id"]
        most = 0

        def watched(change: Callable[..., None]) -> Callable[..., None]:
            def changed(*args: Any) -> None:
                nonlocal most
                change(*args)
                most = max(most, len(backend.samplers))

            return changed

        backend.keep = watched(backend.keep)  # type: ignore[method-assign]
        backend.load_sampler = watched(backend.load_sampler)  # type: ignore[method-assign]

        def kept(number: int) -> Any:
            body = {"model_id": model, "seq_id": next(numbers), "sampling_session_seq_id": number}
            return raw.post("save_weights_for_sampler", **body)

        samplers = [raw.result(kept(number))["sampling_session_id"] for number in range(2)]
        backend.gate.clear()
        raw.passed(model, next(numbers))
        until(lambda: raw.calls("backward"))
        answers = [raw.sample(name, number) for number, name in enumerate((from_file, *samplers))]
        new = kept(2)
        backend.gate.set()
        assert raw.result(new)["sampling_session_id"]
        assert all(isinstance(raw.result(answer), bytes) for answer in answers) and most == 2
        raw.http.close()


def test_samplers_that_take_the_room_of_an_admitted_one_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kt_ray.train_server.endpoints.LONG_POLL", 5.0)
    with running(tmp_path, FakeBackend(), most_samplers=2) as server:
        raw, rounds = Raw(server), server.service._rounds
        model = raw.model()
        named = raw.result(raw.post("save_weights_for_sampler", model_id=model, seq_id=1, path="n"))
        asked = {"session_id": raw.session, "sampling_session_seq_id": 9, "model_path": named["path"]}
        from_file = raw.post("create_sampling_session", **asked)["sampling_session_id"]
        kept = [
            raw.post("save_weights_for_sampler", model_id=model, seq_id=n + 2, sampling_session_seq_id=n)
            for n in range(2)
        ]
        nameless = [raw.result(one)["sampling_session_id"] for one in kept]
        others: list[Any] = []
        load = rounds._load

        def loads(*admitted: Any) -> None:
            if not others:
                others.extend(raw.sample(name, 0) for name in nameless)
            load(*admitted)

        monkeypatch.setattr(rounds, "_load", loads)
        first = raw.sample(from_file, 0)
        assert all(isinstance(raw.result(one), bytes) for one in (first, *others))
        assert len(server.backend.samplers) == 2
        raw.http.close()


def test_a_waiting_sample_can_be_cancelled(raw: Raw) -> None:
    model, sampler = raw.model(), raw.sampler()
    raw.server.backend.gate.clear()
    raw.passed(model, 1)
    until(lambda: raw.calls("backward"))
    promised = raw.sample(sampler, 0)
    assert raw.http.post("cancel_future", json=promised).status_code == 204
    assert "cancelled" in raw.result(promised)["error"]
    raw.server.backend.gate.set()
    assert not raw.server.backend.requests


def test_closing_ends_what_waits(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        raw = Raw(server)
        model, sampler = raw.model(), raw.sampler()
        server.backend.gate.clear()
        running_sample, waiting = raw.sample(sampler, 0), raw.step(model, 5)
        until(lambda: server.backend.requests)
        server.service.close()
        for one in (running_sample, waiting):
            assert "shutting down" in raw.result(one)["error"]
        answer = raw.http.post("create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0"})
        assert answer.status_code == 503
        raw.http.close()


def test_who_waits_for_a_pass_is_told_that_the_server_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is cut off, and the log has no traceback."""
    with running(tmp_path) as server, ThreadPoolExecutor() as threads:
        raw, asked, promise = Raw(server), list[str](), server.service.promise

        def seen(name: str) -> Any:
            asked.append(name)
            return promise(name)

        monkeypatch.setattr(server.service, "promise", seen)
        model = raw.model()
        server.backend.gate.clear()
        at_work = raw.passed(model, 1)
        until(lambda: raw.calls("backward"))
        waiting = raw.step(model, 2)
        answers = [threads.submit(raw.result, one) for one in (at_work, waiting)]
        until(lambda: {at_work["request_id"], waiting["request_id"]} <= {*asked})
        server.end()
        errors = [answer.result(60)["error"] for answer in answers]
        assert "does not wait for this request's result" in errors[0] and errors[1] == ENDS
        raw.http.close()
    # A client of an earlier test may still be telling that it does not reach its server.
    assert not [record for record in caplog.records if not record.name.startswith("tinker")]


def test_a_session_that_ends_before_its_model_is_made(raw: Raw) -> None:
    first, backend = raw.model(), raw.server.backend
    backend.gate.clear()
    raw.passed(first, 1)
    until(lambda: raw.calls("backward"))
    other = Raw(raw.server)
    made = other.asked_for_model()
    other.http.post(f"sessions/{other.session}/finish", json={})
    backend.gate.set()
    assert "its session has ended" in other.result(made)["error"]
    assert raw.model(1) and not raw.calls("forget")
    other.http.close()


def test_sessions_end_while_samples_run_without_a_break(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        raw, silent = Raw(server), Raw(server)
        silent.model()
        sampler = raw.sampler()
        server.backend.gate.clear()
        raw.sample(sampler, 0)
        server.service._sessions[silent.session].heard -= 3600
        until(lambda: not server.service.models())
        assert server.backend.calls[-1][0] == "submit"  # still the same session of generation
        for one in (raw, silent):
            one.http.close()


def test_samples_go_on_when_the_disk_cannot_be_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.train_server.service._SWEEP", 0.0)
    monkeypatch.setattr("kt_ray.train_server.service._SWEEP_DISK", 0.1)
    with running(tmp_path) as server:
        raw, swept = Raw(server), 0

        def fail() -> None:
            nonlocal swept
            swept += 1
            raise ValueError

        sampler = raw.sampler()
        server.backend.gate.clear()
        promised = raw.sample(sampler, 0)
        until(lambda: server.backend.requests)
        monkeypatch.setattr(server.service.saved, "sweep", fail)
        until(lambda: swept)
        server.backend.gate.set()
        assert isinstance(raw.result(promised), bytes)
        raw.http.close()


def test_connections_do_not_take_the_files_of_checkpoints() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = min(before[1], 60_000) if before[1] != resource.RLIM_INFINITY else 60_000
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        allow_connections()
        allowed, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert kept == before[1] and allowed >= hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_expired_checkpoints_are_gone(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.train_server.service._SWEEP_DISK", 1e12)  # not by itself meanwhile
    model = raw.model()
    path = raw.result(raw.post("save_weights", model_id=model, seq_id=1, path="a", ttl_seconds=3600))["path"]
    assert raw.post("weights_info", tinker_path=path)["lora_rank"] == 8

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=3601)

    monkeypatch.setattr("kt_ray.train_server.saved_models.datetime", Later)
    assert raw.http.post("weights_info", json={"tinker_path": path}).status_code == 404
    saved = raw.server.service.saved
    assert saved.all() == [] and len(saved.all(expired=True)) == 1
    saved.sweep()
    assert saved.all(expired=True) == []


def test_a_save_that_fails_leaves_nothing_and_an_old_one_stays(raw: Raw) -> None:
    model, saved = raw.model(), raw.server.service.saved
    raw.result(raw.post("save_weights", model_id=model, seq_id=1, path="a"))
    before = saved.all()
    raw.server.backend.faults["save_state"] = OSError(errno.ENOSPC, "no space")
    failed = raw.result(raw.post("save_weights", model_id=model, seq_id=2, path="a", overwrite=True))
    assert failed["category"] == "server" and "train_server.directory" in failed["error"]
    assert saved.all() == before
    assert [file.name for file in (saved.root / model / "weights").iterdir()] == ["a"]


def test_a_checkpoint_that_cannot_be_read_is_not_replaced_unasked(raw: Raw) -> None:
    model, numbers = raw.model(), itertools.count(1)

    def save(**more: Any) -> Any:
        body = {"model_id": model, "seq_id": next(numbers), "path": "a", **more}
        return raw.result(raw.post("save_weights", **body))

    assert "path" in save()
    place = raw.server.directory / model / "weights" / "a"
    (place / "checkpoint.json").write_text("{")
    assert "there is a checkpoint" in save()["error"] and (place / "data" / "state.json").is_file()
    assert "path" in save(overwrite=True)
