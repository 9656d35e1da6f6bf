"""The page of an acceptance, as Markdown and HTML, and the archive that a bug report can carry."""

from __future__ import annotations

import getpass
import io
import os
import re
import socket
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kt_ray.accept.items import CUT, FAIL, PASS, REPO, SHARES, SKIP, WARN, Result
from kt_ray.config.secret_values import hide
from kt_ray.disk import write_atomic
from kt_ray.placement.render import counted
from kt_ray.report.html import card, page, section, table

TITLES = {
    "here": "What is here",
    "right": "Is it right?",
    "fast": "Is it fast?",
    "runs": "Whole runs at real shapes",
}
ORDER = (FAIL, WARN, CUT, PASS, SKIP)
ARCHIVE = "report.tar.gz"
LOG_BYTES = 200_000  # of each log, its end
SENT = (".json", ".jsonl", ".log", ".md")


def write_pages(path: Path, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """page.md and page.html."""
    write_atomic(path / "page.md", markdown(results, about))
    write_atomic(path / "page.html", html(results, about))


def verdict(results: Sequence[Result]) -> str:
    """One line: how many claims hold, and how many items have not been run."""
    claims = Counter(claim.status for result in results for claim in result.claims)
    line = f"{counted(claims[PASS], 'claim')} passed, {counted(claims[WARN], 'warning')}, "
    line += counted(claims[FAIL], "failure")
    skipped, cut = sum(r.status == SKIP for r in results), sum(r.cut for r in results)
    line += f"; not possible here: {counted(skipped, 'item')}" if skipped else ""
    return line + (f"; cut off by the clock: {counted(cut, 'item')}" if cut else "")


def _facts(results: Sequence[Result], about: Mapping[str, Any]) -> list[tuple[str, str]]:
    commit = str(about["git_commit"] or "unknown")
    for earlier in sorted({result.commit for result in results} - {"", commit}):
        items = [result.title for result in results if result.commit == earlier]
        commit += f"; of {earlier}: {', '.join(items)}"
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items() if version)
    return [
        ("CPU", f"{about['cpu']}, {about['cores_allowed']} of {about['cores']} CPUs"),
        ("memory", f"{about['memory_bytes'] / 2**30:.0f} GiB"),
        ("GPUs", ", ".join(about["gpus"]) or "none"),
        ("Python", f"{about['python']}; {packages}"),
        ("commit", commit),
        ("date", str(about["time"])),
    ]


def _claims(results: Sequence[Result]) -> list[tuple[str, ...]]:
    rows = [(*claim, result.section) for result in results for claim in result.claims]
    rows.sort(key=lambda row: ORDER.index(row[0]))
    return [(status, text, found, required, where) for status, text, found, required, where, _ in rows]


CLAIM_COLUMNS = ("", "claim", "found", "required", "promised in")


def _states(results: Sequence[Result], name: str) -> list[tuple[str, ...]]:
    return [
        (
            r.status + (", cut" if r.cut and r.status != CUT else ""),
            r.title,
            f"{r.seconds:.0f} s",
            "; ".join(r.notes),
        )
        for r in results
        if r.section == name
    ]


def markdown(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    lines = ["# Acceptance of a machine", "", verdict(results) + ".", ""]
    lines += [f"- {name}: {value}" for name, value in _facts(results, about)]
    lines += ["", "## Claims", "", *_table(CLAIM_COLUMNS, _claims(results))]
    for name in SHARES:
        states = _states(results, name)
        if not states:
            continue
        lines += ["", f"## {TITLES[name]}", "", *_table(("", "item", "time", "notes"), states)]
        for title, rows in _tables(results, name):
            lines += ["", f"### {title}", "", *_table(rows[0], rows[1:])]
    return "\n".join([*lines, "", f"Something wrong? Send us `{ARCHIVE}`, which lies beside this page.", ""])


def _tables(results: Sequence[Result], name: str) -> list[tuple[str, Sequence[Sequence[str]]]]:
    """A section's tables; those of one title become one."""
    found: dict[str, list[Sequence[str]]] = {}
    for result in results:
        for title, rows in result.tables.items() if result.section == name else ():
            known = found.setdefault(title, [rows[0]])
            known += rows[1:]
    return list(found.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


def html(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """The page as HTML."""
    parts = [f"<h1>Acceptance of a machine</h1><p>{escape(verdict(results))}.</p>"]
    parts.append(card("Machine", table((), _facts(results, about), numbers=False)))
    parts.append(section("Claims", card("", table(CLAIM_COLUMNS, _claims(results), numbers=False))))
    for name in SHARES:
        states = _states(results, name)
        tables = [
            card(title, table(rows[0], rows[1:], numbers=False)) for title, rows in _tables(results, name)
        ]
        if states:
            columns = ("", "item", "time", "notes")
            parts.append(section(TITLES[name], card("Items", table(columns, states, numbers=False)), *tables))
    parts.append(f"<footer>Something wrong? Send us {ARCHIVE}, which lies beside this page.</footer>")
    return page("Acceptance · kt_ray", parts)


# -- the archive -----------------------------------------------------------------------------


def write_archive(path: Path) -> Path:
    """Results, page and the ends of logs, without names of the host, the user and directories."""
    target, names = path / ARCHIVE, _names()
    with tarfile.open(target, "w:gz") as archive:
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path)
            # A run's own directory holds timelines and checkpoints: large, and of no use from afar.
            if file.suffix not in SENT or any(part.endswith("_run") for part in inside.parts[:-1]):
                continue
            text = file.read_text(encoding="utf-8", errors="replace")
            text = text[-LOG_BYTES:] if file.suffix == ".log" else text
            data = anonymous(text, path, names).encode()
            entry = tarfile.TarInfo(f"acceptance/{inside}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return target


def anonymous(text: str, path: Path, names: Mapping[str, str]) -> str:
    """`text` without secrets, `names`, home and working directories, and addresses."""
    text = hide(text)
    places = {
        str(path.resolve()): "ACCEPTANCE",
        str(REPO): "CHECKOUT",
        str(Path.cwd()): "HERE",
        sys.prefix: "PYTHON",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
        str(Path.home()): "HOME",
        **{os.environ[key]: key for key in ("XDG_CACHE_HOME", "KT_RAY_CACHE") if os.environ.get(key)},
    }
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place, places[place])
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 2:
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", names[name], text)
    text = re.sub(r"\b(?!127\.0\.0\.1\b)(?:\d{1,3}\.){3}\d{1,3}\b", "ADDRESS", text)
    part = "[0-9a-f]{1,4}"  # of an IPv6 address: at least four of them, or two with "::" between
    address = rf"(?:(?:{part}:){{3,7}}:?{part}(?::{part})*|(?:{part}:)+(?::{part})+)"
    return re.sub(rf"(?i)(?<![\w:]){address}(?![\w:])", "ADDRESS", text)


def _names() -> dict[str, str]:
    """The host's and the user's names, and what stands for each. May ask a name server: once per archive."""
    host, user = socket.gethostname(), _user()
    names = {socket.getfqdn(): "HOST", host: "HOST", host.partition(".")[0]: "HOST", user: "USER"}
    names.pop("root", None)  # who says nothing, and is part of our keys
    names.pop("localhost", None)
    return names


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name in the system's list
        return ""
