"""Control characters of data, errors and answers reach no terminal; files keep them."""

from __future__ import annotations

import ast
import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kt_ray import terminal
from kt_ray.data.preview import PreviewRow, print_preview
from kt_ray.errors import UserError, exit_code
from kt_ray.generate.generator import Piece
from kt_ray.generate.requests import Token
from kt_ray.modes.chat import Chat
from kt_ray.terminal import screen_console, visible
from kt_ray.tracking.console import setup_logging

ROOT = Path(__file__).resolve().parents[1]
# a title, the clipboard, back over the line, C1's CSI, a bell, a bare half of a pair
EVIL = "a\x1b]0;t\x07b\x1b]52;c;aGk=\x1b\\c\rd\x9b31me\x08\x7f\x85\x00\ud800é猫\tz"
SHOWN = visible(EVIL)
STEERING = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"}


def steers(text: str, *, colours: bool = False) -> bool:
    if colours:  # rich's own: ESC [ ... m
        import re

        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return bool(STEERING & set(text))


def test_visible() -> None:
    assert steers(EVIL) and not steers(SHOWN)
    assert SHOWN.startswith("a\\x1b]0;t\\x07b") and SHOWN.endswith("\\x00\\ud800é猫\tz")
    assert visible("one\r\ntwo\tthree\n") == "one\ntwo\tthree\n"
    SHOWN.encode()
    assert visible("".join(map(chr, range(0x20, 0x7F)))) == "".join(map(chr, range(0x20, 0x7F)))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_whatever_carries_the_text(is_terminal: bool) -> None:
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    preview = PreviewRow(0, 1, 1, ((EVIL, True), (EVIL, False)), EVIL)
    for carrier in (EVIL, Text(EVIL, style="green"), table, preview):
        out = io.StringIO()
        console = screen_console(file=out, force_terminal=is_terminal, width=200, highlight=False)
        if isinstance(carrier, PreviewRow):
            print_preview([carrier], console)
        else:
            console.print(carrier, markup=False, soft_wrap=True)
        assert not steers(out.getvalue(), colours=is_terminal), out.getvalue()
        assert "\\x1b]52;c;aGk=\\x1b" in out.getvalue()


def test_no_word_of_a_line_becomes_a_picture() -> None:
    out, path = io.StringIO(), "runs/0123:train:0/weights/a"
    table = Table()
    table.add_row(path)
    console = screen_console(file=out, width=200)
    for carrier in (path, table):
        console.print(carrier)
    assert out.getvalue().count(path) == 2


def test_a_live_display_still_moves_the_cursor() -> None:
    out = io.StringIO()
    console = screen_console(file=out, force_terminal=True, width=80)
    with Live("one", console=console, auto_refresh=False) as live:
        live.update("two", refresh=True)
        console.print(EVIL, markup=False)
    assert "\x1b[2K" in out.getvalue() and "\x1b]52" not in out.getvalue()


def test_the_line_of_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> int:
        raise UserError("no such role", observed=EVIL, where=EVIL)

    def bug() -> int:
        raise ValueError(EVIL)

    assert exit_code(wrong) == 2 and exit_code(bug) == 1
    monkeypatch.setenv("KT_RAY_DEBUG", "1")
    assert exit_code(wrong) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\\x1b]52;c;aGk=") >= 5 and not steers(shown.err + shown.out)


def test_the_log_keeps_what_the_screen_does_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = EVIL.replace("\ud800", "")
    with setup_logging(tmp_path / "train.log"):
        logging.getLogger("kt_ray").warning("row 3: %s", text)
    assert text in (tmp_path / "train.log").read_bytes().decode()
    assert "row 3: a\\x1b]0" in capsys.readouterr().err


def test_an_answer_in_the_chat() -> None:
    class Answer:
        tokens, text, finish, error = (1, 2), EVIL, "error", EVIL

        def __iter__(self) -> Any:
            yield from (Piece(Token(0, 1), char) for char in EVIL)

    generation: Any = SimpleNamespace(
        config=SimpleNamespace(generate=SimpleNamespace(system=None), seed=0),
        adapter=EVIL,
        encoder=SimpleNamespace(opens_thought=lambda prompt: False),
        prompt=lambda messages: (1,),
        request=lambda *_, **__: None,
    )
    out = io.StringIO()
    chat = Chat(generation, SimpleNamespace(submit=lambda request: Answer()), out)  # type: ignore[arg-type]
    questions = iter(["hello", f"/{EVIL}"])
    chat.run(lambda: next(questions, None))
    assert SHOWN in out.getvalue() and not steers(out.getvalue())
    assert chat.messages[-1]["content"] == EVIL  # what the model is told is what it said


def test_every_console_is_made_in_one_place() -> None:
    """A console that is made elsewhere would show text as it is."""
    made = []
    for file in (ROOT / "kt_ray").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Console"
            ):
                made.append(file)
    assert made == [Path(terminal.__file__)]
    assert isinstance(screen_console(), Console)
