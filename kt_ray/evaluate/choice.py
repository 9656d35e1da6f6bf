"""Answers that are right or wrong: exact match, and the letter of a multiple-choice question.

A letter comes from generated text (`extract_letter`) or from the logits of the options
(`argmax_letter`); the two are different measurements, and tables name them apart.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping

from kt_ray.errors import UserError

# Reasoning that some models write before they answer, in <think>, <mm:think> (MiniMax-M3) or
# <think:opensource> (Hy3). Unclosed: the answer was never reached.
_TAG = r"(?:\w{1,20}:)?think(?:ing)?(?::\w{1,20})?>"
_THINKING = re.compile(rf"<{_TAG}.*?(?:</{_TAG}|\Z)", re.DOTALL | re.IGNORECASE)
_THINKING_ENDS = re.compile(f"</{_TAG}", re.IGNORECASE)  # which the prompt has opened
# How prompts end that open one, other models' marks among them: see kt_ray.generate.detokenize.
_MARKS = r"\[THINK\]|<\|START_THINKING\|>|<\|think\|>|<\|open\|>think<\|sep\|>"
_THINKING_BEGUN = re.compile(rf"(?:<{_TAG}|{_MARKS})\s*\Z", re.IGNORECASE)

# Between a statement and its letter: white space, brackets, emphasis.
_BETWEEN = r"[\s(\[{<*_`\"'“‘:=]*"
_IS = (
    r"(?:\s+to\s+(?:the|this)\s+\w+)?(?:\s+(?:is|are|would be|must be|should be)\b"
    r"(?:\s+(?:(?:most\s+)?likely|probably|clearly|therefore|thus|hence|then|indeed|definitely)\b)?)?"
)
_HOLDS = "(?<!wrong )(?<!incorrect )(?<!(?<!or )(?<!/)false )(?<!n['’]t think the )(?<!n['’]t believe the )"
_STATEMENTS = (
    r"\\boxed\s*\{\s*(?:\\(?:text|mathrm|mathbf)\s*\{)?",
    rf"<answer>{_BETWEEN}",
    rf"{_HOLDS}\b(?:answers?|(?:correct|right|best)\s+(?:option|choice|letter))\b{_IS}"
    rf"{_BETWEEN}(?:(?:option|choice|letter)\s+[(\[*]*)?",
    rf"(?<!not )(?<!n['’]t )\b(?:choose|pick|select|go with)\b(?:\s+(?:option|choice|answer))?{_BETWEEN}",
    rf"(?:答案|正确选项)(?:应该|应当|应)?(?:是|为|选择|选)?{_BETWEEN}",
    rf"(?<!不)(?<!不应)(?:选择|选)(?!项){_BETWEEN}",
)
# A small letter where nothing else can be meant.
_SMALL = rf"(?im:{_HOLDS}\banswer(?:\s+is(?!\s+a\s*$)|\s*:)\s*[(\[*]*)((?i:%s))(?:[^\w\n]*$|(?<=\(.)\))"
_RIGHT = "correct|right|best|true|answer"
_IS_RIGHT = rf"(?i:[)\]*]*\s+(?:is|would be|must be)\s+(?:the\s+)?(?:{_RIGHT}|most\s\w+)\b)"
_OPTION = rf"(?i:(?<!\bnor )\b(?:option|choice)\s+[(\[*]*)(%s){_IS_RIGHT}"
# "Therefore, B is the best choice"; of "vitamin B is best" nobody knows.
_JUDGED = (
    r"(?i:\b(?:therefore|thus|hence|so|that|only|and|but)\s|[.,:;!?，。、；：]|^)\s*[(\[*]*"
    rf"(%s){_IS_RIGHT}"
)
_WRONG = (
    rf"[)\]*]*\s*(?:is (?:(?:an? |the )?(?:wrong|incorrect|false)|not (?:the )?(?:{_RIGHT}))|(?:是|项)?错)"
)
_DENIED = rf"[)\].:,*_`\"]*\s*(?i:(?:this|that|it)\s)?{_WRONG}"  # "A: This is wrong. B is correct."
_QUESTION = re.compile(r"(?<![^.!?。\n])[^.!?。\n]*\?")  # "A or B? B."
_END = r"(?!\w|['’]\w)"  # of an option's letter
# Two options in one breath settle nothing. "B is wrong" says something else.
_SECOND = (
    r"[)\]*}]*\s*(?:,|、|/|&|\band\b|\bor\b|和|或|与)\s*(?:and\s+|or\s+)?(?i:(?:maybe|perhaps)\s+)?"
    r"(?i:(?:option|choice|letter)\s+)?[(\[*]*(%s)(?!\w|['’]\w|[)\]*]*\s+(?:is|has|does|would)\b)"
)
# "The wrong answers are B and C", "not A or B", "I don't think it is B"
_CALLED_WRONG = (
    rf"(?i:\b(?:wrong|incorrect|false|worst)\s+(?:answer|option|choice|letter)s?\b{_IS}{_BETWEEN}|\bnot\s+"
    r"|(?:\bnot|n['’]t)\s+(?:choose|pick|select|go with|"
    r"(?:think|believe)\s+(?:that\s+)?(?:it|the answer)\s+is)"
    rf"{_BETWEEN}){{known}}{_END}(?:{_SECOND.replace('(%s)', '{known}')})*"
)
# "Neither A, B nor C"
_NEITHER = rf"(?i:\bneither\b[^.!?。\n]*\bnor\s+(?:(?:option|choice|letter)\s+)?[(\[*]*){{known}}{_END}"
# An answer to "Which option is incorrect?", if it names no other; of two options the other may be meant.
_ASKED_FOR = (
    r"(?i:\bthe\s+(?:only\s+)?(?:wrong|incorrect|false|worst)\s+(?:option|choice)\b"
    rf"{_IS}{_BETWEEN})(%s){_END}"
)
# After these words (in small letters) a single "A" is an option; after others it is the article.
_VERBS = ("is", "or", "and", "because", "since", "as", "but", "seems", "would", "must", "should", "for")


def exact_match(prediction: str, label: str) -> bool:
    """Whether both are the same text; white space counts as one space, full-width forms as ASCII ones."""
    return _plain(prediction) == _plain(label)


def without_thinking(text: str) -> str:
    """The text without reasoning in <think>; what follows a <think> that is not closed is reasoning, and so
    is what comes before a </think> that the text does not open."""
    text = _THINKING.sub("", text)
    ends = [match.end() for match in _THINKING_ENDS.finditer(text)]
    return text[ends[-1] :] if ends else text


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with <think>, so that the answer to it begins amid reasoning."""
    return _THINKING_BEGUN.search(prompt) is not None


