"""All metrics of one model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kt_ray.errors import UserError
from kt_ray.evaluate.answer_file import AnswerFile, AnswerRow
from kt_ray.evaluate.choice import argmax_letter, exact_match, extract_letter, label_letter, without_thinking
from kt_ray.evaluate.loss_sums import LossSum, loss_figures
from kt_ray.evaluate.text_metrics import TEXT_METRICS, text_scores


@dataclass(frozen=True)
class Metric:
    """How a metric reads in a table."""

    name: str  # its key
    title: str  # in tables
    better: str  # "higher" or "lower"
    percent: bool = True  # whether its values are percent


METRICS: tuple[Metric, ...] = (
    Metric("loss", "loss (nats/token)", "lower", percent=False),
    Metric("perplexity", "perplexity", "lower", percent=False),
    *(Metric(name, name.upper().replace("-CHAR", " (characters)"), "higher") for name in TEXT_METRICS),
    Metric("exact_match", "exact match", "higher"),
    Metric("letter_accuracy", "letter accuracy (generated)", "higher"),
    Metric("letter_found", "answers with a letter", "higher"),
    Metric("letter_accuracy_logits", "letter accuracy (option logits)", "higher"),
)
"""Every metric that an evaluation may have, in the order of tables."""


@dataclass(frozen=True)
class Scores:
    """A set of answers and its metrics."""

    answers: AnswerFile  # what was scored
    metrics: dict[str, float]  # metric name -> value, mean over rows; metrics that do not apply are absent

    @property
    def rows(self) -> int:
        """Number of answers."""
        return len(self.answers.rows)


def score(answers: AnswerFile, *, choice: str = "auto", letters: str = "ABCD") -> Scores:
    """Means over all rows.

    Text scores and exact match always; letter accuracy for multiple choice, from logits as well where
    every row has option logits; loss and perplexity where every row has its sums.

    Args:
        answers: at least one row.
        choice: "on" or "off"; "auto" = multiple choice if every label is an option letter.
        letters: of the options.

    Raises:
        UserError: choice="on" and a label that is no option.
    """
    options: Sequence[str | None] = choice_labels(answers, choice, letters) or [None] * len(answers.rows)
    by_row = [_score_row(*each, letters) for each in zip(answers.rows, options, strict=True)]
    shared = [m.name for m in METRICS if all(m.name in scores for scores in by_row)]
    metrics = {name: sum(scores[name] for scores in by_row) / len(by_row) for name in shared}
    # A mean of the rows' losses would weigh short answers too much.
    losses = [row.loss for row in answers.rows if row.loss is not None]
    total = sum(losses, LossSum())
    if len(losses) == len(answers.rows) and total.tokens:
        metrics = loss_figures(total.loss) | metrics
    return Scores(answers, metrics)


def _score_row(row: AnswerRow, option: str | None, letters: str) -> dict[str, float]:
    scores = text_scores(row.answer, row.label)
    answer, label = without_thinking(row.judged), without_thinking(row.label)
    # A row without a label has nothing that an answer could match, an empty one neither.
    scores["exact_match"] = 100.0 * (bool(label.strip()) and exact_match(answer, label))
    if option is not None:
        letter = extract_letter(row.judged, letters)
        scores["letter_accuracy"] = 100.0 * (letter == option)
        scores["letter_found"] = 100.0 * (letter is not None)
        if row.option_logits:
            scores["letter_accuracy_logits"] = 100.0 * (argmax_letter(row.option_logits) == option)
    return scores


def choice_labels(answers: AnswerFile, choice: str, letters: str) -> list[str] | None:
    """The option of every label; None = this is no multiple choice.

    Raises:
        UserError: choice="on" and a label that is no option.
    """
    if choice == "off":
        return None
    options: list[str] = []
    for number, row in enumerate(answers.rows, 1):
        letter = label_letter(row.label, letters)
        if letter is not None:
            options.append(letter)
        elif choice == "on":
            raise UserError(
                "a label of the multiple-choice questions is no option",
                where=f"{answers.source}, row {number}",
                observed=repr(row.label[:60]),
                required=f"one of {', '.join(letters)}, alone or before '.', ')' or ':'",
                remedy="set eval.letters to the options' letters, or eval.choice=auto",
            )
        else:
            return None
    return options
