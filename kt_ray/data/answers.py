"""Which answers of a conversation are trained, and messages in the forms that templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kt_ray.data.row_types import Conversation, Message


def plain_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them."""
    return [{key: value for key, value in m.items() if key != "weight"} for m in messages]


def answers_wanted(conversation: Conversation, train_on: str) -> list[bool]:
    """For each answer of a conversation, in order, whether it is trained.

    Of pairs and verdicts only what follows the prompt is: the rest is the same in both, or not judged.
    """
    messages = conversation.messages
    questions = [i for i, m in enumerate(messages) if m["role"] == "user"]
    after = -1
    if train_on == "last" or conversation.kind != "sft":
        after = questions[-1]
    if conversation.rejected is not None:
        same = zip(messages, conversation.rejected, strict=False)
        after = next((i for i, (a, b) in enumerate(same) if a != b), len(messages)) - 1
    return [i > after and m.get("weight", 1) != 0 for i, m in enumerate(messages) if m["role"] == "assistant"]


def arguments_as_text(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same messages with the arguments of tool calls as JSON text."""
    result: list[Message] = []
    for message in messages:
        changed = message.copy()
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call in message["tool_calls"]
            ]
        result.append(changed)
    return tuple(result)
