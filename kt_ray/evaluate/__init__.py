"""How good generated answers are: pure functions from texts, logits and loss sums to figures and tables."""

from kt_ray.evaluate.answer_file import AnswerFile, AnswerRow, read_answers
from kt_ray.evaluate.choice import argmax_letter, exact_match, extract_letter, label_letter
from kt_ray.evaluate.loss_sums import LossSum
from kt_ray.evaluate.scores import Scores, score
from kt_ray.evaluate.table import Comparison, compare
from kt_ray.evaluate.text_metrics import text_scores

__all__ = [
    "AnswerFile",
    "AnswerRow",
    "Comparison",
    "LossSum",
    "Scores",
    "argmax_letter",
    "compare",
    "exact_match",
    "extract_letter",
    "label_letter",
    "read_answers",
    "score",
    "text_scores",
]
