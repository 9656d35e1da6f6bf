"""Which samplers are in memory, what is lost and says so, who waits for whom."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_train_backend import FakeBackend
from tests.helpers.train_server import Raw, running, until


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
        saved = raw.sampler_of(named["path"], 7)
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
        from_file = raw.sampler_of(named["path"], 9)
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
