"""Which replicas' tokens an expert actor computes in one engine call while answers are sampled. No waiting.

Replicas walk the layers at their own pace. Where the driver says so (`SessionSpec.joined`), a call of a
replica that decodes waits for those that are behind it in such a step, and one engine call reads the experts
for all that have come to the layer (docs/decisions/024-joined-decoding.md).

Only a message that will be sent is waited for: its sender is in the midst of a step, and behind. Who is
furthest behind waits at no actor, so somebody goes on, however many actors there are and whatever each knows
of the others' progress. A replica without requests, or one that reads a prompt in, is not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kt_ray.config.limits import ROW_TOKENS
from kt_ray.transport.messages import Message


class JoinedCalls:
    """Takes the messages of a session one by one; says what is to be computed then.

    Args:
        replicas: whose messages come.
    """

    def __init__(self, replicas: Iterable[int]) -> None:
        # the last layer that each has asked for in a step that joins; it is the model's last between steps
        self._done = dict.fromkeys(replicas, math.inf)
        self._held: dict[int, Message] = {}  # by replica

    def add(self, message: Message) -> list[list[Message]]:
        """Engine calls to make now, each of the messages in it; those that wait come with a later message."""
        if not message.facts.get("joined", False):
            return [[message]]
        self._held[message.tag[4]] = message
        layer = min(map(_layer, self._held.values()))
        if any(done < layer for other, done in self._done.items() if other not in self._held):
            return []
        there = [other for other in sorted(self._held) if _layer(self._held[other]) == layer]
        self._done.update(dict.fromkeys(there, layer))
        return _alike(self._held.pop(other) for other in there)


def _layer(message: Message) -> int:
    layer: int = message.tag[2]
    return layer


def _alike(messages: Iterable[Message]) -> list[list[Message]]:
    """Calls with one adapter each, that take the order of additions which every message would take alone: so
    its tokens get the same bits."""
    calls: list[list[Message]] = []
    for message in messages:
        for call in calls:
            few, all_few = (_tokens(part) <= ROW_TOKENS for part in (call[:1], [*call, message]))
            same = message.facts.get("adapter") == call[0].facts.get("adapter")
            if same and few == all_few and few == (_tokens([message]) <= ROW_TOKENS):
                call.append(message)
                break
        else:
            calls.append([message])
    return calls


def _tokens(messages: Iterable[Message]) -> int:
    return sum(message.tensors["x"].shape[0] for message in messages)
