"""Text comes out as soon as it is certain, and never a stop string or what follows it."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any, ClassVar

import pytest
from transformers import AddedToken

from kt_ray.generate.detokenize import TextStream


class Fake:
    """A tokenizer without special tokens of Harmony's."""

    unk_token_id = None

    def convert_tokens_to_ids(self, _: str) -> None:
        return None


class Bytes(Fake):
    """A tokenizer of single bytes, which splits characters."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def pieces(text: str, stop: tuple[str, ...] = (), skip: tuple[int, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(), stop, skip)
    out = [stream.add(byte) for byte in text.encode()]
    return [*out, stream.end()], stream


def test_characters_of_several_bytes_come_whole() -> None:
    out, stream = pieces("né猫!")
    assert [piece for piece in out if piece] == ["n", "é", "猫", "!"]
    assert stream.text == "né猫!" and not stream.stopped


def test_bytes_that_make_no_character_are_left_out() -> None:
    cat = "猫".encode()
    for given in (b"a" + cat[:2], b"a" + cat[1:] + cat + b"b", cat[:1] * 9 + b"ab"):
        stream = TextStream(Bytes())
        text = "".join([*map(stream.add, given), stream.end()])
        assert text == stream.text == given.decode("utf-8", errors="ignore")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello END more", ("END",), "hello "),
        ("aab", ("ab",), "a"),
        ("one\n\ntwo", ("\n\n", "tw"), "one"),
        ("never", ("x",), "never"),
        ("ends with EN", ("END",), "ends with EN"),
    ],
)
def test_stop_strings_end_the_text(text: str, stop: tuple[str, ...], expected: str) -> None:
    out, stream = pieces(text, stop)
    assert "".join(out) == stream.text == expected
    assert stream.stopped == (expected != text)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(Bytes(), ("END",))
    assert [stream.add(ord(c)) for c in "aENx"] == ["a", "", "", "ENx"]


def test_a_long_stop_string_costs_no_more_than_the_text() -> None:
    """A client chooses it, and all clients' tokens pass through one thread."""
    prefixes = []

    class Long(str):
        def __getitem__(self, part: Any) -> str:
            prefixes.append(part)
            return super().__getitem__(part)

    stream = TextStream(Bytes(), (Long("x" * 10_000),))
    assert [stream.add(ord(c)) for c in "axb"] == ["a", "", "xb"]
    assert len(prefixes) <= len("a") + len("x") + len("xb")


class Words(Fake):
    """A tokenizer that drops the first word's space, as SentencePiece does; 0 is a special token."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f" {id}" for id in ids if id).removeprefix(" ")


@pytest.mark.parametrize("ids", [[1, 0, 2, 3], [1, 0, 0, 0, 2], [0, 1, 0, 2]])
def test_a_token_without_text_costs_the_next_one_no_space(ids: list[int]) -> None:
    stream = TextStream(Words())
    text = "".join([*map(stream.add, ids), stream.end()])
    assert text == Words().decode(ids)


def test_the_first_word_keeps_its_space_where_it_goes_on_a_text() -> None:
    for before, expected in (((), "1 2"), ((5,), " 1 2"), ((0,), "1 2"), (tuple(range(1, 40)), " 1 2")):
        stream = TextStream(Words(), before=before)
        assert "".join([*map(stream.add, [1, 2]), stream.end()]) == stream.text == expected
    cat = "猫".encode()
    stream = TextStream(Bytes(), before=tuple(b"a" + cat[:1]))
    assert "".join([*map(stream.add, [*cat[1:], *b"b"]), stream.end()]) == "b"


class Fallback(Words):
    """As Llama's: words, and the bytes of what is none, of which a wrong one makes all beside it wrong."""

    def decode(self, ids: list[int], **_: object) -> str:
        text = ""
        for word, run in groupby(ids, lambda id: id > 255):
            part = list(run)
            try:
                text += "".join(f" {id}" for id in part) if word else bytes(part).decode()
            except UnicodeDecodeError:
                text += "\N{REPLACEMENT CHARACTER}" * len(part)
        return text.removeprefix(" ")


@pytest.mark.parametrize("before", ["猫猫你好喵", "é猫猫你", "🪨🪨🪨", "猫é🪨é"])
def test_the_first_word_keeps_its_space_behind_characters_of_several_tokens(before: str) -> None:
    for more in (b"", b"a", b"ab", b"abc"):
        stream = TextStream(Fallback(), before=(300, *before.encode(), *more))
        assert "".join([*map(stream.add, [301, 302]), stream.end()]) == " 301 302"


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    longest = 0

    class Counted(Words):
        def decode(self, ids: list[int], **_: object) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    stream = TextStream(Counted())
    assert "".join(map(stream.add, [1, *[0] * 1000, 2])).startswith("1") and longest < 100


class Harmony(Bytes):
    """Bytes, and Harmony's tokens above them."""

    special: ClassVar = {
        256: "<|start|>",
        257: "<|channel|>",
        258: "<|message|>",
        259: "<|end|>",
        260: "<|call|>",
    }

    def convert_tokens_to_ids(self, token: str) -> int:  # type: ignore[override]
        return {name: id for id, name in self.special.items()}.get(token)  # type: ignore[return-value]

    def decode(self, ids: list[int], skip_special_tokens: bool = True, **_: object) -> str:
        special = {} if skip_special_tokens else self.special
        runs = [special.get(id, "").encode() if id > 255 else bytes([id]) for id in ids]
        return b"".join(runs).decode("utf-8", errors="replace")


