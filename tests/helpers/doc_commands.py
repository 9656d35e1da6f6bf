"""Commands in README.md and docs/**/*.md: where they stand, how they are marked, whether they are right.

A block of commands carries an HTML comment on the line before it:

    <!-- run -->                                        the test executes it, as it stands
    <!-- run: trainer.max_steps=2 cluster=local -->     likewise, with these appended to every launch.py
    <!-- needs: gpu model -->                           not executed: checked only (NEEDS lists the words)
    <!-- usage -->                                      a synopsis with placeholders: neither

"Checked" means: `python launch.py` composes and passes every check of the configuration; `kt_ray.tools`
parses; `make` has the target; a benchmark exists and has the options. An argument `...` stands for more.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kt_ray.cli import _check_flags, _flags_and_keys
from kt_ray.config.compose import compose
from kt_ray.recipe.command import OWN_KEYS
from kt_ray.tools.__main__ import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p.relative_to(ROOT) for p in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])

# What a command may need that a test does not have.
NEEDS = {
    "gpu": "CUDA devices",
    "model": "a released checkpoint",
    "run": "a run that the reader made",
    "data": "the reader's rows",
    "network": "downloads",
    "cluster": "other hosts, or a running Ray cluster",
    "server": "another program that serves the model",
    "time": "minutes",
}

MARK = re.compile(r"<!-- *(run|needs|usage)(?:: *(.*?))? *-->")
FENCE = re.compile(r" *```(\w*)")
INLINE = re.compile(r"`((?:python launch\.py|kt-ray|kt-ray-tools|python -m kt_ray\.tools) [^`]+)`")
NO_SHELL = ("python", "yaml", "json", "toml", "jinja", "text")
STARTS = (
    *(
        "python launch.py",
        "python -m kt_ray",
        "python benchmarks/",
        "python -m benchmarks",
        "kt-ray",
        "make ",
    ),
    *("ray start", "ray job", "vllm ", "python -m sglang", "curl ", "pip install"),
)


@dataclass(frozen=True)
class Block:
    """Commands of one code block.

    Attributes:
        where: page:line of its first line.
        mark: run, needs, usage, or "" where nothing is said.
        said: what stands behind the mark's colon.
        commands: one per command, as words.
    """

    where: str
    mark: str
    said: str
    commands: tuple[tuple[str, ...], ...]


def blocks(page: Path, text: str) -> list[Block]:
    """The blocks of `text` that hold commands, in order; page: for messages only."""
    found = []
    for number, language, lines, before in _code(text.splitlines()):
        if language in NO_SHELL:
            continue
        commands = tuple(filter(_is_ours, (_words(line) for line in _joined(lines))))
        if commands:
            mark = MARK.fullmatch(before)
            kind, said = (mark[1], mark[2] or "") if mark else ("", "")
            found.append(Block(f"{page}:{number}", kind, said, commands))
    return found


def programs(text: str) -> list[str]:
    """The Python blocks of `text`."""
    return ["\n".join(lines) for _, language, lines, _ in _code(text.splitlines()) if language == "python"]


def inline_commands(text: str) -> list[tuple[str, ...]]:
    """Commands in running text, which are checked as those of `needs` blocks are."""
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [_words(" ".join(command.split())) for command in INLINE.findall(outside)]


def check(command: tuple[str, ...]) -> None:
    """Raises for a command that could not do what it says.

    Raises:
        UserError: launch.py would refuse its arguments. ValueError: anything else is wrong.
    """
    arguments = launch_arguments(command)
    if arguments is not None:
        flags, keys = _flags_and_keys(_without_recipe(arguments))
        _check_flags(flags)
        several = "-m" in flags or "--multirun" in flags
        compose([_first_value(key) if several else key for key in keys])
        return
    arguments = tools_arguments(command)
    if arguments is not None:
        try:
            parser().parse_args(arguments)
        except SystemExit as error:
            raise ValueError(f"kt_ray.tools does not take {' '.join(arguments)}") from error
    elif command[0] == "make":
        targets = [word for word in command[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        absent = [t for t in targets if not re.search(rf"^{re.escape(t)}:", makefile, re.MULTILINE)]
        if absent or not targets:
            raise ValueError(f"the Makefile has no target {absent}")
    elif command[0] == "python" and command[1].startswith("benchmarks/"):
        end = command.index("--") if "--" in command else len(command)
        text = (ROOT / command[1]).read_text()
        if "add_common_arguments" in text:
            text += (ROOT / "benchmarks" / "common.py").read_text()
        absent = [w for w in command[2:end] if w.startswith("--") and f'"{w}"' not in text]
        if absent:
            raise ValueError(f"{command[1]} has no option {absent}")
        if command[end + 1 :]:  # a benchmark of a command
            check(command[end + 1 :])
    elif command[:2] == ("python", "-m") and command[2].startswith(("kt_ray", "benchmarks")):
        module = ROOT.joinpath(*command[2].split("."))
        if not (module.with_suffix(".py").exists() or (module / "__main__.py").exists()):
            raise ValueError(f"there is no module {command[2]}")


def _without_recipe(arguments: list[str]) -> list[str]:
    """The arguments beside recipe=FILE and resume=RUN; what pages name there is the reader's own."""
    return [a for a in arguments if a.partition("=")[0] not in (*OWN_KEYS, "resume")]


