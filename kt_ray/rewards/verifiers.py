"""Rewards that compare an answer with the column `answer` of its row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import regex

from kt_ray.errors import UserError
from kt_ray.evaluate.choice import exact_match, without_thinking
from kt_ray.parse import finds
from kt_ray.rewards.completion import Completion, go_on
from kt_ray.rewards.number_text import Number, only_number, same_number, stated_number

NO_REWARD = float("nan")


class Verifier(ABC):
    """A reward from 0 to 1 that depends on one text and one value of the column `answer` at a time.

    Attributes:
        name: the value of the option `reward`.
        required: what the column must hold.
        reads_reasoning: whether reasoning counts, which is else left out.
    """

    name: ClassVar[str]
    required: ClassVar[str]
    reads_reasoning: ClassVar[bool] = False

    @abstractmethod
    def check_answer(self, answer: Any) -> None:
        """Checks a value of the column.

        Raises:
            ValueError: texts cannot be compared with it.
        """

    @abstractmethod
    def score(self, text: str, answer: Any) -> float:
        """The reward of a text, 0 to 1; nan = none."""

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        answer = row.get("answer")
        try:
            if answer is None:
                columns = f"the columns {', '.join(map(str, row)) or 'none'}"
                raise ValueError("an `answer` that is empty" if "answer" in row else columns)
            self.check_answer(answer)
        except ValueError as error:
            raise UserError(
                f"reward={self.name} cannot judge answers to a row",
                where=where,
                observed=str(error),
                required=f"a column `answer`: {self.required}",
                remedy="correct the row or leave it out, name its column (data.columns={answer:solution}), "
                "or set another reward=",
            ) from error

    def __call__(self, completions: Sequence[Completion], waiting: Callable[[], None] = go_on) -> np.ndarray:
        texts = [c.text if self.reads_reasoning else c.judged for c in completions]
        scores = []
        for text, completion in zip(texts, completions, strict=True):
            waiting()  # one pattern may take a second, and a round has many answers
            scores.append(self.score(text, completion.row["answer"]))
        return np.array(scores, dtype=np.float64)

    def close(self) -> None:  # noqa: B027  most verifiers keep nothing running
        pass


class ExactMatch(Verifier):
    """1 where the text is (one of) the answer(s); white space as in `exact_match`."""

    name = "exact_match"
    required = "a text or a number, or a list of those that are accepted"

    def check_answer(self, answer: Any) -> None:
        for one in _several(answer):
            text = isinstance(one, str) and one.strip()
            number = isinstance(one, int) and not isinstance(one, bool)
            if not (text or number or (isinstance(one, float) and math.isfinite(one))):
                raise ValueError(shown(one))

    def score(self, text: str, answer: Any) -> float:
        text = without_thinking(text)
        accepted = [str(one) for one in _several(answer)]
        # A column of numbers that lacks one holds 7.0.
        accepted += [str(int(one)) for one in _several(answer) if isinstance(one, float) and one.is_integer()]
        return float(any(exact_match(text, one) for one in accepted))


class Regex(Verifier):
    """1 where a pattern is found in the text, nan where the search takes longer than a second."""

    name = "regex"
    required = "a regular expression, or a list of which one has to be found"
    reads_reasoning = True

    def check_answer(self, answer: Any) -> None:
        for one in _several(answer):
            if not isinstance(one, str) or not one:
                raise ValueError(shown(one))
            try:
                regex.compile(one)
            except (regex.error, RecursionError, OverflowError, MemoryError) as error:
                raise ValueError(f"{shown(one)}: {error}") from error

    def score(self, text: str, answer: Any) -> float:
        try:
            return float(any(finds(one, text, where="answer") for one in _several(answer)))
        except (UserError, regex.error):  # time, memory: who knows whether it would have been found
            return NO_REWARD


class Numeric(Verifier):
    """1 where the number that the text states equals (one of) the answer(s): `same_number`."""

    name = "numeric"
    required = "a number, a text that states one (#### 42), or a list of those that are accepted"

    def check_answer(self, answer: Any) -> None:
        for one in _several(answer):
            if _number(one) is None:
                raise ValueError(shown(one))

    def score(self, text: str, answer: Any) -> float:
        stated = stated_number(without_thinking(text))
        accepted = (_number(one) for one in _several(answer))
        return float(
            stated is not None and any(same_number(stated, one) for one in accepted if one is not None)
        )


def _number(answer: Any) -> Number | None:
    if isinstance(answer, str):
        return only_number(answer)
    if isinstance(answer, int | float) and not isinstance(answer, bool) and abs(answer) < 1e300:
        return Number(float(answer))
    return None


def _several(answer: Any) -> list[Any]:
    """Raises ValueError: an empty list."""
    if not isinstance(answer, list):
        return [answer]
    if not answer:
        raise ValueError("an empty list")
    return answer


def shown(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
