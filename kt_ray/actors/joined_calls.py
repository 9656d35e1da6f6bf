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
from collections.abc import Callable, Iterable
from typing import Any

from kt_ray.transport.messages import Message


class JoinedCalls:
    """Takes the messages of a session one by one; says what is to be computed then.

    Args:
        replicas: whose messages come. row_tokens: layer -> tokens up to which a call takes the other order of
            additions (`Engine.row_tokens`).
    """

    def __init__(self, replicas: Iterable[int], row_tokens: Callable[[int], int]) -> None:
        self._row_tokens = row_tokens
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
        return _alike((self._held.pop(other) for other in there), self._row_tokens(layer))


def _layer(message: Message) -> int:
    layer: int = message.tag[2]
    return layer


def _alike(messages: Iterable[Message], row_tokens: int) -> list[list[Message]]:
    """Calls with one adapter each, whose messages all take the same order of additions: so their tokens get
    the bits that they would get alone."""
    calls: dict[tuple[Any, bool], list[Message]] = {}
    for message in messages:
        few = message.tensors["x"].shape[0] <= row_tokens
        calls.setdefault((message.facts.get("adapter"), few), []).append(message)
    return list(calls.values())
