r"""Numbers as people and models write them: 1,234.5, -$3, 1/2, 1\frac{1}{2}, 25 %, 1.2e-3, 3 × 10^5, 2^3."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass

_DIGITS = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_RAISED = r"(?:\s?\^\s?|\*\*| \*\* )(?:\{[+-]?\d+\}|[+-]?\d+)"
_POSITIVE = rf"{_DIGITS}(?:[eE][+-]?\d+)?(?:{_RAISED})?"
_UNITS = {"%": 1e-2, "percent": 1e-2, "hundred": 1e2, "thousand": 1e3, "k": 1e3}
_UNITS |= {"million": 1e6, "billion": 1e9, "trillion": 1e12}
_SCALE = r"(?i:percent|hundred|thousand|million|billion|trillion)"
# No part of a word (CO2), of a version (1.2.3), of an exponent (m^2) or of a range (10-12, whose hyphen is no
# sign).
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.^])(?<!\^\{)(?<!\^-)(?<!\^\{-)(?P<sign>(?:(?<![\w)])[+-])?)\s?[$€£¥]?"
    rf"(?P<whole>(?:\d{{1,3}} {{1,2}}(?=\d+\s?/\s?\d))?)(?P<positive>{_POSITIVE})"
    r"(?:\s?(?:×|\\times|\*|·|\\cdot|x)\s?10\s?(?:\^|\*\*)\s?\{?(?P<power>[+-]?\d+)\}?)?"
    rf"(?:\s?/\s?(?P<divisor>-?{_POSITIVE}))?"
    rf"(?P<unit>\s?\\?%|\s{{0,2}}{_SCALE}\b|k\b|)"
)
_FULL_WIDTH = {0xFF01 + place: chr(0x21 + place) for place in range(94)} | {ord("，"): ", "}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_VULGAR = {ord(one): " " + unicodedata.normalize("NFKC", one).replace("⁄", "/") for one in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_BULLET = re.compile(r"(?<=\n)([ \t]*)-[ \t]+")  # of a list in Markdown: its hyphen is no sign
_MINUS = re.compile(r"−|(?:–|(?<![\d)] )\b(?i:minus|negative) )(?=[$€£¥]?\d)")
_LATEX_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")  # which separates no list
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|[\u00a0\u2009\u202f])(?=\d{3})")
# 3,5 and 1.234,5 in an answer, where no list or range is meant; the comma of 3,500 separates thousands.
_DECIMAL_COMMA = re.compile(
    r"(?<![A-Za-z0-9_.,(\[])(?<![(\[][ +-])(?<![(\[] [+-])(?<!\\\{)(?<!\\\{[ +-])(?<!\\\{ [+-])"
    r"(?![1-9]\d{0,2},\d{3}(?!\d))(\d+|\d{1,3}(?:\.\d{3})+),(\d+)(?![.,]?\d)"
)
_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.? \Z",  # not "decimal "
    re.IGNORECASE,
)
_REPEATED = re.compile(r"(?<!\d)(\d{0,9}\.\d{0,9})\\(?:overline|bar)\s*(?:\{(\d{1,9})\}|(\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d|,\d|\s?/|-[A-Za-z])")  # not 3 200-ml
_SPACE = re.compile(r"\\(?:[;: ]|left(?![a-z])|right(?![a-z]))|~")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}((?:\s*\^\s*\{?-?\d\}?)?)"
)
_KEPT_WORDS = re.compile(rf"\s*(?:{_SCALE}|or|and)\b")
# Behind a number, but no part of it: powers of units, degrees, the base of a numeral.
_LENGTH = r"(?:[cdkm]?m|ft|feet|in|inch(?:es)?|yd|yards?|mi|miles?|units?|met(?:er|re)s?)"
_NO_PART = re.compile(
    rf"(?<=\d)(\s?{_LENGTH}(?:/(?:{_LENGTH}|s))?)\s?\^\s?(?:\{{-?\d\}}|-?\d)"
    r"|\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![a-z]))|\^\{\s*(?:(?:st|nd|rd|th)\s*)?\}|\^(?=\s*(?:\}|$))"
    r"|(?<=\d)_\{\d+\}"
)
_FRACTION = re.compile(r"\\[cdt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
# What makes another number of one, or no number: 3\pi, \sqrt{16}, 2x, x + 1, 1/n, 5!, x > 5, ±5, |-5|.
_LETTER = r"(?!(?<=\d)e[+-]?\d)[abeinqrxyz](?![A-Za-z\d])"  # not that of 1.2e-3
_SYMBOL = re.compile(
    r"\\(?:pi|sqrt|log|ln|sin|cos|tan|infty|theta|pm|mp|leq?|geq?|lt|gt|neq?|[lr]floor|[lr]ceil)(?![a-z])"
    r"|[π√∞±≤≥≠]|(?<![A-Za-z])(?:pi(?![A-Za-z])|(?:sqrt|log|ln|sin|cos|tan)\s?[_^(\d])"
    rf"|\d{_LETTER}|\d\s[xyz]\b|[\d)]\s?[-+*/·×]\s?{_LETTER}|(?<![A-Za-z\\]){_LETTER}\s?[-+*/·×]\s?[\d(]"
    r"|(?<![</\w])[A-Za-z]\s?[<>]=?\s?-?\d|\d\s?[<>]=?\s?[A-Za-z]\b(?!>)|\A[^A-Za-z]*\d!|-\s?\(|\|"
)
_EQUALS = re.compile(r"=|≈|\\approx(?![a-z])")
_SEVERAL = re.compile(r"=[^=]*(?:[,;]|\b(?:or|and)\b)\s*[A-Za-z]\w{0,9}\s*=")  # x = 5 or x = 7
_BRACKETS = re.compile(
    r"\s*(?:\(.*,.*\)|\[.*,.*\]|\\\{.*,.*\\\})\s*", re.DOTALL
)  # a pair, an interval, a set
# A sum is taken whole, and only then looked at for its sign: to try it from each of its digits would take as
# long as the square of its length.
_OPERATOR = (
    r"(?:[-+*/×÷·]|\\times(?![a-z])|\\cdot(?![a-z])|\\div(?![a-z])|(?:of|times|plus|minus)\b|x(?![A-Za-z]))"
)
_BESIDE = rf"\){{0,3}}%?(?:(?: (?!{_OPERATOR})[A-Za-z]+){{1,3}}(?=\s*(?:{_OPERATOR}|[=)])))?\){{0,3}}"
_TERM = rf"\({{0,3}}[$€£¥]?(?:\d+ (?=\d+/\d))?{_DIGITS}%?"
_SUM = re.compile(
    rf"(?:(?P<root>\\sqrt\s?\{{{_DIGITS}\}})|{_TERM}(?P<raised>{_RAISED})?){_BESIDE}"
    rf"(?P<more>\s*{_OPERATOR}\s*{_TERM}(?:{_RAISED})?{_BESIDE})*(?P<equals>\s*(?:=|≈|\\approx\b|equals\b))?"
)
_ROUNDED_FRACTION = re.compile(rf"[$€£¥]?{_DIGITS}\s*/\s*{_DIGITS}\s*(?:≈|\\approx)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\?[{}]")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_HASHES = re.compile(r"####([^\n]*)")
_ANSWER_IS = (
    r"\banswers?\b(?: to (?:the|this|your) \w+)?[ \t*_]*"
    r"(?:is|are|was|equals|(?:would|should|must|will) be|[:=])"
)
_NOT = r"[\s*_:]{0,9}(?:not|n['’]t)\b"
_DENIED = re.compile(rf"{_ANSWER_IS}{_NOT}[^\w\n]{{0,9}}?(?:{_NUMBER.pattern})", re.IGNORECASE)
_STATEMENT = re.compile(
    rf"(?:{_ANSWER_IS}(?!{_NOT})"
    r"|答案[*_]*(?:应该|应当|应)?[是为:]"
    # not "Answer 3 questions", nor "For the final answer, 3 is added"
    r"|\bfinal answer(?=[^\w(\[,.;]{1,4}\d)"
    r"|^[^\w\n]{0,9}answer(?=[^\w\n]{1,4}[\d.,/]+%?[*_$]*[ \t]*(?:\(|$)))([^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_NEXT_LINE = re.compile(r"\s*([^\n]*)")


@dataclass(frozen=True)
class Number:
    """A number in a text.

    Attributes:
        value: without the word or sign behind it.
        factor: which that stands for: 0.01 of "%", 1e6 of "million".
    """

    value: float
    factor: float = 1.0


def same_number(stated: Number, expected: Number) -> bool:
    """Whether they are equal, up to 1e-6 of the larger unless both are whole. Against a plain number, 25 % is
    25 and 0.25, and a stated "3 million" is 3 and 3,000,000."""
    if stated.factor == expected.factor:
        return _same(stated.value, expected.value)
    plain = 1.0 in (stated.factor, expected.factor) and expected.factor <= 1.0
    return (plain and _same(stated.value, expected.value)) or _same(
        stated.value * stated.factor, expected.value * expected.factor
    )


def _same(a: float, b: float) -> bool:
    whole = a.is_integer() and b.is_integer()
    # A product of millions that is wrong by one is wrong. Beyond 2**53 doubles are rounded.
    return a == b or math.isclose(a, b, rel_tol=1e-15 if whole else 1e-6)


def stated_number(text: str) -> Number | None:
    r"""The number that a text settles on; None = none.

    The first of these that the text has, each the last of its kind: \boxed{x}, <answer>x</answer>, a line
    "#### x", "answer is x" (also "answer: x", "answer is 2 + 3 = x"), any number. A box or tag without
    exactly one number has none, and one with a root, \pi or a letter to be multiplied neither.
    """
    text = _DECIMAL_COMMA.sub(_with_point, _plain(text))
    marked, content = _marked(text)
    if marked:
        return _only(content)
    for statement in reversed(list(_STATEMENT.finditer(text))):
        if numbers := _numbers(_SUM.sub(_without_sum, _without_spaces(statement[1]))):
            return numbers[0]
        line = _NEXT_LINE.match(text, statement.end())
        if line and not re.search(r"\w", statement[1]) and (number := _alone(line[1])):
            return number
    numbers = _numbers(_DENIED.sub("", text))
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
    closing = None
    for tag in reversed(list(_TAG.finditer(text))):
        if closing and not tag[1]:
            return True, text[tag.end() : closing.start()]
        closing = closing or (tag if tag[1] else None)
    for line in reversed(_HASHES.findall(text)):  # a heading of Markdown ("#### Step 3") is no answer
        if _alone(line):
            return True, line.lstrip(" \t*_$").rstrip(" \t*_.$")
    return False, ""


def _alone(line: str) -> Number | None:
    """The number that a line consists of, with marks of LaTeX and Markdown around it."""
    line = _without_spaces(line.lstrip(" \t*_$[]\\").rstrip(" \t*_.$[]\\"))  # .5 has its point
    match = _NUMBER.fullmatch(line)
    numbers = _of_match(match) if match else []
    return numbers[0] if len(numbers) == 1 else None


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
    """One way of writing minus signs, separators of thousands, fractions and powers; without LaTeX's units
    and the hyphens of lists."""
    text = text.translate(_FULL_WIDTH | _VULGAR)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _MINUS.sub("-", _BULLET.sub(r"\1", text))
    text = _THOUSANDS.sub(",", text.replace("\\!", ""))
    text = _LATEX_COMMA.sub(".", text)
    text = _REPEATED.sub(lambda match: match[1] + (match[2] or match[3]) * 20, text)
    text = _SPACE.sub(" ", text.replace("\\,", "").replace("\\$", "$"))
    text = _WORDS.sub(_without_unit, text)
    text = _NO_PART.sub(lambda match: match[1] or "", text)
    return _FRACTION.sub(_slash, text)


def _without_unit(match: re.Match[str]) -> str:
    """A number in \\text stays, as do words that belong to one; others go."""
    content = _FRACTION.sub(_slash, match[1]).lstrip(" *_$")
    kept = _NUMBER.match(content) or _KEPT_WORDS.match(content)
    return f" {match[1].strip()} " if kept and not match[2] else " "


def _without_sum(match: re.Match[str]) -> str:
    """Of "48 + 24 = 72" and "2^3 = 8" what comes behind the sign; all of "10/3 ≈ 3.33"."""
    if _ROUNDED_FRACTION.fullmatch(match[0]):
        return match[0]
    computed = match["more"] or match["raised"] or match["root"]
    return "" if computed and match["equals"] else match[0]


def _without_spaces(text: str) -> str:
    """With 10000 for 10 000."""
    return _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)


def _with_point(match: re.Match[str]) -> str:
    """As it is in "January 3,2020"."""
    if len(match[2]) == 4 and _MONTH.search(match.string, max(0, match.start() - 12), match.start()):
        return match[0]
    return f"{match[1].replace('.', '')}.{match[2]}"


def _slash(match: re.Match[str]) -> str:
    space = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return f"{space}{match[1] or match[2] or ''}/{match[3] or match[4] or ''}"


def _only(text: str) -> Number | None:
    if _SEVERAL.search(text) or _BRACKETS.fullmatch(text):
        return None
    text = _without_spaces(text)
    for side in reversed(_EQUALS.split(text)):
        numbers = _numbers(side)
        if len(numbers) > 1 or _SYMBOL.search(side) or "^" in _NUMBER.sub("", side):
            return None
        if numbers:
            return numbers[0]
    return None


def _numbers(text: str) -> list[Number]:
    return [number for match in _NUMBER.finditer(text) for number in _of_match(match)]


def _of_match(match: re.Match[str]) -> list[Number]:
    """Of "1 1/2" one number, of "1 3/2" two; none where one is not finite."""
    try:
        value = _positive(match["positive"]) * 10.0 ** int(match["power"] or 0)
        if match["divisor"]:
            value /= _positive(match["divisor"])
    except (OverflowError, ZeroDivisionError, ValueError):
        return []
    values = [value]
    if match["whole"]:
        whole = float(match["whole"])
        values = [whole + value] if 0 < value < 1 else [whole, value]
    values[0] = -values[0] if match["sign"] == "-" else values[0]
    factor = _UNITS.get(match["unit"].strip(" \\\t\n").lower(), 1.0)
    return [Number(value, factor) for value in values] if all(map(math.isfinite, values)) else []


def _positive(text: str) -> float:
    """Of digits with an exponent, or raised to a power; a minus sign may stand before them."""
    digits, *power = re.split(r"\s?\^\s?|\s?\*\*\s?", text)
    value = abs(float(digits.replace(",", "")))
    value = value ** int(power[0].strip("{}")) if power else value
    return -value if text.startswith("-") else value
