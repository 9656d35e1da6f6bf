"""Code under limits: what passes, what is stopped, and that nothing is left behind."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kt_ray.errors import UserError
from kt_ray.rewards import code_reward
from kt_ray.rewards.answer_text import last_block
from kt_ray.rewards.code_reward import CodeReward, Limits, run_tests
from kt_ray.rewards.reward import Completion

ADD = "Like this:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
LIMITS = Limits(wall_seconds=40, cpu_seconds=1, memory=256 << 20, processes=4)


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = CodeReward(LIMITS)
    yield reward
    reward.close()


def test_blocks_are_found_as_markdown_has_them(reward: CodeReward) -> None:
    indented = "1. So:\n\n   ```python\n   def f():\n       return 1\n   ```\n"
    named = "```f``` is this:\n```python\ndef f():\n    return 1\n```\n"
    # A stop string, or the most tokens that an answer may have, takes the end away.
    unclosed = ("So:\n```python\ndef f():\n    return 1", "So:\n```python\ndef f():\n    return 1\n")
    whole = "def f():\n    return 1\n```\n"
    # One that is cut off, or a line of backticks alone, takes nothing away from a block that is whole.
    cut = (f"```python\n{whole}Try it:\n```python\nprint(f(), 'is", f"```\n{whole}So it is.\n```\nDone.")
    # What is named as Python is looked for first, cut off or not.
    other = "It prints:\n```\n1\n```\n" + unclosed[0]
    corrected = "```python\ndef f():\n    return 2\n```\nNo:\n```python\nf: object = lambda: 1\n```\n"
    for text in (indented, named, *unclosed, *cut, other, corrected):
        assert reward.score(text, "assert f() == 1") == 1.0, text
    assert last_block('```json\n{"a": 1}\n```\nOr:\n```json\n{"a": ', "json") == '{"a": 1}\n'


def test_the_body_of_a_class_is_code_that_runs(reward: CodeReward) -> None:
    tests = "class T:\n    assert f(1) == 2\n"
    reward.check_row({"prompt": "p", "answer": tests}, "row 1")
    scores = [reward.score(f"def f(x):\n    return x + {more}", tests) for more in (1, 2)]
    assert scores == [1.0, 0.0]


def test_tests_may_be_programs(reward: CodeReward) -> None:
    case = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert f(1) == 2\n"
    guard = "if __name__ == '__main__':\n    "
    run = "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))"
    tests = [case + "unittest.main()", guard + "unittest.main(exit=False)", run, guard + "assert f(1) == 2"]
    reward.check_row({"prompt": "p", "answer": tests}, "row 1")
    own = "from unittest import TestCase\nclass Own(TestCase):\n    def test(self):\n        assert False\n"
    code = own + "def f(x):\n    return x + {}\nif __name__ == '__main__':\n    raise ValueError"
    assert [reward.score(code.format(more), tests) for more in (1, 2)] == [1.0, 0.0]
    assert reward.score(code.format(1), "import unittest\nunittest.main()") == 0.0  # no test


def test_the_share_of_passed_tests(reward: CodeReward) -> None:
    right, wrong = "assert add(1, 2) == 3", "assert add(1, 2) == 4"
    cases = {
        (ADD, right): 1.0,
        (ADD, wrong): 0.0,
        (ADD, f"from answer import add\n{right}"): 1.0,
        (ADD, f"{right}\n{wrong}"): 0.0,
        (ADD, (right, wrong, "raise SystemExit", right)): 0.5,
        ("def add(a, b): return a + b", right): 1.0,
        (f"{ADD}\nUse it:\n```python\nadded = add(1, 2)\n```\n", right): 1.0,
        (f"{ADD}\nOr not:\n```python\ndef add(a, b): pass\n```\n", right): 0.0,
        ("I cannot.", right): 0.0,
        ("<think>" + ADD, right): 0.0,
    }
    completions = [
        Completion("p", text, [], True, {"answer": list(tests) if isinstance(tests, tuple) else tests})
        for text, tests in cases
    ]
    assert reward(completions).tolist() == list(cases.values())


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('0'); raise ValueError",
        "while True: pass",
        "bytes(300 << 20)",
        "input()",
        "with open('large', 'wb') as file: file.write(bytes(2 << 20))",
        "import os; assert os.environ.get('KT_RAY_SECRET')",
    ],
)
def test_what_does_not_pass(reward: CodeReward, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_RAY_SECRET", "1")
    assert reward.score(f"```python\n{code}\n```\n", "pass") == 0.0


def test_code_and_tests_are_compiled_as_python_does_it(reward: CodeReward) -> None:
    tests = ["assert f.__annotations__ == {'x': int}", "def g(y: Unknown): ..."]
    assert reward.score("def f(x: int): ...", tests) == 0.5
    assert reward.score("def f(x: List[int]): ...", "pass") == 0.0


def test_what_is_waited_for_can_be_given_up() -> None:
    limits = Limits(wall_seconds=3)
    reward = CodeReward(limits)

    def stop() -> None:
        raise RuntimeError("a signal")

    row = {"answer": "pass"}
    endless = Completion("p", "import time; time.sleep(60)", [], True, row)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="a signal"):
        reward([endless] * 40, stop)
    assert reward([Completion("p", "x = 1", [], True, row)]).tolist() == [1.0]
    assert time.monotonic() - began < 40 * limits.wall_seconds / 2
    reward.close()


def test_limits_hold_in_the_process(reward: CodeReward) -> None:
    tests = [
        "import resource as r; assert r.getrlimit(r.RLIMIT_CPU) == (1, 1)",
        f"assert r.getrlimit(r.RLIMIT_AS) == ({256 << 20},) * 2",
        "import os, sys; assert os.listdir() == [] and sys.flags.isolated",
    ]
    assert reward.score("x = 1", tests) == 1.0


@pytest.mark.parametrize("own_launcher", [True, False])
def test_code_that_sleeps_is_ended_with_all_that_it_started(
    reward: CodeReward, own_launcher: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os, time\nos.fork()\ntime.sleep(60)"
    launcher = reward._launcher if own_launcher else ()
    assert run_tests(code, ["pass"], Limits(wall_seconds=1), launcher) == set()
    until(lambda: not left(tmp_path))  # the kernel ends them, but not at once


def test_code_that_sleeps_ends_with_the_driver(tmp_path: Path) -> None:
    program = (
        "from kt_ray.rewards.code_reward import CodeReward, Limits\n"
        'code = \'import time; open("here", "w").close(); time.sleep(50)\'\n'
        "CodeReward(Limits(wall_seconds=60)).score(code, ['pass'])"
    )
    tmp_path.chmod(0o755)
    driver = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        until(lambda: any(tmp_path.glob("kt_ray_code_*/here")))
    finally:
        driver.kill()
        driver.wait()
    until(lambda: not left(tmp_path))


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


def left(folder: Path) -> list[int]:
    """Processes that were started with their home in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME", "").startswith(str(folder)):
                found.append(process.pid)
    return found


