"""What ends an answer, and what the options of a question are compared behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.runs.generation import _end_tokens
from kt_ray.runs.questions import _options
from tests.data.conftest import make_tokenizer

HEAD = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
TURNS = "{% for m in messages %}" + HEAD + "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
WANTS = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('none') }}{% endif %}"
TEMPLATES = {
    "usual": TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "opens a thought": TURNS + OPENS,
    "wants a system prompt": WANTS + TURNS + OPENS,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_an_answer_is_found(tmp_path: Path, name: str) -> None:
    """MiniMax-M2's and DeepSeek-R1's prompts open a thought that an answer without one does not have."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    tokenizer.eos_token = None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert _end_tokens(str(tmp_path), ChatEncoder(tokenizer)) == (end,)


def test_options_are_not_seen_with_the_thoughts_behind_the_right_one() -> None:
    seen: list[tuple[Turn, ...]] = []

    def encode(row: Conversation) -> tuple[Any, None]:
        seen.append(row.messages)
        return SimpleNamespace(tolist=lambda: [1, ord(row.messages[-1]["content"])]), None

    config = SimpleNamespace(eval=SimpleNamespace(letters="AB"))
    generation = SimpleNamespace(config=config, encoder=SimpleNamespace(encode=encode))
    answer = Turn(role="assistant", content="B", reasoning_content="It is B.")
    row = Conversation((Turn(role="user", content="A or B?"), answer), 0, "row 1")
    assert _options(cast(Any, generation), row).tokens == {"A": ord("A"), "B": ord("B")}
    assert [messages[-1] for messages in seen] == [{"role": "assistant", "content": c} for c in "AB"]
