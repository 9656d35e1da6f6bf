"""What a person types."""

from __future__ import annotations

import io
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray.generate.generator import Piece
from kt_ray.generate.requests import Token
from kt_ray.modes.chat import Chat, _reader
from kt_ray.runs import start_cluster


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # Python's own in UTF-8 and in "C"
def test_bytes_that_are_no_text_end_no_chat(errors: str) -> None:
    read = _reader(io.TextIOWrapper(io.BytesIO("caf\xe9\n猫".encode() + b"\xe9\n"), "utf-8", errors))
    assert [read(), read(), read()] == ["café", "猫\ufffd", None]
    read = _reader(io.StringIO("a\n"))
    assert [read(), read()] == ["a", None]


def test_the_second_interrupt_in_a_row_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: Any = iter([KeyboardInterrupt, "Hello", KeyboardInterrupt, KeyboardInterrupt, "never read"])

    def answer(prompt: str) -> str:
        line = next(typed)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    read = _reader(terminal)
    assert [read(), read(), read(), read()] == ["", "Hello", "", None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_other_modes_ends_a_chat_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill`, or a terminal that is closed: at the prompt and in an answer."""
    monkeypatch.setattr(start_cluster.signal, "getsignal", lambda _: signal.SIG_DFL)  # also under nohup

    class Answer:
        def __iter__(self) -> Any:
            os.kill(os.getpid(), number)
            yield Piece(Token(0, 1), "Why?")

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt), start_cluster._interrupted():
        _reader(terminal)()
    generation: Any = SimpleNamespace(
        config=SimpleNamespace(generate=SimpleNamespace(system=None), seed=0),
        adapter=None,
        prompt=lambda messages: (1,),
        request=lambda *_, **__: None,
    )
    chat = Chat(generation, SimpleNamespace(submit=lambda request: Answer()), io.StringIO())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), start_cluster._interrupted():
        chat.ask("Really?")


@pytest.mark.parametrize("opened", [True, False])
def test_a_thought_that_the_prompt_opens_is_one_in_later_questions(opened: bool) -> None:
    class Answer:
        tokens, text, finish, error = (1,), "Why?</think>No.", "stop", ""

        def __iter__(self) -> Any:
            yield Piece(Token(0, 1), self.text)

    generation: Any = SimpleNamespace(
        config=SimpleNamespace(generate=SimpleNamespace(system=None), seed=0),
        adapter=None,
        encoder=SimpleNamespace(opens_thought=lambda prompt: opened),
        prompt=lambda messages: (1,),
        request=lambda *_, **__: None,
    )
    chat = Chat(generation, SimpleNamespace(submit=lambda request: Answer()), io.StringIO())  # type: ignore[arg-type]
    chat.ask("Really?")
    assert chat.messages[-1]["content"] == ("<think>" if opened else "") + Answer.text
