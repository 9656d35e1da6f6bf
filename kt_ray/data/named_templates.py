"""Chat templates that data.template names; their text is in `templates/`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kt_ray.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Tokens that must be single tokens of the tokenizer: written as text they would be something else.
TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "deepseek3": ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "kimi": ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (),
    "olmoe": (),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "plain": (),
    "qwen": ("<|im_start|>", "<|im_end|>"),
}
_ENDED_BY_EOS = ("mistral", "olmoe", "plain")


def named_template(name: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The Jinja text of a template, a key of TOKENS.

    Raises:
        UserError: the tokenizer lacks a token that it uses.
    """
    vocabulary = tokenizer.get_vocab()
    lacking = [token for token in TOKENS[name] if token not in vocabulary]
    if name in _ENDED_BY_EOS and tokenizer.eos_token is None:
        lacking.append("an end-of-sequence token (eos_token)")
    if lacking:
        raise UserError(
            f"the tokenizer does not have the tokens of the template {name}",
            where=f"data.template={name}",
            observed="missing " + ", ".join(lacking),
            required="a tokenizer of a model that was trained with this template",
            remedy="set data.template=null for the tokenizer's own template, or one made of its own tokens",
        )
    return _file(name)


def _file(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def default_template() -> str:
    """For tokenizers that have none."""
    return _file("default")
