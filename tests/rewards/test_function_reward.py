"""Functions of the user's: what they are called with, and what is said where they fail."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest

from kt_ray.errors import UserError
from kt_ray.rewards.reward import Completion, Reward, load_reward

CHAT = [{"role": "user", "content": "2 + 2?"}]


def loaded(folder: Path, text: str, function: str = "") -> Reward:
    path = folder / "my_reward.py"
    path.write_text(text)
    return load_reward(f"{path}:{function}" if function else str(path))


def samples(*texts: str, chat: bool = False) -> list[Completion]:
    rows = [{"prompt": "2 + 2?", "answer": number} for number in range(len(texts))]
    prompt = CHAT if chat else "2 + 2?"
    return [Completion(prompt, text, (1, 2), True, row) for text, row in zip(texts, rows, strict=True)]


def test_it_is_called_with_what_it_takes(tmp_path: Path) -> None:
    reward = loaded(
        tmp_path,
        "def reward(prompts, completions, completion_ids, answer):\n"
        "    assert (prompts, completion_ids) == (['2 + 2?'] * 2, [[1, 2]] * 2)\n"
        "    return [len(c) + a for c, a in zip(completions, answer)]\n",
    )
    assert reward.name == "reward"
    np.testing.assert_array_equal(reward(samples("a", "bcd")), np.array([1.0, 4.0]))


def test_a_function_with_any_arguments_gets_all_columns_and_chat_completions(tmp_path: Path) -> None:
    reward = loaded(
        tmp_path,
        "def scored(completions, **kwargs):\n"
        "    assert sorted(kwargs) == ['answer', 'completion_ids', 'prompts'], kwargs\n"
        "    assert completions[0] == [{'role': 'assistant', 'content': 'a'}]\n"
        "    return [None, True]\n",
        "scored",
    )
    reward.check_row({}, "row 1")
    assert reward.name == "scored"
    np.testing.assert_array_equal(reward(samples("a", "b", chat=True)), np.array([np.nan, 1.0]))


def test_a_function_that_changes_what_it_is_given_changes_no_data(tmp_path: Path) -> None:
    """Prompts and columns serve the whole run, and a group's answers share them."""
    text = (
        "def reward(prompts, completions, answer):\n"
        "    for prompt, one in zip(prompts, completions):\n        prompt.append(one[0])\n"
        "    return [len(prompt) + len(a.pop()) for prompt, a in zip(prompts, answer)]\n"
    )
    prompt, row = [{"role": "user", "content": "2 + 2?"}], {"answer": [["four"]]}
    group = [Completion(prompt, text, (1, 2), True, row) for text in "ab"]
    function = loaded(tmp_path, text)
    for _ in range(2):
        np.testing.assert_array_equal(function(group), np.array([3.0, 3.0]))
    assert len(prompt) == 1 and row == {"answer": [["four"]]}


def test_a_coroutine_is_awaited_in_one_loop(tmp_path: Path) -> None:
    text = (
        "import asyncio\nloops = set()\n"
        "async def reward(completions):\n"
        "    loops.add(asyncio.get_running_loop())\n    return [len(loops)] * len(completions)\n"
    )
    reward = loaded(tmp_path, text)
    assert reward(samples("a")) == reward(samples("a")) == 1.0
    reward.close()


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    """Of each job of a process its own; a library that lies below the file, as in a .venv, stays loaded."""
    before, library = sys.path[:], tmp_path / "0.25" / ".venv" / "library_below"
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    sys.path.append(str(library.parent))
    for worth in (0.25, 0.5):
        folder = tmp_path / str(worth)
        (folder / "beside").mkdir(parents=True, exist_ok=True)
        (folder / "beside" / "worth.py").write_text(f"worth = {worth}\n")
        (folder / "once.py").write_text(f"once = {worth}\n")
        text = "import library_below\nfrom once import once\n"
        text += "def reward(completions):\n    from beside.worth import worth\n"
        text += "    return [worth + once] * len(completions)\n"
        with contextlib.closing(loaded(folder, text)) as reward:
            assert reward(samples("a")) == 2 * worth
    with pytest.raises(UserError):
        loaded(tmp_path, "from once import once\n1 / 0\n")
    assert sys.path == [*before, str(library.parent)] and sys.modules.pop("library_below", None)
    sys.path.remove(str(library.parent))


def test_modules_beside_two_files_stay_until_both_are_closed(tmp_path: Path) -> None:
    """Of two runs at a time in a process."""
    (tmp_path / "late_beside.py").write_text("worth = 2\n")
    before = sys.path[:]
    text = "def reward(completions):\n    import late_beside as beside\n"
    text += "    return [beside.worth] * len(completions)\n"
    first, second = loaded(tmp_path, text), loaded(tmp_path, text)
    first.close()
    assert second(samples("a")) == 2
    second.close()
    assert sys.path == before and "late_beside" not in sys.modules


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1.0]", "found list of 1; required a list of 2"),
        ("return 1.0", "found float 1.0; required a list of 2"),
        ("return 'ab'", "found str ab;"),
        ("return {2.0, 1.0}", "found set {1.0, 2.0}; required a list of 2"),  # in which order?
        ("raise ValueError('x' * 10**6)", "xxx… during 2 samples"),
        ("return [1.0, float('nan')]", "found float nan for sample 1, the answer 'b c'"),
        ("return [1.0, float('inf')]", "found float inf for sample 1"),
        ("return ['1', 2]", "found str 1 for sample 0, the answer 'a'"),
        ("return [1.0, [2]]", "found list [2] for sample 1"),
        ("return 1 / 0", "line 2; found ZeroDivisionError: division by zero during 2 samples"),
        ("raise SystemExit(3)", "line 2; found SystemExit: 3 during"),
        ("import asyncio; raise asyncio.CancelledError", "line 2; found CancelledError"),
        ("import numpy; return numpy.array(['1', '2'])", "found str_ 1 for sample 0"),
        ("return [10**400, 1]", "found int"),
        ("import sympy; return [1, sympy.Symbol('x')]", "found Symbol x for sample 1"),
    ],
)
def test_what_is_no_reward_is_refused(tmp_path: Path, body: str, said: str) -> None:
    reward = loaded(tmp_path, f"def reward(completions):\n    {body}\n")
    with pytest.raises(UserError) as raised:
        reward(samples("a", "b c"))
    line = raised.value.line()
    assert f"{tmp_path / 'my_reward.py'}:reward" in line and said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1 / 0\n", "line 1; found ZeroDivisionError"),
        ("\ndef reward(:\n", "line 2; found SyntaxError"),
        ("def other(completions): ...\n", "has no function reward"),
        ("def reward(): ...\n", "no arguments"),
        ("def reward(completions, /): ...\n", "the arguments completions without a name"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        loaded(tmp_path, text)
    assert said in raised.value.line() and str(tmp_path / "my_reward.py") in raised.value.line()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the file of the reward function cannot be read"):
        load_reward(str(tmp_path / "absent.py"))


def test_an_argument_that_is_no_column_is_refused(tmp_path: Path) -> None:
    reward = loaded(tmp_path, "def reward(completions, label, trainer_state, weight=1): ...\n")
    with pytest.raises(UserError, match=r"at row 4; found the columns label; required trainer_state"):
        reward.check_row({"prompt": "p", "label": 1}, "row 4")
