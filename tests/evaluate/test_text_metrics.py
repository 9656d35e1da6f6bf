"""BLEU and ROUGE: the golden file's digits, synthetic pairs, and the library behind ROUGE-L."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
from rouge_chinese import Rouge

from kt_ray.evaluate.text_metrics import TEXT_METRICS, bleu, lcs_length, rouge, text_scores, words

# What the golden file calls its scores.
NAMES = {f"kt_bleu-{n}": f"bleu-{n}" for n in (1, 2, 3, 4)} | {"lf_bleu-4_char": "bleu-4-char"}
NAMES |= {name: name for name in ("rouge-1", "rouge-2", "rouge-l")}


def test_every_golden_pair_to_the_last_digit():
    folder = os.environ.get("KT_RAY_TEST_DATA")
    if not folder:
        pytest.skip("KT_RAY_TEST_DATA names no folder with metrics/golden_metrics.json")
    golden = json.loads(Path(folder, "metrics", "golden_metrics.json").read_text(encoding="utf-8"))
    assert len(golden["items"]) == 59
    for item in golden["items"]:
        wanted = {NAMES[name]: value for name, value in item["scores"].items()}
        assert text_scores(item["prediction"], item["label"]) == wanted, item["prediction"]


# (prediction, label, scores by formula): n-gram precisions by hand, brevity exp(1 - |label|/|prediction|),
# and 1/2, 1/4, … of the denominator for orders without a match (method 3).
PAIRS = [
    ("red", "red", {"bleu-1": 100, "bleu-2": 70.7107, "bleu-3": 50, "bleu-4": 35.3553, "rouge-1": 100}),
    ("red", "blue", dict.fromkeys(TEXT_METRICS, 0.0) | {"bleu-4-char": None}),
    ("", "red", dict.fromkeys(TEXT_METRICS, 0.0)),
    (" \n ", "red", dict.fromkeys(TEXT_METRICS, 0.0)),
    ("red", "", dict.fromkeys(TEXT_METRICS, 0.0)),
    # characters: brevity exp(1 - 6/3), precisions 3/3, 2/2, 1/1, and 1/2 for the missing four-gram
    ("abc", "abcdef", {"bleu-4-char": round(100 * math.exp(-1) * 0.5**0.25, 4), "bleu-1": 0.0}),
    # words (with spaces between them, as jieba cuts): 5 of 5 unigrams, brevity exp(1 - 7/5)
    ("a b c", "a b c d", {"bleu-1": round(100 * math.exp(-0.4), 4), "rouge-2": 80.0, "rouge-l": 85.7143}),
    # jieba: 我 / 喜欢 / 猫 against 我 / 喜欢 / 狗
    ("我喜欢猫", "我喜欢狗", {"bleu-1": 66.6667, "bleu-2": 57.735, "rouge-1": 66.6667, "rouge-2": 50.0}),
]


@pytest.mark.parametrize(("prediction", "label", "wanted"), PAIRS)
def test_pairs_by_formula(prediction, label, wanted):
    found = text_scores(prediction, label)
    assert tuple(found) == TEXT_METRICS
    for name, value in wanted.items():
        if value is not None:
            assert found[name] == pytest.approx(value, abs=1e-4), name


def test_words_are_jiebas_and_join_to_the_text():
    text = "我来到北京清华大学, the end.\n"
    assert words(text) == ["我", "来到", "北京", "清华大学", ",", " ", "the", " ", "end", ".", "\n"]
    assert "".join(words(text)) == text


def test_rouge_l_is_the_librarys_on_odd_texts():
    """Blank lines, repeated full stops, quotes: whatever rouge-chinese makes of sentences."""
    pieces = ["我", "喜欢", "猫", "。", "！", "\n", "a", "b.", "......", "……", "”", "?", " "]
    source = random.Random(5)
    compared = 0
    for _ in range(300):
        h, r = ([source.choice(pieces) for _ in range(source.randint(1, 40))] for _ in range(2))
        if not "".join(h).strip() or not "".join(r).strip():
            continue
        library = Rouge().get_scores(" ".join(h), " ".join(r))[0]
        assert rouge(h, r) == {name: round(100 * score["f"], 4) for name, score in library.items()}
        compared += 1
    assert compared > 250


def test_lcs_length():
    assert lcs_length("ABCBDAB", "BDCABA") == 4
    assert lcs_length([], ["a"]) == lcs_length(["a"], []) == 0
    long = [str(i) for i in range(5000)]
    assert lcs_length(long, long[::2]) == 2500


def test_bleu_of_an_order_longer_than_the_text():
    assert bleu(["x"], ["x"], 4) == pytest.approx(100 * (1 / 2 * 1 / 4 * 1 / 8) ** 0.25, abs=1e-4)


def test_no_cache_file_is_read_or_written(tmp_path, monkeypatch):
    """jieba would trust /tmp/jieba.cache, whoever wrote it."""
    import tempfile

    from kt_ray.evaluate import text_metrics as text

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text._jieba.cache_clear()
    assert words("我喜欢猫") == ["我", "喜欢", "猫"]
    assert list(tmp_path.iterdir()) == []