def extract_letter(text: str, letters: str = "ABCD") -> str | None:
    """The option that a generated answer settles on; None = it names none, or several.

    In this order: the last statement of the kind "the answer is (B)", "答案：B", "\\boxed{B}"; the last of
    the kind "option B is correct"; a letter that begins the answer ("B", "(B)", "B. Paris", "**B**"), unless
    the options are listed (the first two begin lines, with a text) or it is called wrong; the only one that
    is called right ("B is correct"); a letter alone on the last line; the only option letter that stands
    alone anywhere and is not denied, outside of the answer's own questions if it can; of more than two
    options "the incorrect option is B", which one asks for, too. Reasoning in <think> is left out.
    Options are capital letters; a small one counts only where the whole answer, or all behind "answer:"
    or "answer is", is that letter, or where it stands there in brackets. An article ("A cat") or "I" is
    no option.
    """
    text = _plain(without_thinking(text), keep_lines=True)
    known = _options(letters)
    bare = re.fullmatch(rf"[^\w]*({known})[^\w]*", text, re.IGNORECASE)
    if bare:
        return bare[1].upper()
    patterns = [rf"(?i:{statement})({known}){_END}" for statement in _STATEMENTS] + [_SMALL % known]
    if stated := _found(text, *patterns):
        last = max(stated, key=lambda match: match.start(1))
        return None if _names_second(text[last.end(1) :], known) else last[1].upper()
    if options := _found(text, _OPTION % known):
        return options[-1][1]
    begun = rf"^[(\[*_`\"]*({known})(?:[)\].:、,，。*_`\"]|\s*[–—]|\s*-\s|\s*\n)"
    first = re.match(begun, text)
    by_itself = re.match(rf"[^\w\n]*{known}[^\w\n]*\n[^\n]*\w\w", text)
    # "B. incorrect" by itself is an option; of several lines so a judgement of each, but for "B. Wrong".
    begin = [*re.finditer(begun, text, re.MULTILINE)][:2]
    wrong = rf"{_DENIED}|[)\].:,*_`\"]*\s*(?:wrong|incorrect)\b" if len(begin) > 1 else _DENIED
    unlike = any(re.match(wrong, text[match.end(1) :]) for match in begin)
    listed = not (by_itself or unlike) and [match[1] for match in begin] == [*letters[:2]]
    rest = text[first.end(1) :] if first else ""
    if first and not (listed or re.match(wrong, rest) or _names_second(rest, known)):
        return first[1]
    judged = {match[1] for match in _found(text, _JUDGED % known)}
    if len(judged) == 1:
        return judged.pop()
    line = re.search(rf"\n[^\w\n]*({known})[^\w\n]*\Z", text)
    if line:
        return line[1]
    asked = [one for one in _found(text, _ASKED_FOR % known) if not _names_second(text[one.end(1) :], known)]
    text = re.sub(f"{_CALLED_WRONG}|{_NEITHER}".replace("{known}", known), "", text)
    denied = r"(?<!\b[nN][oO][rR] )(?<!n't )(?<!not be )(?<!n't be )(?<!不是)(?<!不选)"

    def named(text: str) -> set[str]:
        found = re.finditer(rf"(?<![A-Za-z0-9'’]){denied}({known})(?![A-Za-z0-9'’]|-\w|{_WRONG})", text)
        return {match[1] for match in found if not _is_word(text, match.end(1), match[1])}

    alone = named(_QUESTION.sub("", text)) or named(text)
    if len(asked) == 1 and not alone and len(letters) > 2:
        return asked[0][1]
    return alone.pop() if len(alone) == 1 else None


