"""A tokenizer comes from local files alone, runs no code of theirs, and belongs to its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_ray.data.tokenizer_files import check_vocabulary, load_tokenizer
from kt_ray.errors import UserError
from tests.data.conftest import make_tokenizer


def test_no_code_of_a_tokenizer_directory_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where somebody says yes to transformers' question (`yes | python launch.py ...`)."""
    directory, ran = tmp_path / "model", tmp_path / "ran"
    make_tokenizer().save_pretrained(directory)
    (directory / "foreign.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Foreign\n"
    )
    file = directory / "tokenizer_config.json"
    named = {"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": [None, "foreign.Foreign"]}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        load_tokenizer(str(directory))
    assert not ran.exists()


def test_load_tokenizer_faults(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer directory does not exist.*model\.tokenizer"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers makes Qwen's class of no file at all: rows would be their special tokens alone."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(UserError, match=r"no tokenizer can be loaded.*a text has no tokens"):
        load_tokenizer(str(tmp_path))
    for kind in ("Qwen2Tokenizer", "LlamaTokenizerFast"):
        settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=r"no tokenizer can be loaded.*a text has no tokens"):
            load_tokenizer(str(tmp_path))


def test_a_type_of_model_that_transformers_does_not_know(tmp_path: Path) -> None:
    """Its config.json beside the tokenizer, as Kimi-K2's: transformers fails to check its YaRN."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    rope = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0}
    config = {"model_type": "kimi_k2", "max_position_embeddings": 131072, "rope_theta": 5e4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": rope}))
    loaded = load_tokenizer(str(tmp_path))
    assert type(loaded) is type(tokenizer) and loaded("abc").input_ids == tokenizer("abc").input_ids

    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json.*copy config\.json"):
        load_tokenizer(str(tmp_path))


def test_the_chat_template_may_be_the_processors_alone(tmp_path: Path) -> None:
    """As Qwen3-Omni's; kt_ray's default one would stand in for it."""
    make_tokenizer(None).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages }}"
    make_tokenizer("own").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template == "own"
    (tmp_path / "chat_template.jinja").unlink()
    file.write_text("{}")
    with pytest.raises(UserError, match=r"chat_template\.json.*copy chat_template\.json"):
        load_tokenizer(str(tmp_path))


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    check_vocabulary(10**9, str(tmp_path))  # no config.json: the checkpoint reader says so
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    check_vocabulary(99, str(tmp_path))
    with pytest.raises(UserError, match=r"does not belong to this model.*token id 100"):
        check_vocabulary(100, str(tmp_path))
