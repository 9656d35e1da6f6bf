"""Text comes out as soon as it is certain, and never a stop string or what follows it."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.generate.detokenize import TextStream


class Bytes:
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


class Words:
    """A tokenizer that drops the first word's space, as SentencePiece does; 0 is a special token."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f" {id}" for id in ids if id).removeprefix(" ")


@pytest.mark.parametrize("ids", [[1, 0, 2, 3], [1, 0, 0, 0, 2], [0, 1, 0, 2]])
def test_a_token_without_text_costs_the_next_one_no_space(ids: list[int]) -> None:
    stream = TextStream(Words())
    text = "".join([*map(stream.add, ids), stream.end()])
    assert text == Words().decode(ids)


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    longest = 0

    class Counted(Words):
        def decode(self, ids: list[int], **_: object) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    stream = TextStream(Counted())
    assert "".join(map(stream.add, [1, *[0] * 1000, 2])).startswith("1") and longest < 100


def test_end_tokens_are_no_text() -> None:
    out, _ = pieces("ab$", skip=(ord("$"),))
    assert "".join(out) == "ab"
