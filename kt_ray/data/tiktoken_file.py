"""tiktoken.model as tokenizer.json, for releases (Kimi-K2) whose tokenizer is otherwise Python code.

The file has the tokens' bytes in the order of their ids. How text is split before, `pat_str`, is a constant
in tokenization_*.py, which is parsed and never run. The names of the special tokens, which follow the others,
are in tokenizer_config.json. transformers' own converter does the rest.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from kt_ray.disk import cache_root, made_once
from kt_ray.errors import UserError
from kt_ray.parse import read_json, read_text

FILE = "tiktoken.model"
_VERSION = 2  # of the conversion
_MOST_SPECIAL = 100_000
_REMEDY = (
    "download tokenizer_config.json and tokenization_*.py of the release (the latter is read, never run), or "
    "set model.tokenizer to a directory with a tokenizer.json"
)


def with_tokenizer_json(directory: Path) -> Path:
    """A directory with tokenizer.json made from `directory`'s tiktoken.model; kept in the cache.

    Raises:
        UserError: a file is missing or says nothing that can be read, or the cache cannot be written.
    """
    config = read_json(directory / "tokenizer_config.json", "tokenizer_config.json", _REMEDY)
    pattern = _pattern(directory)
    settings = {key: value for key, value in config.items() if key != "auto_map"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = directory / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = read_text(template, "the chat template", "download it again")
    digest = hashlib.sha256((directory / FILE).read_bytes())
    digest.update(json.dumps([_VERSION, pattern, settings], sort_keys=True).encode())
    kept = cache_root() / "tokenizers" / digest.hexdigest()[:32]

    def make(scratch: Path) -> None:
        # not its own save, whose errors say no more than that they are exceptions
        converted = json.loads(_convert(directory / FILE, pattern, settings).to_str())
        stated = settings["added_tokens_decoder"]
        for token in converted.get("added_tokens", ()):  # the converter makes all of them special
            token["special"] = stated.get(str(token["id"]), {}).get("special", True) is not False
        text = json.dumps(converted, ensure_ascii=False, indent=1)
        (scratch / "tokenizer.json").write_text(text, encoding="utf-8")
        config = json.dumps(settings, ensure_ascii=False, indent=1)
        (scratch / "tokenizer_config.json").write_text(config, encoding="utf-8")

    return made_once(kept, "tokenizer.json", make)


def _convert(file: Path, pattern: str, settings: dict[str, Any]) -> Any:
    """A tokenizers.Tokenizer."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = _ranks(file)

    class Converter(TikTokenConverter):
        """Without the package tiktoken, which transformers only reads the file with."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    try:
        names = {int(i): str(entry["content"]) for i, entry in settings["added_tokens_decoder"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = "tokenizer_config.json has no added_tokens_decoder of ids and contents"
        raise _fault(file, what, error) from error
    # Ids between those that have names are reserved, and new ones take the next.
    last = max(names, default=len(ranks) - 1)
    if last > len(ranks) + _MOST_SPECIAL:
        raise _fault(file, "the id of a special token is too large", last)
    special = [names.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), last + 1)]
    tokenizer = Converter(str(file), pattern, extra_special_tokens=special).converted()
    wrong = next((name for i, name in names.items() if tokenizer.token_to_id(name) != i), None)
    if wrong is not None:
        raise _fault(file, "the special tokens do not follow the others", wrong)
    return tokenizer


def _ranks(file: Path) -> dict[bytes, int]:
    """Bytes of a token -> its id."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise _fault(file, f"line {len(ranks) + 1} is no token and its rank", error) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
        what = "the ids are not 0 to their number, or a single byte has none"
        raise _fault(file, what, f"{len(ranks)} ids")
    return ranks


def _pattern(directory: Path) -> str:
    """`pat_str` of tokenization_*.py: a text, or "…".join([texts])."""
    for file in sorted(directory.glob("tokenization_*.py")):
        text = read_text(file, "the tokenizer's code", _REMEDY)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == "pat_str" for target in targets):
                value = _constant(getattr(node, "value", None))
                if value is not None:
                    return value
    raise _fault(directory, "no tokenization_*.py says how text is split (pat_str)", None)


def _constant(node: Any) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        between, parts = _constant(node.func.value), node.args[0] if len(node.args) == 1 else None
        if between is None or not isinstance(parts, ast.List | ast.Tuple):
            return None
        texts = [_constant(part) for part in parts.elts]
        return None if None in texts else between.join(text for text in texts if text is not None)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _fault(where: Path, what: str, observed: object) -> UserError:
    what = f"no tokenizer.json can be made of {FILE}: {what}"
    return UserError(what, where=str(where), observed=observed, remedy=_REMEDY)
