"""What `mode=train_server` says at its start. No model: the server itself is tested in tests/train_server."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.modes import train_server
from kt_ray.runs.run_lock import locked


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """For a server that is ready at once, and ends."""
    monkeypatch.delenv("KT_RAY_API_KEY", raising=False)

    def nothing(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(model_dir="", close=lambda: None, plan=SimpleNamespace(dims=None))

    for name in ("prepare_model", "load_tokenizer", "generation_of", "ClusterBackend"):
        monkeypatch.setattr(train_server, name, nothing)
    monkeypatch.setattr(train_server, "setup_logging", contextlib.nullcontext)
    monkeypatch.setattr(train_server, "within_server", lambda config: config)
    monkeypatch.setattr(train_server, "training_bytes", lambda *_: 0)
    cluster = contextlib.nullcontext(SimpleNamespace(info=list))
    monkeypatch.setattr(train_server, "started", lambda *_: cluster)
    monkeypatch.setattr(train_server, "serve_backend", lambda *_, ready, **__: ready())
    made = Config()
    directory = replace(made.train_server, directory=str(tmp_path / "saved"))
    return replace(made, serve=replace(made.serve, port=0), train_server=directory)


@pytest.mark.parametrize(("key", "line"), [(None, "tml-any"), ("secret-of-mine", "tml-<the key>")])
def test_clients_are_told_a_key_that_the_sdk_takes(
    config: Config, capsys: pytest.CaptureFixture[str], key: str | None, line: str
) -> None:
    assert train_server.run(replace(config, serve=replace(config.serve, api_key=key))) == 0
    out = capsys.readouterr().out
    assert f"TINKER_API_KEY={line}\n" in out and "secret-of-mine" not in out


def test_a_second_server_is_told_of_its_own_option(config: Config, tmp_path: Path) -> None:
    with (
        locked(tmp_path / "saved"),
        pytest.raises(UserError, match=r"choose another train_server\.directory"),
    ):
        train_server.run(config)
