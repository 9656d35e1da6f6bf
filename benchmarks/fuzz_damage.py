"""The damage that fuzz.py does: one change of a file, by what kind of file its name says it is."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import math
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, math.nan, math.inf, 10**7, 10**30, -(10**30)),
    *("", " ", "x", "0", "auto", "null", "../../etc/hostname", "/dev/zero", "\ud800", "\x00", "a" * 10_000),
    *("(a+)+$", "[", "${oc.env:HOME}", "${a:${b}}", "{{ x }}", "2024-13-45", "😀"),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, [1, "2", None], ["x"] * 1000),
)
SNIPPETS = (
    *("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** 9 ** 9 }}"),
    *("{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(99) }}", "{{ messages[99].content }}"),
    *("{% for m in messages %}", "{% endfor %}", "{{ x | nothing }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"),
    *("{{ raise_exception('no') }}", "{{ self.__class__ }}", "{{ 'x' * 999 }}", "{% set messages = 1 %}"),
    *(
        "{% generation %}",
        "{{ messages | tojson(indent='x') }}",
        "{{ strftime_now(5) }}",
        "{#",
        "{{ '\ud800' }}",
    ),
)
YAML = (
    "\na: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    *(
        "\na: &a [*a]\n",
        "\nx: !!python/object/apply:os.getcwd []\n",
        "\nx: ${oc.env:HOME}\n",
        "\nx: 2024-13-45\n",
    ),
    *("\nx: !!int y\n", "\n? [1, 2]\n: 3\n", "\n\t- x", "\n<<: 5\n", "\n- x\n", "\nx: " + "[" * 3000 + "\n"),
)


def mutate(chance: random.Random, name: str, content: bytes) -> bytes:
    """The content with one damage, by what kind of file the name says it is."""
    structured = name.endswith((".json", ".jsonl", ".yaml", ".safetensors", ".jinja"))
    if not structured or chance.random() < 0.25:
        return _of_bytes(chance, content)
    if name.endswith(".jinja"):
        text = content.decode()
        at = chance.randrange(len(text) + 1)
        return (text[:at] + chance.choice(SNIPPETS) + text[at:]).encode("utf-8", "surrogatepass")
    if name.endswith(".safetensors"):
        length = int.from_bytes(content[:8], "little")
        header = _of_json(chance, content[8 : 8 + length])
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    if name.endswith(".yaml"):
        import yaml

        if chance.random() < 0.3:
            return content + chance.choice(YAML).encode()
        value = yaml.safe_load(content)
        return yaml.safe_dump(_changed(chance, value), allow_unicode=False).encode("utf-8", "surrogatepass")
    if name.endswith(".jsonl"):
        lines = content.splitlines(keepends=True)
        at = chance.randrange(len(lines))
        lines[at] = _of_json(chance, lines[at]) + b"\n"
        return b"".join(lines)
    return _of_json(chance, content)


def _of_bytes(chance: random.Random, content: bytes) -> bytes:
    at, other = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    changed = bytearray(content)
    kind = chance.randrange(12)
    if kind < 4 and content:
        for _ in range(1 << chance.randrange(4)):
            # most structure sits at the beginning and at the end
            place = chance.choice(
                (chance.randrange(len(content)), min(len(content) - 1, chance.randrange(256)))
            )
            place = len(content) - 1 - place if chance.random() < 0.3 else place
            changed[place] ^= 1 << chance.randrange(8)
        return bytes(changed)
    if kind == 4:
        return content[:at]
    if kind == 5:
        return content[:at] + content[other:]
    if kind == 6:
        return content[:at] + chance.randbytes(chance.choice((1, 8, 64))) + content[at:]
    if kind == 7:
        return content[:at] + bytes(other - at) + content[other:]
    if kind == 8:
        return content[:at] + content[at:other] * 2 + content[other:]
    text = content.decode("utf-8", "replace")
    recoded = (
        b"",
        b"\xef\xbb\xbf" + content,
        text.encode("utf-16"),
        ("é" + text).encode("latin-1", "replace"),
        gzip.compress(content, mtime=0),
        b"<!DOCTYPE html><html></html>",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\x00" * len(content),
    )
    return chance.choice(recoded)


def _of_json(chance: random.Random, content: bytes) -> bytes:
    value = json.loads(content)
    text = json.dumps(_changed(chance, value))
    kind = chance.randrange(20)
    if kind == 0 and text.startswith("{") and isinstance(value, dict) and value:
        key = json.dumps(chance.choice(sorted(value)))
        text = f"{{{key}: null, {text[1:]}"  # a key twice
    elif kind == 1:
        text = text.replace(": ", ": " + "[" * 5000, 1)
    elif kind == 2:
        text = text.replace("1", "1" * 5000, 1)
    return text.encode()


def _changed(chance: random.Random, value: Any) -> Any:
    """A copy in which one value, or a few, became something else."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(changed))
        if not places:
            return chance.choice(ODD)
        holder, key = chance.choice(places)
        kind = chance.randrange(8)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif kind == 2 and type(holder[key]) in (int, float):
            holder[key] = chance.choice((-1, 0, holder[key] + 1, holder[key] * 2, holder[key] * 10**6, 0.5))
        elif kind == 3:
            other, name = chance.choice(places)
            with contextlib.suppress(LookupError):  # a place that went with its holder
                holder[key] = copy.deepcopy(other[name])
        elif kind == 4 and isinstance(holder, dict):
            holder[chance.choice(("x", "", "0", "..", "\x00"))] = holder.pop(key)
        elif kind == 5:
            holder[key] = [holder[key]]
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield value, key
        yield from _places(part)
