"""The model's tokenizer: loaded from local files, and whether its token ids are the model's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kt_ray.data import tiktoken_file
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_CONFIG = "copy config.json of the release there again"


def load_tokenizer(directory: str, key: str = "model.tokenizer") -> PreTrainedTokenizerFast:
    """The tokenizer in `directory`, from local files only.

    Raises:
        UserError: no tokenizer there, one that needs remote code, or one without character offsets.
    """
    from transformers import AutoTokenizer

    path = Path(directory).expanduser()
    required = "a directory with tokenizer.json (or its vocabulary files) and tokenizer_config.json"
    if not path.is_dir():
        raise UserError(
            "the tokenizer directory does not exist",
            where=key,
            observed=path,
            required=required,
            remedy="set model.tokenizer to a tokenizer directory",
        )
    if (path / tiktoken_file.FILE).is_file() and not (path / "tokenizer.json").is_file():
        path = tiktoken_file.with_tokenizer_json(path)
    config = _unknown_config(path)
    try:
        # Left out, trust_remote_code asks on standard input, and a "yes" there runs code of the directory.
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(path), config=config, local_files_only=True, trust_remote_code=False
        )
        # Settings of the wrong type come to light when they are used.
        tried = tokenizer("a", add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast))
        if not tried["input_ids"]:  # transformers makes some classes (Qwen's, DeepSeek's) of no file at all
            raise ValueError("the vocabulary is missing: a text has no tokens")
        _ = tokenizer.all_special_tokens, tokenizer.added_tokens_decoder, tokenizer.special_tokens_map
    except BaseException as error:  # many kinds, panics of Rust among them: nothing usable is there
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(
            "no tokenizer can be loaded",
            where=f"{key}={path}",
            observed=f"{type(error).__name__}: {str(error)[:160]}",
            required=required,
            remedy="copy the model's tokenizer files there, or point model.tokenizer at them",
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            "the tokenizer gives no character offsets, which the answer mask needs",
            where=f"{key}={path}",
            observed=type(tokenizer).__name__,
            required="a fast tokenizer (tokenizer.json)",
            remedy="save its tokenizer.json into that directory, or set model.tokenizer to one that has it",
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(Path(directory).expanduser())
    return cast("PreTrainedTokenizerFast", tokenizer)


def _template_of_processor(directory: Path) -> str | None:
    """The chat template that a multimodal release, as Qwen3-Omni's, has for its processor alone."""
    file = directory / "chat_template.json"
    if not file.is_file():
        return None
    what, remedy = "the processor's chat_template.json", "copy chat_template.json of the release there again"
    found = read_json(file, what, remedy).get("chat_template")
    return cast("str | None", check_shape(found, str, file, what, remedy, "chat_template"))


def _unknown_config(path: Path) -> PreTrainedConfig | None:
    """What a tokenizer asks config.json for, where transformers does not know that type of model.

    Left to it, transformers checks values of which it cannot know what they belong to: Kimi-K2's YaRN ends in
    an AttributeError.

    Returns:
        None: transformers reads the file, or there is none.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    file = path / "config.json"
    config = read_json(file, "the model's config.json", _CONFIG) if file.is_file() else {}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return None
    asked = {"model_type": kind, "tokenizer_class": config.get("tokenizer_class")}
    return PreTrainedConfig.from_dict(asked)


def vocabulary_of(model_dir: str) -> int | None:
    """vocab_size of the model's config.json; None = it does not say, or there is none that can be read."""
    try:
        config = read_json(Path(model_dir) / "config.json", "the model's config.json", "")
    except UserError:
        return None  # the checkpoint reader names what is wrong with it
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def check_vocabulary(largest: int, model_dir: str) -> None:
    """Refuse token ids that the model's embedding does not have.

    Raises:
        UserError: `largest` >= vocab_size of the model's config.json (if there is one).
    """
    size = vocabulary_of(model_dir)
    if size is not None and largest >= size:
        raise UserError(
            "the tokenizer does not belong to this model",
            where="model.tokenizer",
            observed=f"token id {largest}",
            required=f"ids below the model's vocab_size {size}",
            remedy="set model.tokenizer to this model's own tokenizer",
        )