def harmony(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Pieces of an answer in which A to E stand for the tokens start, channel, message, end and call."""
    stream = TextStream(Harmony(), stop)
    ids = [id for c in text for id in ([256 + "ABCDE".index(c)] if c in "ABCDE" else c.encode())]
    return [*map(stream.add, ids), stream.end()], stream


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("BfinalCno.", "no."),
        ("BanalysisCwhy?DAassistantBfinalCno.", "<think>why?</think>no."),
        ("BanalysisCwhy? Bec", "<think>why? </think>"),
        ("BcommentaryCfirst DAassistantBfinalC猫", "first 猫"),
        (
            "BanalysisCwhy?DAassistantBcommentary to=functions.f jsonC{}E",
            "<think>why?</think>to=functions.f commentary json\n{}",
        ),
        (" to=functions.fBcommentary <|constrain|>jsonC{}E", " to=functions.f commentary json\n{}"),
        ("Bcommentary to=functions.f <|constrain|>jsonC{}E", "to=functions.f commentary json\n{}"),
        ("BanalysisCwhy?DAassistant to=f BcommentaryC{}", "<think>why?</think>to=f commentary\n{}"),
        ("plain", "plain"),
        ("C no header", " no header"),
        ("B" + "x" * 70, "x" * 70),
    ],
)
def test_headers_of_channels_are_no_text_and_analysis_is_thought(said: str, text: str) -> None:
    out, stream = harmony(said)
    assert "".join(out) == stream.text == text


def test_a_thought_comes_piece_by_piece_and_stop_strings_end_it() -> None:
    out, stream = harmony("BanalysisCsoDAassistantBfinalCno. halt", ("halt",))
    assert [piece for piece in out if piece][:5] == ["<think>", "s", "o", "</think>", "n"]
    assert stream.stopped and stream.text == "<think>so</think>no. "
    _, stream = harmony("BanalysisCa halt bDAassistantBfinalCno.", ("halt",))
    assert stream.stopped and stream.text == "<think>a "


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("[THINK]why?[/THINK]no.", "<think>why?</think>no."),  # as Ministral
        ("<|START_THINKING|>why?<|END_THINKING|><|START_TEXT|>no.<|END_TEXT|>", "<think>why?</think>no."),
        ("<|channel>why?<channel|>no.", "<think>why?</think>no."),  # as Gemma 4
        ("<think>why?</think>no.", "<think>why?</think>no."),
        ("why?</think>no.", "why?</think>no."),
        (
            # as Kimi-K3, whose prompt opens the thought
            "why?<|close|>think<|sep|><|open|>response<|sep|>no.<|close|>response<|sep|><|close|>message<|sep|>",
            "why?</think>no.",
        ),
        (
            '<|open|>think<|sep|><|close|>think<|sep|><|open|>call tool="f"<|sep|>1<|close|>call<|sep|>',
            '<think></think><call tool="f">1</call>',
        ),
        ("<|think|>why?<|end|><|begin|>assistant<|content|>no.", "<think>why?</think>no."),  # as Solar-Open
        ("<|content|>no.<|end|><|begin|>user<|content|>why?", "no."),  # which is another's
        ("<|think|>why?<|end|><|begin|>assistant<|tool_calls|>f", "<think>why?</think><|tool_calls|>f"),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_what_a_model_thinks_stands_in_think(said: str, text: str, special: bool) -> None:
    names = re.findall(r"<\|\w+\|>|\[/?THINK\]|</?think>|<\|channel>|<channel\|>", said)
    solar = ("<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|end|>")
    known = {*names, *(("<|open|>",) if "<|sep|>" in names else ()), *(solar if names[0] in solar else ())}

    class Tokens(Harmony):
        special: ClassVar = dict(enumerate(sorted(known), start=256))

        def decode(self, ids: list[int], skip_special_tokens: bool = True, **_: object) -> str:
            return super().decode(ids, skip_special_tokens and special)

    of = {name: id for id, name in Tokens.special.items()}
    pattern = "|".join(map(re.escape, names)) + "|."
    ids = [id for part in re.findall(pattern, said) for id in ([of[part]] if part in of else part.encode())]
    stream = TextStream(Tokens())
    assert "".join([*map(stream.add, ids), stream.end()]) == stream.text == text


class Marked(Bytes):
    """Bytes, a special token and one that is text."""

    added_tokens_decoder: ClassVar = {
        256: AddedToken("<|user|>", special=True),
        257: AddedToken("<tool>", special=False),
    }

    def decode(self, ids: list[int], **_: object) -> str:
        return b"".join(bytes([id]) if id < 256 else b"<tool>"[: 6 * (id - 256)] for id in ids).decode()


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("<|user|>",), "ab <tool>"),
        (("<tool>", "<|user|>"), "ab "),
        (("<|user|> later",), "ab <tool>c"),
        (("<tool>x", "<|user|>"), "ab <tool>"),  # what was held back is the answer's
    ],
)
def test_a_special_token_that_is_a_stop_string_ends_the_text(stop: tuple[str, ...], expected: str) -> None:
    stream = TextStream(Marked(), stop)
    out = [*map(stream.add, [*b"ab ", 257, 256, *b"c"]), stream.end()]
    assert "".join(out) == stream.text == expected
    assert stream.stopped == (expected != "ab <tool>c")


def test_a_mark_that_is_a_stop_string_ends_the_text() -> None:
    """Though it is no special token: it would be given out as </think>."""

    class Thinks(Harmony):
        special: ClassVar = {256: "[THINK]", 257: "[/THINK]"}
        added_tokens_decoder: ClassVar = {id: AddedToken(name) for id, name in special.items()}

    stream = TextStream(Thinks(), ("[/THINK]",))
    assert "".join(map(stream.add, [256, *b"why?", 257, *b"no."])) == "<think>why?" and stream.stopped


def test_end_tokens_are_no_text() -> None:
    out, _ = pieces("ab$", skip=(ord("$"),))
    assert "".join(out) == "ab"
