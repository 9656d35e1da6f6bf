"""Letters of multiple choice: what an answer settles on, and what settles nothing."""

from __future__ import annotations

import time

import pytest

from kt_ray.errors import UserError
from kt_ray.evaluate.choice import (
    argmax_letter,
    exact_match,
    extract_letter,
    label_letter,
    opens_thought,
    option_answers,
)

ANSWERS = [
    # the letter alone
    *[(text, "B") for text in ("B", "b", "(B)", "B.", " **B** ", "Ｂ", "[B]", "B\n")],
    # at the beginning
    *[
        (text, "B")
        for text in ("B. Paris", "B) Paris", "(B) Paris", "B: Paris", "**B** Paris", "B\nbecause A is not")
    ],
    # stated
    ("The answer is B.", "B"),
    ("The answer is (C), because A is wrong", "C"),
    ("The correct answer is: **B) Paris**", "B"),
    *[
        (text, "B")
        for text in ("Answer: b", "The answer is b.", "The answer is (b), Paris", "Answer: (b) Paris")
    ],
    ("Let us see. A is too small, so I choose D.", "D"),
    ("The answer is A. No wait, the answer is D", "D"),
    ("so \\boxed{D}", "D"),
    ("so $\\boxed{\\text{B}}$.", "B"),
    ("答案是B", "B"),
    ("正确答案为：Ｃ。", "C"),
    ("因此选择 B 项", "B"),
    ("不选A，选B", "B"),
    ("Option A is wrong; option B is correct", "B"),
    ("Option B is right; option A is wrong", "B"),
    ("I think the answer is A.", "A"),
    ("I choose A because it fits", "A"),
    ("Options A and B are too small, so the answer is option C.", "C"),
    ("A is wrong. Correct answer: choice (D)", "D"),
    ("The answer is option A, and option B is too small", "A"),
    *[(f"The answer is option A {more}", None) for more in ("and option C", "or option (B).")],
    ("Answers: option A, Option B", None),
    ("the answer is an option", None),
    *[
        (text, "B")
        for text in ("<answer>B</answer>, as A fails", "The answer is 'B'", "The answer is B, C is wrong.")
    ],
    ("The correct answer to this question is most likely D. A is close.", "D"),
    ("The answer is C. A is correct, which was not asked for.", "C"),
    # called right
    ("Therefore, C is correct. A and B are not.", "C"),
    ("B is the best choice because A is too small.", "B"),
    ("A is not correct. (B) is right.", "B"),
    ("B. Vitamin C is the best, but A has none.", "B"),
    ("A is correct. B is correct. C is not.\nC", "C"),
    *[
        (f"C{more}", "C")
        for more in (". A is true, but off the point.", ") Only A is correct", "\nB is right at night only")
    ],
    ("The answer is (B), A good one.", "B"),
    ("A is true, but that was not asked. Option D is correct.", "D"),
    *[(f"A{wrong} is wrong. B is correct.", "B") for wrong in (")", ": This")],
    ("A. Paris\nB. wrong: it is in England", "A"),
    ("A. Right\nB. Wrong", None),
    ("A. wrong\nB. right\nC. wrong", None),
    *[(f"B. {option}\n\nOption A was not asked", "B") for option in ("incorrect", "wrong: it is A")],
    *[(text, None) for text in ("The Incorrect answer is b.", "Wrong answer: (c) Paris", "The answer is a")],
    ("The answer is a\nsmall house", None),
    *[(f"True{either}false answer: B", "B") for either in ("/", " or ")],
    # called wrong
    *[
        (text, None)
        for text in (
            "The wrong answer is B.",
            "The incorrect options are B and C",
            "The incorrect option is B or C",
            "B is the wrong answer",
            "Not B.",
            "I would not choose B",
            "I don’t think the answer is B.",
            "I don't think that it is B",
            "The false answer would be B",
        )
    ],
    ("The wrong answers are B and C, so A", "A"),
    ("The worst option is B; C it is", "C"),
    # which may be what the question asks for
    *[
        (text, "B")
        for text in (
            "The incorrect option is B.",
            "The only incorrect choice: (B)",
            "The worst option is B, not C.",
        )
    ],
    # on the last line
    ("A. 5\nB. 6\n\nB", "B"),
    ("B. Rome\n\nA. is in France\nC. is in Spain", "B"),
    ("A\n\nB. is in Italy\nC. is in Spain", "A"),
    ("A and C are close. Let me see.\nB", "B"),
    # the only one
    ("It must be C", "C"),
    ("A good answer would be C", "C"),
    *[(text, "B") for text in ("A or B? B.", "Is it A, B or C? I would say B", "A? No. B.", "Is it B?")],
    # reasoning does not count
    ("<think>the answer is A</think>B", "B"),
    ("<mm:think>the answer is A</mm:think>B", "B"),
    ("the answer is A</think:opensource>B", "B"),
    # nothing settled
    *[
        (text, None)
        for text in ("", "Paris", "A cat sat on the mat", "the answer is a cat", "D'accord", "B-cells")
    ],
    *[
        (text, None)
        for text in (
            "Not A or B",
            "Both A and B",
            "the answers are A and C",
            "选A或B",
            "A or B?",
            "Neither A nor C.",
            "Neither A, B, nor C.",
            "NEITHER A NOR B",
            "Neither option A nor option C is correct",
            "It could be either A or B",
        )
    ],
    *[
        (text, None)
        for text in ("A, C and D are wrong, not B", "The answer is (A) or (B).", "A: Paris\nB: Rome\nRome.")
    ],
    ("The answer cannot be A. So it is C", "C"),
    ("Neither A nor C is right, so B", "B"),
    *[(text, None) for text in ("The answer is not A", "It isn't A", "答案不是A", "E", "<think>B, surely")],
]


