"""Text from outside as values: JSON and YAML files, and foreign regular expressions, each within bounds.

What is damaged, of another kind or too large is a `UserError` that names file and place. Nothing here raises
anything else, and nothing takes longer than the size of its input explains.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import regex

from kt_ray.disk import content_of_file
from kt_ray.errors import UserError

_MOST_JSON = 256 << 20  # bytes; the index of the largest checkpoints has 10 MB
_MOST_YAML = 1 << 20
_MOST_NODES = 100_000  # of a YAML document with its aliases written out
_PATTERN_SECONDS = 1.0
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
_KINDS |= {dict: "an object", list: "a list"}


def parse_json(text: str, *, unique: bool = False) -> Any:
    """A JSON value. Infinity and NaN are let through: released config.json files hold them.

    Args:
        unique: whether a key that stands twice in an object is a fault.

    Raises:
        ValueError: not JSON, nested too deeply, or with half of a surrogate pair, which no file can hold.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates if unique else None)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{code} is half of a surrogate pair, no character") from error
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {key!r} appears twice")
    return result


def read_json(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: no regular file, too large, or not one JSON object without a key twice.
    """
    required = "a JSON object"
    try:
        value = parse_json(_text(path, _MOST_JSON), unique=True)
    except (ValueError, OSError) as error:
        raise _unreadable(path, what, remedy, required, error) from error
    if not isinstance(value, dict):
        fault, observed = f"{what} is not a JSON object", type(value).__name__
        raise UserError(fault, where=str(path), observed=observed, required=required, remedy=remedy)
    return value


def read_yaml(path: Path, what: str, remedy: str) -> Any:
    """The value in a YAML file; aliases count as often as they are used.

    Raises:
        UserError: no regular file, too large, or not YAML.
    """
    import yaml

    text = read_yaml_text(path, what, remedy)
    try:
        return yaml.safe_load(text)
    except Exception as error:  # its constructors raise many kinds: !!int x, 2024-13-45
        raise _unreadable(path, what, remedy, "YAML", error) from error


def read_yaml_text(path: Path, what: str, remedy: str) -> str:
    """The text of a YAML file that may be parsed: small, and small with its aliases written out.

    Raises:
        UserError: as `read_yaml`.
    """
    import yaml

    try:
        text = _text(path, _MOST_YAML)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        nodes = 0 if root is None else _written_out(root, {})
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        fault = ValueError("nested too deeply") if isinstance(error, RecursionError) else error
        raise _unreadable(path, what, remedy, "YAML", fault) from error
    if nodes > _MOST_NODES:
        observed = f"{nodes:.3g} values" if math.isfinite(nodes) else "an alias inside of what it names"
        required = f"at most {_MOST_NODES} values, those of aliases (*name) counted each time"
        fault_text = f"{what} is too large with its aliases written out"
        raise UserError(fault_text, where=str(path), observed=observed, required=required, remedy=remedy)
    return text


def _written_out(node: Any, known: dict[int, float]) -> float:
    """Nodes of a YAML tree as if every alias were written out; infinite where one contains itself.

    Raises:
        ValueError: a mapping has a key twice, of which YAML's readers take the last one.
    """
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted
        inner: list[Any] = []
        if isinstance(node.value, list):
            inner = [
                part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))
            ]
            keys = [entry[0] for entry in node.value if isinstance(entry, tuple)]
            counts = Counter((key.tag, key.value) for key in keys if isinstance(key.value, str))
            twice = next((key for (_, key), count in counts.items() if count > 1), None)
            if twice is not None:
                line = node.start_mark.line + 1
                raise ValueError(f"{twice!r} appears twice in the mapping that begins at line {line}")
        known[id(node)] = 1.0 + sum(_written_out(part, known) for part in inner)
    return known[id(node)]


def read_text(path: Path, what: str, remedy: str, *, whole_lines: bool = False) -> str:
    """The text of a regular UTF-8 file of at most 256 MiB.

    Args:
        whole_lines: whether an unfinished last line, which may end amid a character, is left out.

    Raises:
        UserError: it is none.
    """
    try:
        return _text(path, _MOST_JSON, whole_lines)
    except (ValueError, OSError) as error:
        raise _unreadable(path, what, remedy, "UTF-8 text", error) from error


def kind_of_file(path: Path) -> str:
    """ "" for a regular file, else what it is. Opening a pipe would wait for a writer. OSError: as stat's."""
    mode = path.stat().st_mode
    names = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return "" if stat.S_ISREG(mode) else names.get(stat.S_IFMT(mode), "a device")


def _text(path: Path, most: int, whole_lines: bool = False) -> str:
    if kind := kind_of_file(path):
        raise ValueError(f"{kind}, no file")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most >> 20} MiB")
    if content.startswith(b"\xef\xbb\xbf"):
        raise ValueError("a byte order mark before the text: save it as UTF-8 without one")
    if whole_lines:
        content = content[: content.rfind(b"\n") + 1]
    return content.decode("utf-8")


