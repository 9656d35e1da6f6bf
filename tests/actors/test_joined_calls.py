"""Calls of replicas that decode: which share an engine call, and that somebody always goes on."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from kt_ray.actors.joined_calls import JoinedCalls
from kt_ray.transport.messages import Message

MANY, FEW = 20, 5  # tokens: by panels, by rows of the weights


def row_tokens(layer: int) -> int:
    return 16


def message(replica: int, layer: int, tokens: int = MANY, joined: bool = True, **facts: Any) -> Message:
    facts |= {"joined": True} if joined else {}
    return Message(("forward", 1, layer, 0, replica), {"x": torch.empty(tokens, 1)}, facts)


def called(calls: list[list[Message]]) -> list[list[tuple[int, int]]]:
    """(replica, layer) of each message of each call."""
    return [[(part.tag[4], part.tag[2]) for part in call] for call in calls]


def test_who_is_ahead_waits_for_who_is_behind_and_both_are_one_call() -> None:
    calls = JoinedCalls((0, 1), row_tokens)
    assert called(calls.add(message(0, 1))) == [[(0, 1)]]  # the other may have nothing to do
    assert called(calls.add(message(0, 2))) == [[(0, 2)]]
    assert called(calls.add(message(1, 1))) == [[(1, 1)]]
    assert calls.add(message(0, 3)) == []
    assert called(calls.add(message(1, 2))) == [[(1, 2)]]
    assert called(calls.add(message(1, 3))) == [[(0, 3), (1, 3)]]
    assert calls.add(message(1, 4)) == []
    assert called(calls.add(message(0, 4))) == [[(0, 4), (1, 4)]]  # in the replicas' order


def test_nobody_waits_for_a_replica_between_steps_or_one_that_reads_a_prompt() -> None:
    calls = JoinedCalls((0, 1), row_tokens)
    last = 3
    for layer in range(1, last + 1):
        calls.add(message(1, layer))
    for layer in range(1, last + 1):
        assert called(calls.add(message(0, layer))) == [[(0, layer)]]
    assert called(calls.add(message(1, 1, joined=False))) == [[(1, 1)]]
    for layer in range(1, last + 1):
        assert called(calls.add(message(0, layer))) == [[(0, layer)]]


@pytest.mark.parametrize(
    ("tokens", "adapters", "expected"),
    [
        ((MANY, MANY, MANY), (True, True, True), [[0, 1, 2]]),
        ((FEW, FEW, FEW), (True, True, True), [[0, 1, 2]]),
        ((FEW, 2 * FEW, 2 * FEW), (True, True, True), [[0, 1, 2]]),  # each alone goes by rows
        ((MANY, FEW, MANY), (True, True, True), [[0, 2], [1]]),
        ((MANY, MANY, MANY), (True, "a", "a"), [[0], [1, 2]]),
        ((0, MANY, 0), (True, True, True), [[0, 2], [1]]),  # a far actor may have none of the tokens
    ],
)
def test_a_call_has_one_adapter_and_one_order_of_additions(
    tokens: tuple[int, ...], adapters: tuple[bool | str, ...], expected: list[list[int]]
) -> None:
    calls = JoinedCalls(range(3), row_tokens)
    for replica in range(3):  # all in the midst of a step
        calls.add(message(replica, 1))
    found: list[list[Message]] = []
    for replica, (count, adapter) in enumerate(zip(tokens, adapters, strict=True)):
        facts = {} if adapter is True else {"adapter": adapter}
        found += calls.add(message(replica, 2, count, **facts))
    assert [[part.tag[4] for part in call] for call in found] == expected


@pytest.mark.parametrize("seed", range(40))
def test_all_replicas_come_to_their_end_at_any_number_of_actors(seed: int) -> None:
    """Messages arrive in any order, replicas rest and read prompts between steps, and each goes on when all
    actors have answered."""
    draw = random.Random(seed)
    replicas, actors, layers = draw.randint(2, 4), draw.randint(1, 3), range(1, draw.randint(2, 6))
    steps = {r: [draw.random() < 0.8 for _ in range(draw.randint(1, 6))] for r in range(replicas)}
    calls = [JoinedCalls(range(replicas), row_tokens) for _ in range(actors)]
    way = {r: [(step, layer) for step in range(len(steps[r])) for layer in layers] for r in range(replicas)}
    travelling: list[tuple[int, Message]] = []  # (actor, message)
    answers: Counter[int] = Counter()

    def ask(replica: int) -> None:
        step, layer = way[replica].pop(0)
        sent = message(replica, layer, joined=steps[replica][step])
        travelling.extend((actor, sent) for actor in range(actors))

    for replica in range(replicas):
        ask(replica)
    while travelling:
        actor, sent = travelling.pop(draw.randrange(len(travelling)))
        for call in calls[actor].add(sent):
            assert len({part.tag[2] for part in call}) == 1
            for part in call:
                replica = part.tag[4]
                answers[replica] += 1
                if answers[replica] % actors == 0 and way[replica]:
                    ask(replica)
    assert not any(way.values())
    assert answers == {r: len(steps[r]) * len(layers) * actors for r in range(replicas)}