def launch_arguments(command: tuple[str, ...]) -> list[str] | None:
    """What `python launch.py` or `kt-ray` is given; None for other commands.

    Left out: `...`, and shell variables that stand for several arguments (`$COMMON`).
    """
    start = 2 if command[:2] == ("python", "launch.py") else 1 if command[0] == "kt-ray" else None
    return None if start is None else [w for w in command[start:] if w != "..." and w[0] != "$"]


def tools_arguments(command: tuple[str, ...]) -> list[str] | None:
    """What `python -m kt_ray.tools` or `kt-ray-tools` is given; None for other commands."""
    if command[:3] == ("python", "-m", "kt_ray.tools"):
        return list(command[3:])
    return list(command[1:]) if command[0] == "kt-ray-tools" else None


def _code(lines: list[str]) -> Iterator[tuple[int, str, list[str], str]]:
    """Fenced and indented code: (line number, language, lines, the last line with text before it)."""
    before, at, number = "", 0, len(lines)
    while at < number:
        fence = FENCE.match(lines[at])
        if fence:
            end = next(i for i in range(at + 1, number + 1) if i == number or lines[i].strip() == "```")
            yield at + 1, fence[1], lines[at + 1 : end], before
            before, at = "", end + 1
        elif lines[at].startswith("    ") and (not at or not lines[at - 1].strip() or MARK.match(before)):
            end = next((i for i in range(at, number) if not lines[i].startswith("    ")), number)
            yield at + 1, "", [line[4:] for line in lines[at:end]], before
            before, at = "", end
        else:
            before = lines[at].strip() or before
            at += 1


def _joined(lines: list[str]) -> list[str]:
    """Lines that end in a backslash together with those that follow."""
    return re.sub(r"\\\n\s*", " ", "\n".join(lines)).split("\n")


def _words(line: str) -> tuple[str, ...]:
    """A command line as the shell splits it, without prompt, comment and NAME=value before it."""
    try:
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:  # a quotation that does not end: no command
        return ()
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return tuple(words)


def _is_ours(words: tuple[str, ...]) -> bool:
    return f"{' '.join(words)} ".startswith(STARTS)


def _first_value(key: str) -> str:
    """Of a multirun's KEY=a,b the first; lists and mappings stay whole."""
    name, equals, value = key.partition("=")
    return key if value[:1] in ("[", "{", "'", '"') else f"{name}{equals}{value.partition(',')[0]}"
