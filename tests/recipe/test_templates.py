"""Template names: each stands for one that there is, and the file that is ours says what it should."""

from __future__ import annotations

from pathlib import Path

import kt_ray.recipe
from kt_ray.batch import IGNORE
from kt_ray.config.limits import WORDS
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.demo.builder import ensure_demo_model
from kt_ray.recipe.templates import TEMPLATES

FOLDER = Path(kt_ray.recipe.__file__).parent


def test_each_name_stands_for_a_template() -> None:
    for name, template in TEMPLATES.items():
        assert template.name is None or template.name in WORDS["data.template"], name
        assert template.file is None or (FOLDER / template.file).is_file(), name
        assert template.name is None or template.file is None, name


def test_the_default_template() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    encoder = ChatEncoder(tokenizer, str(FOLDER / "default.jinja"))
    turns = [("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "B")]
    messages = [Turn(role=role, content=text) for role, text in turns]
    end = tokenizer.eos_token
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (f"System: S{end}\nHuman: Q{end}\nAssistant:A{end}\nHuman: R{end}\nAssistant:B{end}\n")
    _, labels = encoder.encode(Conversation(tuple(messages), 0, "here"))
    assert tokenizer.decode(labels[labels != IGNORE]) == f"A{end}B{end}"