def _unreadable(path: Path, what: str, remedy: str, required: str, error: Exception) -> UserError:
    observed = content_of_file(path) if path.is_file() else ""
    return UserError(
        f"{what} cannot be read",
        where=str(path),
        observed=observed or " ".join(str(error).split())[:300] or type(error).__name__,
        required=required,
        remedy=remedy,
    )


def check_shape(value: Any, shape: Any, path: Path, what: str, remedy: str, key: str = "") -> Any:
    """The value, if it has the shape.

    Args:
        shape: a type; [shape] for a list of such values, (shape, shape) for one of two; {str: shape} for an
            object of any keys; else an object of these keys, where "key?" may be absent or null. int and
            float mean finite numbers, int whole ones.
        path, what, remedy: for the message. key: where the value sits in the file.

    Raises:
        UserError: names the file and the key.
    """
    kind = shape if isinstance(shape, type) else list if isinstance(shape, tuple) else type(shape)
    if not _is(value, kind) or (isinstance(shape, tuple) and len(value) != len(shape)):
        observed = "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]}"
        raise UserError(
            f"{what} is damaged", where=f"{path}, {key}" if key else str(path), observed=observed,
            required=_KINDS[kind] + (f" of {len(shape)}" if isinstance(shape, tuple) else ""), remedy=remedy,
        )  # fmt: skip
    if isinstance(shape, list | tuple):
        for number, entry in enumerate(value):
            inner = shape[number if isinstance(shape, tuple) else 0]
            check_shape(entry, inner, path, what, remedy, f"{key}[{number}]")
    elif isinstance(shape, dict):
        dot = f"{key}." if key else ""
        if str in shape:
            for name, entry in value.items():
                check_shape(name, str, path, what, remedy, f"{dot}{name}")
                check_shape(entry, shape[str], path, what, remedy, dot + name)
            return value
        for name, inner in shape.items():
            plain = name.removesuffix("?")
            if name == plain or value.get(plain) is not None:
                check_shape(value.get(plain), inner, path, what, remedy, dot + plain)
    return value


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) < 1e300 and (kind is float or isinstance(value, int))  # nor NaN
    return kind is object or isinstance(value, kind)


def matches(pattern: str, text: str, *, where: str) -> bool:
    """Whether a regular expression from a file matches at the beginning of a text.

    Args:
        where: the file and key that it comes from.

    Raises:
        UserError: it takes more than a second. regex.error: it is no regular expression.
    """
    return _searched(regex.match, pattern, text, where)


def finds(pattern: str, text: str, *, where: str) -> bool:
    """As `matches`, anywhere in the text."""
    return _searched(regex.search, pattern, text, where)


def _searched(search: Any, pattern: str, text: str, where: str) -> bool:
    try:
        return search(pattern, text, timeout=_PATTERN_SECONDS) is not None
    except TimeoutError as error:
        raise UserError(
            "a regular expression takes too long",
            where=where,
            observed=f"{pattern[:80]!r} on {text[:80]!r}",
            required=f"an answer within {_PATTERN_SECONDS:g} s",
            remedy="rewrite it without repeats inside of repeats",
        ) from error
    except (RecursionError, OverflowError, MemoryError) as error:
        raise regex.error(f"too large ({type(error).__name__})") from error