def test_code_that_leaves_its_session_is_ended(tmp_path: Path) -> None:
    """It is a child of what the launcher started, which alone was ended."""
    seen = tmp_path / "pid"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    open({str(seen)!r}, "w").write(str(os.getpid()))
time.sleep(20)
"""
    assert run_tests(code, ["pass"], Limits(wall_seconds=5)) == set()
    with suppress(psutil.NoSuchProcess):  # it may wait for init to take note
        process = psutil.Process(int(seen.read_text()))
        until(lambda: process.status() == psutil.STATUS_ZOMBIE, 10)


def test_files_are_taken_away(reward: CodeReward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    assert run_tests("open('file', 'w').close()", ["pass"], LIMITS) == {0}
    assert os.listdir(tmp_path) == []


def test_no_reward_where_python_did_not_start(monkeypatch: pytest.MonkeyPatch, reward: CodeReward) -> None:
    assert run_tests("", ["pass"], LIMITS, ("false",)) is None
    assert run_tests("", ["pass"], LIMITS, ("a_command_that_is_not_there",)) is None
    monkeypatch.setattr(reward, "_launcher", ("false",))
    assert math.isnan(reward.score("", "pass"))


def test_no_reward_where_the_temporary_directory_is_full(
    monkeypatch: pytest.MonkeyPatch, reward: CodeReward, caplog: pytest.LogCaptureFixture
) -> None:
    code_reward._warn_once.cache_clear()

    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("mkdtemp", "TemporaryFile"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tempfile.{name}", full)
            assert math.isnan(reward.score("", "pass"))
            with pytest.raises(UserError, match="the room in the temporary directory"):
                CodeReward(LIMITS)
    assert caplog.text.count("cannot be run: No space left on device") == 1


def test_what_the_machine_leaves_open_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(code_reward, "_AS_USER", [("false",), ()])
    monkeypatch.setattr(code_reward, "_AS_ROOT", [("false",), ()])
    CodeReward(LIMITS).close()
    assert "reach the network, leave processes behind" in caplog.text
    assert ("can write this user's files" in caplog.text) == (os.getuid() != 0)


def test_a_machine_without_room_for_python_is_refused() -> None:
    with pytest.raises(UserError, match="cannot run Python in a process of its own here"):
        CodeReward(Limits(wall_seconds=0.0))
