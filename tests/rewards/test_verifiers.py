"""Verifiers against the column `answer`: what is right, what is wrong, which rows are refused."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from kt_ray.errors import UserError
from kt_ray.rewards.reward import Completion, load_reward


def reward(name: str, text: str, answer: Any) -> float:
    """The reward of one text, after its row was checked."""
    verifier = load_reward(name)
    row = {"answer": answer}
    verifier.check_row(row, "rows.jsonl, row 1")
    value = verifier([Completion("question", text, [1, 2], True, row)])
    assert value.dtype == "float64" and value.shape == (1,)
    return float(value[0])


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (" Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("Lyon", ["Paris", "Lyon"], 1),
        ("7", 7, 1),
        ("1" + "0" * 400, 10**400, 1),
        *[(text, 7.0, 1) for text in ("7", "7.0")],
        ("<think>Lyon?</think>\nParis", "Paris", 1),
        ("Lyon? It is not.</think>Paris", "Paris", 1),
        ("<think>Paris", "Paris", 0),
    ],
)
def test_exact_match(text: str, answer: Any, expected: float) -> None:
    assert reward("exact_match", text, answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<think>x</think><answer>3</answer>", r"^<think>.*</think><answer>\d</answer>$", 1),
        ("none", r"\d", 0),
        ("b", ["a", "b"], 1),
    ],
)
def test_regex(text: str, answer: Any, expected: float) -> None:
    assert reward("regex", text, answer) == expected


def test_an_answer_cut_amid_reasoning_that_the_prompt_opened() -> None:
    for name, text, answer in (
        ("numeric", "First 6*7 = 42. Hmm", 42),
        ("exact_match", "Paris", "Paris"),
        ("json_schema", "{}", {}),
        ("code", "```python\nx = 1\n```\nBut", "assert x == 1"),
    ):
        verifier = load_reward(name)
        for opened, end, expected in ((True, "", 0), (False, "", 1), (True, f"</think>\n{text}", 1)):
            completion = Completion("question", text + end, [1], False, {"answer": answer}, opened)
            assert verifier([completion]).tolist() == [expected], (name, opened)
        verifier.close()
    row = {"answer": "^First"}
    assert load_reward("regex")([Completion("question", "First", [1], False, row, True)]).tolist() == [1]


def test_a_pattern_that_never_ends_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.parse._PATTERN_SECONDS", 0.05)
    assert math.isnan(reward("regex", "a" * 40 + "!", r"^(a|a)*$"))
    schema = {"type": "string", "pattern": r"^(a|a)*$"}
    assert math.isnan(reward("json_schema", '"' + "a" * 40 + '!"', schema))
    schema = {"patternProperties": {r"^(a|a)*$": {}}}
    assert math.isnan(reward("json_schema", '{"' + "a" * 40 + '!": 1}', schema))


def test_answers_are_judged_one_by_one_until_a_signal_comes() -> None:
    asked = []

    def waiting() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise InterruptedError

    answers = [Completion("question", "a", [1], True, {"answer": "a"})] * 5
    with pytest.raises(InterruptedError):
        load_reward("regex")(answers, waiting)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        # The order of marks.
        (r"7 or \boxed{8}, <answer>9</answer>", 8, 1),
        (r"#### 7" + "\n<answer>9</answer> 10", 9, 1),
        ("The answer is 3.\n#### 5\nin 6 steps", 5, 1),
        ("The answer is 3, found in 6 steps.", 3, 1),
        ("The answer is not 5, it is 6.", 6, 1),
        ("The answer isn't 5 but 6", 5, 0),
        ("It is 6. So the answer is **not** 5/7.", 6, 1),
        ("The answer is: not $5", 5, 0),
        ("**Answer:** $1,234.50 for 2 people", 1234.5, 1),
        ("first 3, then 4.", 4, 1),
        (r"\boxed{1} then \boxed{x = \frac{1}{2}}", "1/2", 1),
        (r"\boxed{5\text{ m}^2}", 5, 1),
        (r"\boxed{1 2 3}", 3, 0),
        ("#### Step 3: add\nThis gives 8", 8, 1),
        (r"4, so \boxed{4", 4, 1),
        ("The answer is 48 + 24 = 72.", 72, 1),
        ("The answer is 48 + 24 = 72.", 48, 0),
        ("The answer is $2^3 = 8$.", 8, 1),
        (r"The answer is 3^{2} + 4 \cdot 2^3 = 41", 41, 1),
        (r"The answer is $\sqrt{16} = 4$, as 4 = 2^2.", 4, 1),
        ("The answer is 8 = 2^3", 8, 1),
        ("The answer is 10^2 = 100", 100, 1),
        ("The answer is x = 2*3 = 6, as 5 = 4 + 1.", 6, 1),
        (r"\boxed{\text{42}}", 42, 1),
        (r"\boxed{3\pi}", 3, 0),
        (r"\boxed{\sqrt{16}}", 16, 0),
        *[
            (rf"\boxed{{{no}}}", 5, 0)
            for no in ("5x", "x + 5", "1/x + 5", "x^5", "5^n", "5!", "x > 5", r"\pm 5")
        ],
        *[(rf"\boxed{{{no}}}", 5, 0) for no in (r"x = 3 \text{ or } x = 5", "x=3, y=5", "-(5)", "|5|")],
        (r"\boxed{(1,200)}", 1200, 0),
        (r"\boxed{5 = x}", 5, 1),
        (r"\boxed{\sqrt{2} \approx 1.41}", 1.41, 1),
        (r"\fbox{5} in 3 steps", 5, 1),
        ("<Answer>5</Answer> in 3 steps", 5, 1),
        ("The answer would be 5 in 3 steps", 5, 1),
        ("The answer to the question is 5, in 3 steps", 5, 1),
        ("The answer is:\n$$5$$\nThis took 3 steps", 5, 1),
        ("Answer:\n1. We add.\nSo it is 5", 5, 1),
        ("答案是5。共3步", 5, 1),
        ("The answer is 6 x 7 = 42.", 42, 1),
        ("The answer is (48 clips + 24 clips) / 2 = 36 clips", 36, 1),
        ("The answer is 25% of 80 = 20", 20, 1),
        ("The answer is 42 (6 * 7 = 42)", 42, 1),
        *[(f"{said} 42 (3 per box)", 42, 1) for said in ("answer", "So.\n**Answer**", "Final answer")],
        ("Final answer (in 3 steps) 42", 42, 1),
        ("Final answer (3 steps): 42", 42, 1),
        *[(f"For the final answer{after} 3 is added to 4, giving 7", 7, 1) for after in (",", ". So", ".")],
        ("The answer is 3 200-ml bottles", 3, 1),
        ("To answer 3 questions\nAnswer 4 questions\nin 5 hours", 5, 1),
        (r"The answer is $\frac{10}{3} \approx 3.33$.", "10/3", 1),
        ("The answer is 2 * 10/3 ≈ 6.67", 6.67, 1),
        # Ways of writing.
        *[
            (more, 1.5, 1)
            for more in (
                "1 1/2",
                r"1\frac{1}{2}",
                r"\boxed{1 \frac12}",
                "1½",
                r"\cfrac{3}2",
                r"\frac{-3}{-2}",
            )
        ],
        ("-1 1/2", -1.5, 1),
        ("In 2024 3/4", 0.75, 1),
        *[
            (f"It is {unit}.", 12, 1)
            for unit in ("12 m^2", "12 m²", r"12\text{ m/s}^2", r"12\mathrm{\,m\,s^{-1}}")
        ],
        *[
            (rf"\boxed{{{unit}}}", 12, 1)
            for unit in ("12 cm^2", r"\text{12 apples}", r"12^{\circ}", "12_{10}")
        ],
        (r"\boxed{2^{10}}", 1024, 1),
        ("2³", 8, 1),
        ("3 x 10⁸", 3e8, 1),
        ("**42** 5", 5, 1),
        (r"\boxed{10 000}", 10000, 1),
        *[(f"{minus}42", -42, 1) for minus in ("–", "minus ", "negative ")],
        ("5 minus 3", 3, 1),
        ("$3 million", 3e6, 1),
        ("$3 million", 3, 1),
        ("3", "3 million", 0),
        ("3 million", "3 billion", 0),
        ("3k", 3000, 1),
        ("１２％", 0.12, 1),
        (r"\boxed{12\text{ percent}}", 0.12, 1),
        ("-3", -3, 1),
        ("−3", -3, 1),
        ("The answer is:\n\n- 42", 42, 1),
        ("The answers:\n  - -42", -42, 1),
        ("- 3", -3, 1),
        ("x =\n-3", -3, 1),
        ("10-12", 12, 1),
        ("1,000,000", 1e6, 1),
        *[
            (f"{comma}{end}", 3.5, 1)
            for comma in ("3,5", "The answer is 3,5", "答案是3,5", "#### 3,5", r"\boxed{3,50}")
            for end in ("", ".")
        ],
        *[(f"{month} 13,2020", 2020, 1) for month in ("It began on January", "Since Sept.", "from may")],
        ("in May 3,2", 3.2, 1),
        *[(f"{word} 0,1234", 0.1234, 1) for word in ("as a decimal", "four decimals:", "marks")],
        ("0,125", 0.125, 1),
        ("0,125", 125, 0),
        ("1.234.567,89 €", 1234567.89, 1),
        ("3,500", 3500, 1),
        (r"\boxed{3{,}5}", "3{,}5", 1),
        *[(several, 3.5, 0) for several in (r"\boxed{(3,5)}", r"\boxed{\{3,5\}}", "3,5,7", "3, 5", "1,3,5")],
        *[
            (rf"\boxed{{{several}}}", -3.5, 0)
            for several in ("(-3,5)", "x \\in [ -3,5 ]", r"\{-3,5\}", r"\left( -3,5 \right)")
        ],
        ("The answer is 12 345.", 12345, 1),
        ("#### 12 345", "12,345", 1),
        (r"0.\overline{3}", "1/3", 1),
        (r"\boxed{0.1\overline{6}}", r"1/6", 1),
        (r"\boxed{0.\bar9}", 1, 1),
        (r"1{,}000\,000", 1e6, 1),
        ("3/4", 0.75, 1),
        (r"-\frac{3}{4}", -0.75, 1),
        ("1.5e-3", 0.0015, 1),
        (r"3 \times 10^{5}", 300000, 1),
        ("The answer is -10^3.", -1000, 1),
        (r"\boxed{10^{-3}}", 0.001, 1),
        (r"So $\boxed{10^6}$. I checked it 3 times.", 10**6, 1),
        (r"\boxed{\frac{1}{10^6}}", 1e-6, 1),
        (r"\boxed{3/10^2}", 0.03, 1),
        (r"\boxed{10^2 + 10^3}", 1000, 0),
        (r"\boxed{1.2e-3}", "1.2e-03", 1),
        (r"\boxed{1e+6}", 10**6, 1),
        (r"\boxed{e-3}", 3, 0),
        (r"\boxed{\textbf{\frac{3}{4}}}", 0.75, 1),
        ("#### .5", 0.5, 1),
        ("The answer is:\n.5\nin 3 steps", 0.5, 1),
        *[(rf"\boxed{{12^{th}}}", 12, 1) for th in ("{th}", r"\text{th}", r"{\text{th}}")],
        ("1000000", "10**6", 1),
        (r"3\cdot10^5", 3e5, 1),
        ("110^2", 100, 0),
        ("25%", 25, 1),
        ("25%", 0.25, 1),
        ("0.25", "25%", 1),
        ("25%", "2500%", 0),
        ("0.3333333", "1/3", 1),
        ("0.3333", "1/3", 0),
        ("7006652", 7006651, 0),
        ("7006651.0", 7006651, 1),
        ("1e23", "10^{23}", 1),
        ("3 \\times 10^{20}", 3e20, 1),
        ("123456789012345679", "123456789012345578", 1),  # doubles have no more digits
        ("123456789012346", "123456789012345", 0),
        ("29%", 0.29, 1),
        ("CO2", 2, 0),
        ("1/0", 1, 0),
        ("9" * 400, 1, 0),
        ("no number", 1, 0),
        # Answers.
        ("42", "6 * 7 = <<6*7=42>>42\n#### 42", 1),
        ("4", [3, "4"], 1),
        ("<think>41", 41, 0),
    ],
)
def test_numeric(text: str, answer: Any, expected: float) -> None:
    assert reward("numeric", text, answer) == expected


@pytest.mark.parametrize("repeated", ["3", "1 + ", "a < b ", "1 1/", "(1 a", "\n", "1,"])
def test_an_answer_without_end_is_judged_at_once(repeated: str) -> None:
    """Models that repeat themselves do so to their last token; a tenth of a second, not a minute."""
    began = time.thread_time()
    reward("numeric", "The answer is 0." + repeated * (40_000 // len(repeated)), 1)
    assert time.thread_time() - began < 3


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ('{"n": 1}', SCHEMA, 1),
        ('{"n": "1"}', SCHEMA, 0),
        ('{"n": 1', SCHEMA, 0),
        ('```json\n{}\n```\nbetter:\n```json\n{"n": 2}\n```\n', SCHEMA, 1),
        ('{"n": 3}', '{"required": ["n"]}', 1),
        ("NaN", {}, 0),
        ("[" * 100_000, {}, 0),
        ("1e999", {"multipleOf": 3}, 0),
        ("19.99", {"multipleOf": 0.01}, 1),
        ("19.995", {"multipleOf": 0.01}, 0),
        ("1e-7", {"multipleOf": 1e-8}, 1),
        ('"Zoë"', {"pattern": r"^\p{L}+$"}, 1),
        ('"Zo3"', {"pattern": r"^\p{L}+$"}, 0),
        ('{"B": 1}', {"patternProperties": {"a": {}, "(?i)b": {"type": "string"}}}, 0),
        ('{"ë": 1}', {"additionalProperties": False, "patternProperties": {"a": {}, r"^\p{L}$": {}}}, 1),
        ('{"b": 1, "2": 1}', {"additionalProperties": False, "patternProperties": {r"^\p{L}$": {}}}, 0),
        ('{"b": 1, "2": 1}', {"additionalProperties": False, "properties": {"2": {}, "b": {}}}, 1),
        ('{"b": 1, "2": 1}', {"additionalProperties": {"type": "string"}, "properties": {"2": {}}}, 0),
        ("[1]", {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string"}}}, 0),
        # What has a name of its own is where its references begin.
        ("[1]", {"items": {"$ref": "u:a"}, "$defs": {"a": {"$id": "u:a", "$ref": "#/x", "x": {}}}}, 1),
        ('{"$ref": "x"}', {"const": {"$ref": "x"}}, 1),
    ],
)
def test_json_schema(text: str, answer: Any, expected: float) -> None:
    assert reward("json_schema", text, answer) == expected


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("exact_match", "  ", "found '  '"),
        ("exact_match", [], "an empty list"),
        ("exact_match", math.nan, "found nan"),
        ("exact_match", {"a": 1}, "found {'a': 1}"),
        ("regex", "(", "'(': "),
        ("regex", 3, "found 3"),
        ("numeric", "Paris", "'Paris'"),
        ("numeric", "3 or 4", "'3 or 4'"),
        ("numeric", True, "True"),
        ("numeric", math.inf, "inf"),
        ("numeric", r"\sqrt{2}", "sqrt"),
        ("numeric", "2x", "'2x'"),
        ("numeric", "3,5", "'3,5'"),
        ("numeric", "0,125", "'0,125'"),
        ("json_schema", "{", "Expecting"),
        ("json_schema", [1], "[1]"),
        ("json_schema", {"type": "number?"}, "no schema: 'number?'"),
        ("json_schema", {"pattern": "("}, "no schema: '(' is not a 'regex'"),
        (
            "json_schema",
            {"unevaluatedProperties": False, "patternProperties": {r"\p{L}": {}}},
            r"the name '\\p{L}' in patternProperties",
        ),
        (
            "json_schema",
            {"$ref": "#/x/y", "x": {"y": {"patternProperties": {"a{99999999999}": {}}}}},
            "the name 'a{99999999999}' in patternProperties",
        ),
        ("json_schema", {"items": {"$ref": "#/absent"}}, "a reference to nothing inside of it: "),
        ("json_schema", {"items": {"$ref": "http://127.0.0.1/x"}}, "a reference to nothing inside of it"),
        (
            "json_schema",
            {"items": {"$dynamicRef": "#absent"}},
            "a reference to nothing inside of it: #absent",
        ),
        (
            "json_schema",
            {"items": {"$ref": "#/x"}, "x": {"items": {"$ref": "#/y"}}},
            "nothing inside of it: #/y",
        ),
        (
            "json_schema",
            {"$ref": "#/x/y", "x": {"y": {"type": "array", "items": [{"type": "string"}]}}},
            "a reference to what is no schema",
        ),
        ("json_schema", {"$schema": 5}, "found {'$schema': 5}"),
        ("json_schema", {"$ref": "#"}, "without end"),
        ("code", "assert (", "'assert (': "),
        ("code", [" "], "found ' '"),
        ("code", ["import math", "from solution.of import f\nassert f(1)"], "imports solution.of, no module"),
        ("code", "METADATA = {}\n\ndef check(f):\n    assert f(1) == 2", "calls none, so it tests nothing"),
        ("code", ["import math", "def test():\n    assert f(1) == 2"], "calls none, so it tests nothing"),
        ("code", "class Error(Exception):\n    pass\n\ndef test():\n    assert f(1) == 2", "tests nothing"),
        (
            "code",
            "class T:\n    def test(self):\n        assert f(1) == 2",
            "calls none, so it tests nothing",
        ),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused(name: str, answer: Any, said: str) -> None:
    verifier = load_reward(name)
    with pytest.raises(UserError) as raised:
        verifier.check_row({"prompt": "p", "answer": answer}, "rows.jsonl, row 3")
    verifier.close()
    line = raised.value.line()
    assert "at rows.jsonl, row 3" in line and f"reward={name}" in line and said in line


def test_a_row_without_an_answer_is_refused() -> None:
    with pytest.raises(UserError, match="found the columns prompt, label; required a column `answer`"):
        load_reward("numeric").check_row({"prompt": "p", "label": 3}, "row 1")
    with pytest.raises(UserError, match="found an `answer` that is empty; required a column `answer`"):
        load_reward("numeric").check_row({"prompt": "p", "answer": None}, "row 1")


@pytest.mark.parametrize("text", ["numerics", "", "file.txt:f", "file.py:", "file.py:a b", ":f"])
def test_another_reward_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="neither a verifier nor a Python file"):
        load_reward(text)