def label_letter(label: str, letters: str = "ABCD") -> str | None:
    """The option that a label consists of or begins with ("B", "(B)", "B. Paris"); None = it is no option.

    Stricter than `extract_letter`, since a label is not searched: it has to be written as one.
    """
    match = re.match(rf"[(\[]?({_options(letters)})(?:[)\].:、](?:\s|\Z|\w)|\Z)", _plain(label))
    return match[1] if match else None


def option_answers(label: str, letters: str = "ABCD") -> dict[str, str]:
    """What an answer would begin with for each option, written as the label writes its own.

    "(B) Paris" gives {"A": "(A)", "B": "(B)", …}, "B. Paris" gives "A.", and so on.

    Raises:
        ValueError: the label is no option.
    """
    match = re.match(rf"([(\[]?){_options(letters)}([)\].:、]?)", _plain(label))
    if match is None or label_letter(label, letters) is None:
        raise ValueError(f"{label[:60]!r} is none of the options {letters}")
    return {letter: f"{match[1]}{letter}{match[2]}" for letter in letters}


def argmax_letter(logits: Mapping[str, float]) -> str:
    """The option with the largest logit (or log-probability); the first of equal ones.

    Raises:
        UserError: no option, or a logit that is not a number.
    """
    if not logits or any(math.isnan(value) for value in logits.values()):
        raise UserError(
            "the logits of a multiple-choice question cannot be compared",
            observed=dict(logits),
            required="a number for every option",
        )
    return max(logits, key=lambda letter: logits[letter])


def _plain(text: str, *, keep_lines: bool = False) -> str:
    """NFKC (full-width letters become ASCII), white space collapsed, ends stripped."""
    text = unicodedata.normalize("NFKC", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return ("\n" if keep_lines else " ").join(line for line in lines if line)


def _options(letters: str) -> str:
    return f"[{re.escape(letters)}]"


def _found(text: str, *patterns: str) -> list[re.Match[str]]:
    """Where the patterns find a letter (group 1) that is no word."""
    matches = [match for pattern in patterns for match in re.finditer(pattern, text, re.MULTILINE)]
    return [match for match in matches if not _is_word(text, match.end(1), match[1])]


def _names_second(text: str, known: str) -> bool:
    """Whether another option follows in the same breath, not the article "A" or "I" (", I think")."""
    match = re.match(_SECOND % known, text)
    return match is not None and not _is_word(text, match.end(1), match[1])


def _is_word(text: str, end: int, letter: str) -> bool:
    """Whether the letter is the article "A" or the pronoun "I": a word in small letters follows it."""
    following = re.match(r" ([a-z]+)", text[end:])
    verbs = _VERBS if letter == "A" else ("is",)
    return letter in "AI" and following is not None and following[1] not in verbs
