"""Every command of the documentation is executed here, or marked as needing what tests do not have, and
then checked as far as that goes. How to mark a block: tests/helpers/doc_commands.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_ray import cli
from kt_ray.errors import UserError
from kt_ray.tools.__main__ import main as tools
from tests.helpers.doc_commands import (
    NEEDS,
    PAGES,
    ROOT,
    Block,
    blocks,
    check,
    inline_commands,
    launch_arguments,
    programs,
    tools_arguments,
)
from tests.helpers.exhaustive import exhaustive

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
BLOCKS = {page: blocks(page, text) for page, text in TEXTS.items()}
# What was decided is read after what there is, and its commands are run in `make exhaustive` only.
RUN = sorted(
    (page for page in PAGES if any(block.mark == "run" for block in BLOCKS[page])),
    key=lambda page: "decisions" in page.parts,
)
HOW = "put <!-- run -->, <!-- needs: ... --> or <!-- usage --> above it (tests/helpers/doc_commands.py)"


@pytest.fixture(scope="module", autouse=True)
def alone(own_cache: pytest.MonkeyPatch) -> None:
    """Nobody's W&B key is used."""
    own_cache.setenv("KT_RAY_TEST_DATA", "/data")  # where no command is executed, any folder will do
    own_cache.setenv("WANDB_MODE", "offline")
    for name in ("KT_RAY_ISA", "KT_RAY_DEBUG", "WANDB_API_KEY"):
        own_cache.delenv(name, raising=False)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_block_with_commands_is_marked(page: Path) -> None:
    bare = [block.where for block in BLOCKS[page] if not block.mark]
    assert not bare, f"unmarked commands: {', '.join(bare)}: {HOW}"
    for block in BLOCKS[page]:
        if block.mark == "needs":
            words = block.said.replace(",", " ").split()
            assert words and set(words) <= set(NEEDS), f"{block.where}: needs one of {', '.join(NEEDS)}"


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCKS[p] or inline_commands(TEXTS[p])], ids=str)
def test_commands_that_are_not_executed_are_right_all_the_same(page: Path) -> None:
    commands = [(b.where, c) for b in BLOCKS[page] if b.mark == "needs" for c in b.commands]
    commands += [(str(page), c) for c in inline_commands(TEXTS[page])]
    wrong = []
    for where, command in commands:
        try:
            check(command)
        except (UserError, ValueError, OSError) as error:
            wrong.append(f"{where}: {' '.join(command)}\n    {error}")
    assert not wrong, "\n".join(wrong)


def what_for(command: tuple[str, ...]) -> tuple[str, ...]:
    """A plan's command without model and machine; any other as it is."""
    if "mode=plan" not in command:
        return command
    return tuple(word for word in command if not word.startswith(("model=", "plan.hardware=")))


# Of plans that differ in model and machine alone, the first is executed: test_doc_plans.py plans all models
# on all machines.
FIRST = {
    what_for(command): block
    for page in reversed(RUN)
    for block in reversed(BLOCKS[page])
    if block.mark == "run"
    for command in block.commands
}


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds each, but on a busy machine
@pytest.mark.parametrize("page", [exhaustive(p) if "decisions" in p.parts else p for p in RUN], ids=str)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and in one directory, which holds rows.jsonl: what a command makes is there for the next."""
    monkeypatch.chdir(tmp_path)
    # Two thirds of a plan's seconds; tests/test_runs.py prints a whole one.
    monkeypatch.setattr("kt_ray.runs.plan_time.neighbours", lambda *_: ())
    write_rows(tmp_path / "rows.jsonl")
    for block in BLOCKS[page]:
        if block.mark == "run":
            for command in block.commands:
                if "mode=plan" in command and FIRST[what_for(command)] is not block:
                    check(command)
                else:
                    assert execute(command, block) == 0, f"{block.where}: {' '.join(command)}"


@pytest.mark.parametrize("page", [p for p in PAGES if programs(TEXTS[p])], ids=str)
def test_python_blocks_compile(page: Path) -> None:
    for program in programs(TEXTS[page]):
        compile(program, str(page), "exec")


def execute(command: tuple[str, ...], block: Block) -> int:
    """Exit code of a command, in this process."""
    arguments = launch_arguments(command)
    if arguments is not None:
        return cli.main([*arguments, *block.said.split()])
    arguments = tools_arguments(command)
    if arguments is not None:
        return tools(arguments)
    raise AssertionError(
        f"{block.where}: the test cannot execute {' '.join(command)}; mark it as needing something"
    )


def write_rows(path: Path) -> None:
    rows = [{"instruction": f"What is {i} and {i}?", "output": f"It is {2 * i}."} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


PAGE = """
<!-- run: cluster=local -->

```bash
$ KT_RAY_DEBUG=1 python launch.py lora.rank=4 \\
    trainer.max_steps=2   # two steps
```

- in a list

  ```shell
  kt-ray mode=doctor
  ```

<!-- needs: gpu -->
    python benchmarks/train_step.py --json out.json

```
make demo
error: what is printed is no command
```
"""


def test_blocks_marks_and_commands_are_found() -> None:
    run, listed, needs, bare = blocks(Path("page.md"), PAGE)
    assert (run.mark, run.said) == ("run", "cluster=local")
    assert run.commands == (("python", "launch.py", "lora.rank=4", "trainer.max_steps=2"),)
    assert (listed.mark, listed.commands) == ("", (("kt-ray", "mode=doctor"),))
    assert (needs.mark, needs.said, needs.commands[0][1]) == ("needs", "gpu", "benchmarks/train_step.py")
    assert (bare.mark, bare.commands) == ("", (("make", "demo"),))


@pytest.mark.parametrize(
    "command",
    [
        "python launch.py lora.rnk=8",
        "python launch.py --lora.rank=8",
        "kt-ray model=deepseek_v9 mode=plan",
        "python launch.py -m lora.rank=0,8",
        "python -m kt_ray.tools convert A B --to int3",
        "python -m kt_ray.nothing",
        "python benchmarks/train_step.py --jsn out.json",
        "python benchmarks/nothing.py",
        "make dmo",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises((UserError, ValueError, OSError)):
        check(tuple(command.split()))
