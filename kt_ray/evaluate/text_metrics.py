"""BLEU and ROUGE of one answer against its label, as LLaMA-Factory and KTransformers compute them.

Words are jieba's (Chinese is segmented, other scripts are split at spaces and punctuation). BLEU is
nltk's sentence BLEU with smoothing method 3 and equal weights for 1..n; ROUGE is rouge-chinese's F1.
`bleu-4-char` is LLaMA-Factory's bleu-4, over characters. All in percent, rounded to four digits, so
that the mean over a data set equals theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

BLEU_ORDERS = (1, 2, 3, 4)
TEXT_METRICS = (
    *(f"bleu-{n}" for n in BLEU_ORDERS),
    "bleu-4-char",
    "rouge-1",
    "rouge-2",
    "rouge-l",
)
"""Keys of `text_scores`, in the order of tables."""


def text_scores(prediction: str, label: str) -> dict[str, float]:
    """Every score of `TEXT_METRICS` for one pair, 0 to 100.

    A prediction or label without any word (empty, or only white space) scores 0 everywhere.
    """
    hypothesis, reference = words(prediction), words(label)
    if not "".join(hypothesis).strip() or not "".join(reference).strip():
        return dict.fromkeys(TEXT_METRICS, 0.0)
    scores = {f"bleu-{n}": bleu(hypothesis, reference, n) for n in BLEU_ORDERS}
    scores["bleu-4-char"] = bleu(list(prediction), list(label), 4)
    return scores | rouge(hypothesis, reference)


def words(text: str) -> list[str]:
    """The text cut by jieba, white space included: joined, they are the text again."""
    return list(_jieba().cut(text))


def bleu(hypothesis: Sequence[str], reference: Sequence[str], order: int) -> float:
    """Sentence BLEU over 1..order-grams with equal weights, smoothing method 3 (NIST), in percent."""
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    value = sentence_bleu(
        [reference],
        hypothesis,
        weights=(1 / order,) * order,
        smoothing_function=SmoothingFunction().method3,
    )
    return round(100 * float(value), 4)


def rouge(hypothesis: Sequence[str], reference: Sequence[str]) -> dict[str, float]:
    """F1 of ROUGE-1, ROUGE-2 (rouge-chinese) and ROUGE-L, in percent."""
    from rouge_chinese import Rouge

    joined = " ".join(hypothesis), " ".join(reference)
    f1 = Rouge(metrics=["rouge-1", "rouge-2"], stats=["f"]).get_scores(*joined)[0]
    scores = {name: round(100 * float(f1[name]["f"]), 4) for name in ("rouge-1", "rouge-2")}
    return scores | {"rouge-l": _rouge_l(*joined)}


def _rouge_l(hypothesis: str, reference: str) -> float:
    """As rouge-chinese, whose table of the whole product takes gigabytes for answers of some 3,000 words."""
    h, r = _rouge_words(hypothesis), _rouge_words(reference)
    common = lcs_length(h, r)
    precision, recall = common / len(h), common / len(r)
    # rouge-chinese's guard against 0 / 0, which shows in the last digits.
    return round(100 * 2 * (precision * recall / (precision + recall + 1e-8)), 4)


def _rouge_words(text: str) -> list[str]:
    """rouge-chinese's words: sentences first, and a blank line between two counts as an empty word."""
    sentences = _rouge().cut_sent(text)
    return [word for s in sentences if s for word in " ".join(s.split()).split(" ")]


def lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, by bit-parallel rows (Hyyrö 2004); memory O(len(a))."""
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    everything = (1 << len(a)) - 1
    row = everything
    for word in b:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & everything
    return len(a) - row.bit_count()


@cache
def _rouge() -> Any:
    from rouge_chinese import Rouge

    return Rouge()


@cache
def _jieba() -> Any:
    """A tokenizer of our own: other users' added words do not reach it, and no cache lies in /tmp."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jieba's regexes are older than Python's warnings about them
        import jieba

    tokenizer = jieba.Tokenizer()
    # What initialize() does, without its cache file in /tmp (which it trusts, whoever wrote it).
    tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
    tokenizer.initialized = True
    return tokenizer