@pytest.mark.parametrize(("text", "letter"), ANSWERS)
def test_extract_letter(text, letter):
    assert extract_letter(text) == letter


def test_a_long_answer_without_an_end_of_sentence_is_read_in_its_length():
    began = time.process_time()
    assert extract_letter("we think B and so on or C " * 4000) is None
    assert time.process_time() - began < 10


def test_of_two_options_the_incorrect_one_may_mean_the_other():
    assert extract_letter("The incorrect option is B.", "AB") is None


@pytest.mark.parametrize("mark", ["[THINK]", "<|START_THINKING|>", "<|open|>think<|sep|>"])
def test_a_prompt_opens_a_thought_in_other_marks(mark):
    assert opens_thought(f"Who?{mark}") and not opens_thought(f"{mark}Who?")


@pytest.mark.parametrize("mark", ["<think>\n", "<thinking>", "<mm:think>", "<think:opensource>"])
def test_a_prompt_opens_a_thought_at_its_end_only(mark):
    assert opens_thought(f"Who?{mark}")
    assert not opens_thought(f"{mark}Who?") and not opens_thought(f"Who?{mark.replace('<', '</')}")


def test_other_letters():
    assert extract_letter("The answer is E", "ABCDE") == "E"
    assert extract_letter("I would say so", "ABCDEFGHI") is None
    assert extract_letter("C, so I must be right", "ABCDEFGHI") == "C"
    assert extract_letter("The answer is I.", "ABCDEFGHI") == "I"
    assert extract_letter("B, I think. C is close", "ABCDEFGHI") == "B"


@pytest.mark.parametrize(
    ("label", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B. Paris", "B"),
        ("B)Paris", "B"),
        ("Ｂ", "B"),
        ("B：对", "B"),
        (" B\n", "B"),
    ],
)
def test_label_letter(label, letter):
    assert label_letter(label) == letter


@pytest.mark.parametrize("label", ["", "b", "Because", "B Paris", "E", "The answer is B", "A cat."])
def test_what_is_no_option(label):
    assert label_letter(label) is None


@pytest.mark.parametrize(
    ("label", "answers"),
    [
        ("B", ["A", "B"]),
        ("(B) Paris", ["(A)", "(B)"]),
        ("B. Paris", ["A.", "B."]),
        (" Ｂ：对", ["A:", "B:"]),
    ],
)
def test_options_are_written_as_the_label_is(label, answers):
    assert option_answers(label, "AB") == dict(zip("AB", answers, strict=True))


def test_no_option_has_no_answers():
    with pytest.raises(ValueError, match="none of the options AB"):
        option_answers("C", "AB")


def test_argmax_letter():
    assert argmax_letter({"A": -3.0, "B": -0.5, "C": -0.6}) == "B"
    assert argmax_letter({"A": 1.0, "B": 1.0}) == "A"
    for logits in ({}, {"A": float("nan"), "B": 1.0}):
        with pytest.raises(UserError, match="logits"):
            argmax_letter(logits)


def test_exact_match_ignores_white_space_and_width_only():
    assert exact_match(" the  cat\n", "the cat") and exact_match("ＡＢＣ", "ABC")
    assert not exact_match("The cat", "the cat") and not exact_match("the cat.", "the cat")
