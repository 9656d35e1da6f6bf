"""How good generated answers are: pure functions from texts, logits and loss sums to figures and tables."""

from kt_ray.evaluate.choice import argmax_letter, exact_match, extract_letter, label_letter
from kt_ray.evaluate.loss_sums import LossSum
from kt_ray.evaluate.predictions import Prediction, Predictions, read_predictions
from kt_ray.evaluate.scores import Scores, score
from kt_ray.evaluate.table import Comparison, compare
from kt_ray.evaluate.text_metrics import text_scores

__all__ = [
    "Comparison",
    "LossSum",
    "Prediction",
    "Predictions",
    "Scores",
    "argmax_letter",
    "compare",
    "exact_match",
    "extract_letter",
    "label_letter",
    "read_predictions",
    "score",
    "text_scores",
]
