"""Repetition, ends, checkpoints: what the SDK's clients do not show by themselves."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinker.proto import tinker_public_pb2 as proto

from kt_ray.train_server import work_queue
from kt_ray.train_server.saved_models import Saved
from kt_ray.train_server.service import ENDS
from tests.helpers.fake_train_backend import FakeBackend
from tests.helpers.train_server import Raw, running, until


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
    assert raw.http.post("session_heartbeat", json={"session_id": raw.session}).status_code == 410
    answer = raw.http.post("get_info", json={"model_id": model})
    assert answer.status_code == 404
    assert f"its last saved state is tinker://{model}/weights/stays" in answer.text
    assert "after 600 s without a word from its client, 60 s where another needs the room" in answer.text
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


def test_a_load_of_what_is_saved_before_it_waits_for_the_save(raw: Raw) -> None:
    model, backend = raw.model(), raw.server.backend
    path = f"tinker://{model}/weights/a"
    backend.gate.clear()
    raw.passed(model, 1)
    until(lambda: raw.calls("backward"))
    save = raw.post("save_weights", model_id=model, seq_id=2, path="a")
    load = raw.post("load_weights", model_id=model, seq_id=3, path=path, optimizer=True)
    early = raw.http.post("weights_info", json={"tinker_path": path})
    assert early.status_code == 404 and "its save waits, or runs" in early.text
    backend.gate.set()
    assert raw.result(save) == {"path": path} and raw.result(load)["path"] == path
    assert "metrics" in raw.result(raw.step(model, 4))


def test_a_gap_in_a_models_numbers_spoils_its_step(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    model = raw.model()
    raw.result(raw.passed(model, 1))
    monkeypatch.setattr(work_queue, "GAP", 0.1)
    late = raw.passed(model, 3)  # number 2, of the same pass, never comes
    assert "never came" in raw.result(late)["error"]
    assert "no step was taken" in raw.result(raw.step(model, 4))["error"]
    assert not raw.calls("step")
    load = raw.result(raw.post("save_weights", model_id=model, seq_id=5, path="a")) | {"optimizer": True}
    assert "never came" in raw.result(raw.post("load_weights", model_id=model, seq_id=7, **load))["error"]
    assert "a load of a state among them" in raw.result(raw.step(model, 8))["error"]
    raw.result(raw.post("load_weights", model_id=model, seq_id=9, **load))
    assert "metrics" in raw.result(raw.step(model, 10))
    gone = {"model_id": model, "seq_id": 12, "path": f"{load['path']}x", "optimizer": True}
    assert raw.http.post("load_weights", json=gone).status_code == 404  # number 11 never comes
    assert "never came" in raw.result(raw.passed(model, 13))["error"]
    assert "request 12, had failed" in raw.result(raw.step(model, 14))["error"]


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


def test_an_archive_that_cannot_be_made_says_why(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    model, saved = raw.model(), raw.server.service.saved
    raw.result(raw.post("save_weights_for_sampler", model_id=model, seq_id=1, path="a"))
    url = f"training_runs/{model}/checkpoints/sampler_weights/a/archive"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(saved, "archive", full)
        answer = raw.http.get(url)
    assert answer.status_code == 500 and "the server's disk is full. To fix: free space" in answer.text
    files = saved._files

    def gone(one: Saved) -> Iterator[Path]:
        found = list(files(one))
        saved.delete(one)
        yield from found

    monkeypatch.setattr(saved, "_files", gone)
    answer = raw.http.get(url)
    assert answer.status_code == 404 and "there is no checkpoint" in answer.text


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
