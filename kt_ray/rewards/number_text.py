r"""Numbers as people and models write them: 1,234.5, -$3, 1/2, \frac{1}{2}, 25 %, 1.2e-3, 3 × 10^5."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
# No part of a word (CO2), of a version (1.2.3) or of a range (10-12, whose hyphen is no sign).
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.])(?P<sign>(?:(?<![\w)])[+-])?)\s?[$€£¥]?(?P<digits>{_DIGITS})(?P<exponent>[eE][+-]?\d+)?"
    r"(?:\s?(?:×|\\times|\*|·|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?(?P<power>[+-]?\d+)\}?)?"
    rf"(?:\s?/\s?(?P<divisor>{_DIGITS}(?:[eE][+-]?\d+)?))?(?P<percent>\s?\\?%|\s?percent\b)?"
)
# 10^6 by itself; behind a sign of multiplication it is a part of _NUMBER.
_POWER = re.compile(
    r"(?P<times>(?:×|\\times|\*|·|\\cdot)\s?)?(?<![\w.,^*])10\s?(?:\^|\*\*)\s?"
    r"(?P<brace>\{)?(?P<power>[+-]?\d++)(?(brace)\})(?!\.?\d)"
)
_BULLET = re.compile(r"(?<=\n)([ \t]*)-[ \t]+")  # of a list in Markdown: its hyphen is no sign
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3})")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}((?:\s*\^\s*\{?-?\d\}?)?)")
# What makes another number of one: 3\pi, \sqrt{16}.
_SYMBOL = re.compile(r"\\(?:pi|sqrt|log|ln|sin|cos|tan|infty|theta)(?![a-z])|[π√∞]")
# A sum is taken whole, and only then looked at for its sign: to try it from each of its digits would take as
# long as the square of its length.
_RAISED = r"\s?\^\s?\{?\d+\}?"
_TERM = rf"[$€£¥]?{_DIGITS}%?"
_SUM = re.compile(
    rf"(?:(?P<root>\\sqrt\s?\{{{_DIGITS}\}})|{_TERM}(?P<raised>{_RAISED})?)"
    rf"(?P<more>\s*(?:[-+*/×÷·]|\\times|\\cdot|\\div)\s*{_TERM}(?:{_RAISED})?)*(?P<equals>\s*=)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
_BRACE = re.compile(r"\\boxed\s*\{|\\?[{}]")
_HASHES = re.compile(r"####([^\n]*)")
_STATEMENT = re.compile(r"\banswers?\b[ \t*_]*(?:is|are|[:=])([^\n]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Number:
    """A number in a text.

    Attributes:
        value: without its percent sign.
        percent: whether it has one.
    """

    value: float
    percent: bool = False


def same_number(a: Number, b: Number) -> bool:
    """Whether they are equal, up to 1e-6 of the larger unless both are whole. Against a plain number, 25 % is
    25 and 0.25."""
    values = [b.value]
    if a.percent != b.percent:
        values = [b.value, b.value * 100 if a.percent else b.value / 100]
    return any(_same(a.value, value) for value in values)


def _same(a: float, b: float) -> bool:
    whole = a.is_integer() and b.is_integer()
    # A product of millions that is wrong by one is wrong. Beyond 2**53 doubles are rounded.
    return a == b or math.isclose(a, b, rel_tol=1e-15 if whole else 1e-6)


def stated_number(text: str) -> Number | None:
    r"""The number that a text settles on; None = none.

    The first of these that the text has, each the last of its kind: \boxed{x}, <answer>x</answer>, a line
    "#### x", "answer is x" (also "answer: x", "answer is 2 + 3 = x"), any number. A box or tag without
    exactly one number has none, and one with a root or \pi neither.
    """
    text = _plain(text)
    marked, content = _marked(text)
    if marked:
        return _only(content)
    for content in reversed(_STATEMENT.findall(text)):
        if numbers := _numbers(_SUM.sub(_without_sum, content)):
            return numbers[0]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def only_number(text: str) -> Number | None:
    r"""The number of a reference: in \boxed{}, <answer> or behind "####", else the only one of the text."""
    text = _plain(text)
    marked, content = _marked(text)
    return _only(content if marked else text)


def _marked(text: str) -> tuple[bool, str]:
    """Whether a mark says what the answer is, and the text in it."""
    boxes = _boxes(text)
    if boxes:
        return True, boxes[-1]
    before, tag, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    if tag and opening:
        return True, content
    for line in reversed(_HASHES.findall(text)):  # a heading of Markdown ("#### Step 3") is no answer
        content = line.strip(" \t*_.$")
        match = _NUMBER.fullmatch(content)
        if match and _value(match) is not None:
            return True, content
    return False, ""


def _boxes(text: str) -> list[str]:
    r"""The contents of all \boxed{…} that are closed, in the order in which they close."""
    contents, open_at = [], []
    for match in _BRACE.finditer(text):
        if match[0] in ("\\{", "\\}"):
            continue
        if match[0] != "}":
            open_at.append(match.end() if match[0] != "{" else None)
        elif open_at and (start := open_at.pop()) is not None:
            contents.append(text[start : match.start()])
    return contents


def _plain(text: str) -> str:
    """One way of writing minus signs, separators of thousands, fractions and 10^6; without LaTeX's units and
    the hyphens of lists."""
    text = _BULLET.sub(r"\1", text)
    text = _THOUSANDS.sub(",", text.replace("\u2212", "-").replace("\\!", ""))
    text = text.replace("\\,", "").replace("\\$", "$")
    text = _POWER.sub(lambda match: match[0] if match["times"] else f"1e{match['power']}", text)
    text = _WORDS.sub(_without_unit, text)
    return _FRACTION.sub(_slash, text)


def _without_unit(match: re.Match[str]) -> str:
    """A number in \\text stays, words go."""
    number = _NUMBER.fullmatch(match[1].strip(" *_.$")) is not None
    return f" {match[1]} " if number and not match[2] else " "


def _without_sum(match: re.Match[str]) -> str:
    """Of "48 + 24 = 72" and "2^3 = 8" what comes behind the sign."""
    computed = match["more"] or match["raised"] or match["root"]
    return "" if computed and match["equals"] else match[0]


def _slash(match: re.Match[str]) -> str:
    space = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return f"{space}{match[1] or match[3]}/{match[2] or match[4]}"


def _only(text: str) -> Number | None:
    content = text.rpartition("=")[2]
    numbers = _numbers(content)
    return numbers[0] if len(numbers) == 1 and not _SYMBOL.search(content) else None


def _numbers(text: str) -> list[Number]:
    found = ((match, _value(match)) for match in _NUMBER.finditer(text))
    return [Number(value, bool(match["percent"])) for match, value in found if value is not None]


def _value(match: re.Match[str]) -> float | None:
    """None: not finite."""
    try:
        value = float(match["digits"].replace(",", "") + (match["exponent"] or ""))
        value *= 10.0 ** int(match["power"] or 0)
        if match["divisor"]:
            value /= float(match["divisor"].replace(",", ""))
    except (OverflowError, ZeroDivisionError, ValueError):
        return None
    return (-value if match["sign"] == "-" else value) if math.isfinite(value) else None
