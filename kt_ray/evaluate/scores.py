"""All metrics of one model's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kt_ray.errors import UserError
from kt_ray.evaluate.choice import argmax_letter, exact_match, extract_letter, label_letter
from kt_ray.evaluate.loss_sums import LossSum
from kt_ray.evaluate.predictions import Prediction, Predictions
from kt_ray.evaluate.text_metrics import TEXT_METRICS, text_scores


@dataclass(frozen=True)
class Metric:
    """How a metric reads in a table.

    Attributes:
        name: its key.
        title: in tables.
        better: "higher" or "lower".
        percent: whether its values are percent.
    """

    name: str
    title: str
    better: str
    percent: bool = True


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
    """Metrics of one set of answers.

    Attributes:
        source: where the answers were read.
        rows: number of answers.
        metrics: metric name -> value, means over rows; those that do not apply are absent.
        per_row: per answer, metric name -> value, in the order of the file.
    """

    source: str
    rows: int
    metrics: dict[str, float]
    per_row: tuple[dict[str, float], ...]


def score(
    predictions: Predictions,
    *,
    choice: str = "auto",
    letters: str = "ABCD",
    on_row: Callable[[int], None] = lambda _: None,
) -> Scores:
    """Every metric that applies to these answers.

    BLEU, ROUGE and exact match always; letter accuracy for multiple choice; the option-logit accuracy
    where every row has option logits; loss and perplexity where every row has its sums.

    Args:
        predictions: at least one row.
        choice: "on" or "off"; "auto" = multiple choice if every label is an option letter.
        letters: of the options.
        on_row: called with the number of answers scored so far.

    Raises:
        UserError: choice="on" and a label that is no option.
    """
    answers = choice_labels(predictions, choice, letters)
    per_row: list[dict[str, float]] = []
    for number, row in enumerate(predictions.rows):
        answer = answers[number] if answers else None
        per_row.append(_score_row(row, answer, letters))
        on_row(number + 1)
    shared = [m.name for m in METRICS if all(m.name in scores for scores in per_row)]
    metrics = {name: sum(r[name] for r in per_row) / len(per_row) for name in shared}
    # Means of per-row losses would weigh short answers too much.
    metrics.pop("loss", None)
    metrics.pop("perplexity", None)
    loss = _loss(predictions.rows)
    if loss is not None:
        metrics = {"loss": loss.loss, "perplexity": loss.perplexity, **metrics}
    return Scores(predictions.source, len(per_row), metrics, tuple(per_row))


def _score_row(row: Prediction, answer: str | None, letters: str) -> dict[str, float]:
    scores = text_scores(row.prediction, row.label)
    scores["exact_match"] = 100.0 * exact_match(row.prediction, row.label)
    if answer is not None:
        found = extract_letter(row.prediction, letters)
        scores["letter_accuracy"] = 100.0 * (found == answer)
        scores["letter_found"] = 100.0 * (found is not None)
        if row.option_logits:
            scores["letter_accuracy_logits"] = 100.0 * (argmax_letter(row.option_logits) == answer)
    if row.loss is not None and row.loss.tokens:
        scores["loss"], scores["perplexity"] = row.loss.loss, row.loss.perplexity
    return scores


def choice_labels(predictions: Predictions, choice: str, letters: str) -> list[str] | None:
    """The option of every label; None = this is no multiple choice.

    Raises:
        UserError: choice="on" and a label that is no option.
    """
    if choice == "off":
        return None
    found: list[str] = []
    for number, row in enumerate(predictions.rows, 1):
        letter = label_letter(row.label, letters)
        if letter is None and choice == "on":
            raise UserError(
                "a label of the multiple-choice questions is no option",
                where=f"{predictions.source}, row {number}",
                observed=repr(row.label[:60]),
                required=f"one of {', '.join(letters)}, alone or before '.', ')' or ':'",
                remedy="set eval.letters to the options' letters, or eval.choice=auto",
            )
        if letter is None:
            return None
        found.append(letter)
    return found


def _loss(rows: Sequence[Prediction]) -> LossSum | None:
    """The sum over all rows; None unless every row has one and there is a token."""
    total = LossSum()
    for row in rows:
        if row.loss is None:
            return None
        total += row.loss
    return total if total.tokens else None
