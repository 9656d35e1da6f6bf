"""tiktoken.model becomes a tokenizer.json that gives tiktoken's ids; nothing of the release's code is run."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kt_ray.data import tiktoken_file
from kt_ray.data.template import ChatEncoder
from kt_ray.data.tokenizer_files import load_tokenizer
from kt_ray.errors import UserError

# A release's code: the constants are what counts; running it would fail.
CODE = '''
raise RuntimeError("this code must never run")

class TikTokenTokenizer:
    pat_str = "|".join(
        [
            r"""[\\p{Han}]+""",
            r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{L}&&[^\\p{Han}]]+(?i:'s|'t|'re)?""",
            r"""\\p{N}{1,3}""",
            r""" ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*""",
            r"""\\s*[\\r\\n]+""",
            r"""\\s+(?!\\S)""",
            r"""\\s+""",
        ]
    )
'''
PATTERN = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+(?i:'s|'t|'re)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Hello, world! It's 12345 o'clock.\n\n  Two  spaces\tand a tab.   ",
    "你好，世界。混合mixed文字and拉丁 naïve café — “quotes” 🙂🙃 \r\n end",
    "lowest lower newest widest; ababababab aaaaaaa",
    "",
]


def ids(ranks: dict[bytes, int], text: str) -> list[int]:
    """What tiktoken does: pieces by the pattern; in each, the pair whose whole has the lowest rank joins."""
    found: list[int] = []
    for piece in regex.findall(PATTERN, text, flags=regex.V1):
        parts = [bytes([b]) for b in piece.encode()]
        while True:
            joined = [(ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
            best = min(((rank, i) for rank, i in joined if rank is not None), default=None)
            if best is None:
                break
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        found += [ranks[part] for part in parts]
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A byte-level BPE of these texts, its merges in the order of their ids."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    printed = sorted(alphabet)  # the characters that stand for bytes, in their own order
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    byte_of = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
    assert set(printed) == set(byte_of)
    tokens = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[c] for c in token) for token, _ in tokens]
    first = [bytes([b]) for b in range(256)]
    return {token: i for i, token in enumerate([*first, *(t for t in merged if len(t) > 1)])}


@pytest.fixture
def release(tmp_path: Path, ranks: dict[bytes, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KT_RAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "release"
    folder.mkdir()
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenization_kimi.py").write_text(CODE)
    base = len(ranks)
    special = {base: "[BOS]", base + 1: "[EOS]", base + 2: "<|im_end|>", base + 5: "<|im_user|>"}
    config = {
        "added_tokens_decoder": {str(i): {"content": name, "special": True} for i, name in special.items()},
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    yield folder


@pytest.mark.parametrize("text", TEXTS)
def test_the_ids_are_tiktokens(release: Path, ranks: dict[bytes, int], text: str) -> None:
    tokenizer = load_tokenizer(str(release))
    assert tokenizer(text)["input_ids"] == ids(ranks, text)
    assert tokenizer.decode(ids(ranks, text)) == text


def test_special_tokens_keep_their_ids_and_offsets_are_characters(
    release: Path, ranks: dict[bytes, int]
) -> None:
    tokenizer, base = load_tokenizer(str(release)), len(ranks)
    assert tokenizer.convert_tokens_to_ids(["[BOS]", "<|im_user|>"]) == [base, base + 5]
    assert tokenizer.convert_ids_to_tokens([base + 3]) == [f"<|reserved_token_{base + 3}|>"]
    assert tokenizer.eos_token_id == base + 2 and len(tokenizer) == base + 6
    text = "a<|im_end|>你好"
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert encoded["input_ids"] == [*ids(ranks, "a"), base + 2, *ids(ranks, "你好")]
    assert encoded["offset_mapping"][:2] == [(0, 1), (1, 11)] and encoded["offset_mapping"][-1][1] == len(
        text
    )
    assert "<|im_user|>hi<|im_end|>" in ChatEncoder(tokenizer).render([{"role": "user", "content": "hi"}])


def test_a_token_that_the_release_calls_text_stays_in_it(release: Path) -> None:
    """Kimi's `<think>` and the tokens around calls; special ones are left out of answers."""
    file = release / "tokenizer_config.json"
    config = json.loads(file.read_text())
    last = max(map(int, config["added_tokens_decoder"])) + 1
    config["added_tokens_decoder"][str(last)] = {"content": "<think>", "special": False}
    file.write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(release))
    given = tokenizer("a<think>b<|im_end|>")["input_ids"]
    assert last in given
    assert tokenizer.decode(given, skip_special_tokens=True) == "a<think>b"


def test_it_is_made_once_and_again_when_the_release_changes(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tiktoken_file.with_tokenizer_json(release)
    assert sorted(p.name for p in kept.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]  # nothing half made beside it
    assert kept.stat().st_mode & 0o777 == 0o755  # a cache that several users share
    with monkeypatch.context() as patch:
        patch.setattr(tiktoken_file, "_convert", lambda *given: pytest.fail("made twice"))
        assert tiktoken_file.with_tokenizer_json(release) == kept
    (release / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    other = tiktoken_file.with_tokenizer_json(release)
    assert other != kept
    assert ChatEncoder(load_tokenizer(str(release))).render([{"role": "user", "content": "hi"}]) == "hi!"


@pytest.mark.parametrize("call", ["mkdir", "write_text"])
def test_a_cache_that_cannot_be_written_is_said(
    release: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(tiktoken_file, "_convert", lambda *_: SimpleNamespace(to_str=lambda **_: "{}"))
    monkeypatch.setattr(Path, call, refused)
    with pytest.raises(UserError, match=r"cache cannot be written.*Read-only file system.*set KT_RAY_CACHE"):
        tiktoken_file.with_tokenizer_json(release)


def test_what_cannot_be_converted_is_said(release: Path) -> None:
    def fault(message: str) -> None:
        with pytest.raises(UserError, match=message) as raised:
            load_tokenizer(str(release))
        assert "tokenization_*.py" in raised.value.remedy or "tokenizer" in raised.value.remedy

    (release / "tokenization_kimi.py").write_text("pat_str = make_pattern()\n")
    fault(r"no tokenization_\*\.py says how text is split")
    (release / "tokenization_kimi.py").write_text("pat_str: str = r'.'\n")
    (release / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"999": {"content": "[X]"}}}')
    load_tokenizer(str(release))  # ids between are reserved
    (release / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": {"content": "[BOS]"}}}')
    fault("the special tokens do not follow the others")
    (release / "tokenizer_config.json").write_text('{"added_tokens_decoder": [1]}')
    fault("no added_tokens_decoder")
    (release / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    (release / "tiktoken.model").write_text("!!! 0\n")
    fault("line 1 is no token and its rank")
    (release / "tiktoken.model").write_text("YQ== 0\n")
    fault("a single byte has none")
