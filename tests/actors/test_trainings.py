"""Several trainings over one base: each gets the bits that it gets alone, however they take turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kt_ray.actors.actor import PlainActor
from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.batch import Wave
from kt_ray.config.schema import Config
from kt_ray.optim.optimizers import AdamStep
from tests.helpers.devices import CARD, by_name
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, waves_of

LAYOUTS = {
    "one": (),
    "stages and sockets": ("rule.stages=2", "rule.experts.sockets=2"),
    "replicas": ("rule.replicas=2", "rule.experts.sockets=2"),
    CARD: ("rule.device=cuda",),
}
ADAM = AdamStep((0.8, 0.9), 1e-9, 0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3")


class Turns:
    """A cluster that takes passes and steps of trainings by name."""

    def __init__(self, cluster: ActorCluster, config: Config) -> None:
        self.cluster, self.number, self.steps = cluster, 0, dict[str, int]()
        self.present: str | None = None
        rows = {name: random_rows(4, lengths=(9, 4, 7, 5), seed=seed) for seed, name in enumerate("ab", 1)}
        self.waves: dict[str, Wave] = {
            name: waves_of(own, config, cluster.plan) for name, own in rows.items()
        }

    def take(self, name: str) -> None:
        if self.present != name:
            seed = None if name in self.steps else ord(name)
            self.cluster.switch_training(name, self.present, seed)
            self.steps.setdefault(name, 0)
            self.present = name

    def forward_backward(self, name: str) -> float:
        self.take(name)
        self.number += 1
        step = self.steps[name]
        return self.cluster.run_pass(
            one_pass(self.cluster, self.waves[name], number=self.number, step=step)
        ).loss

    def update(self, name: str) -> float:
        self.take(name)
        norm = self.cluster.prepare(self.steps[name])
        self.cluster.commit(self.steps[name], 1e-2, 1.0, ADAM)
        self.steps[name] += 1
        return norm

    def parameters(self, name: str) -> dict[str, Tensor]:
        self.take(name)
        return self.cluster.parameters()


def alone(model: Path, config: Config, name: str) -> tuple[list[float], dict[str, Tensor]]:
    with local_cluster(model, config) as cluster:
        turns = Turns(cluster, config)
        seen = []
        for _ in range(3):
            seen += [turns.forward_backward(name), turns.update(name)]
        return seen, turns.parameters(name)


def addresses(cluster: ActorCluster) -> list[int]:
    """Where every actor's LoRA is that it computes with."""
    actors = [cast(Any, handle).actor for handle in cluster.handles]
    return [tensor.data_ptr() for actor in actors for tensor in actor.lora("param").values()]


@pytest.mark.parametrize("stays", [False, True], ids=["pointers", "copies"])
def test_a_switch_exchanges_pointers_unless_addresses_are_known(
    model: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    for kind in (AttentionWorker, ExpertActor):

        def state(self: PlainActor, given: Callable[..., Any] = kind._training_state) -> Any:
            return [(tensor, stays) for tensor, _ in given(self)]

        monkeypatch.setattr(kind, "_training_state", state)
    config = config_for(model, "optim.lora_plus_ratio=4")  # an optimizer of matrices
    check_turns(model, config)
    with local_cluster(model, config) as cluster:
        turns, seen = Turns(cluster, config), {}
        for name in "abab":
            turns.take(name)
            seen.setdefault(name, []).append(addresses(cluster))
    (a, a_again), (b, b_again) = seen["a"], seen["b"]
    assert a == a_again and b == b_again
    assert a == b if stays else not set(a) & set(b)


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
def test_trainings_that_take_turns_are_each_as_alone(model: Path, layout: str) -> None:
    check_turns(model, config_for(model, *LAYOUTS[layout]))


def check_turns(model: Path, config: Config) -> None:
    expected = {name: alone(model, config, name) for name in "ab"}
    assert expected["a"][0] != expected["b"][0]
    with local_cluster(model, config) as cluster:
        turns = Turns(cluster, config)
        seen: dict[str, list[float]] = {"a": [], "b": []}
        for _ in range(3):  # gradients of both wait for a step at the same time
            for name in "ab":
                seen[name].append(turns.forward_backward(name))
            for name in "ba":
                seen[name].append(turns.update(name))
        for name in "ab":
            assert seen[name] == expected[name][0]
            values = turns.parameters(name)
            assert all(torch.equal(values[key], value) for key, value in expected[name][1].items())


def test_a_step_takes_the_adam_it_is_given(model: Path) -> None:
    config = config_for(model)
    with local_cluster(model, config) as cluster:
        turns = Turns(cluster, config)
        turns.take("a")
        before = {name: value.double() for name, value in turns.parameters("a").items()}
        turns.forward_backward("a")
        grads = cluster.gradients()
        turns.update("a")
        after = turns.parameters("a")
    for name, value in before.items():
        # The first step: both moments are the gradient's, bias corrected.
        expected = value * (1 - 1e-2 * ADAM.weight_decay)
        expected -= 1e-2 * grads[name].double() / (grads[name].double().abs() + ADAM.eps)
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-4, atol=1e-6)


def test_state_from_disk_with_and_without_the_optimizer(model: Path, tmp_path: Path) -> None:
    config = config_for(model, *LAYOUTS["stages and sockets"])
    with local_cluster(model, config) as cluster:
        turns = Turns(cluster, config)
        for _ in range(2):
            turns.forward_backward("a")
            turns.update("a")
        saved = turns.parameters("a")
        cluster.save_shards(str(tmp_path))
        turns.forward_backward("a")
        turns.update("a")
        third = turns.parameters("a")
        results = {}
        for optimizer in (True, False):
            turns.take("b")
            steps = 2 if optimizer else 0
            cluster.restore(str(tmp_path), steps, optimizer)
            turns.steps["b"] = steps
            values = turns.parameters("b")
            assert all(torch.equal(values[name], value) for name, value in saved.items())
            turns.waves["b"] = turns.waves["a"]
            turns.forward_backward("b")
            turns.update("b")
            results[optimizer] = turns.parameters("b")
    assert all(torch.equal(results[True][name], value) for name, value in third.items())
    assert any(not torch.equal(results[False][name], value) for name, value in third.items())


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
def test_kept_copies_stay_as_they_were(model: Path, layout: str) -> None:
    config = config_for(model, *LAYOUTS[layout])

    def loss(turns: Turns, adapters: bool | str) -> float:
        turns.number += 1
        spec = one_pass(cluster, turns.waves["a"], "eval", number=turns.number)
        return cluster.run_pass(type(spec)(**{**vars(spec), "adapters": adapters})).loss

    with local_cluster(model, config) as cluster:
        turns = Turns(cluster, config)
        turns.forward_backward("a")
        turns.update("a")
        cluster.keep_adapter("first")
        kept = loss(turns, True)
        base = loss(turns, False)
        turns.forward_backward("a")
        turns.update("a")
        now = loss(turns, True)
        assert len({kept, base, now}) == 3
        turns.take("b")  # another training, with another copy
        turns.forward_backward("b")
        turns.update("b")
        of_b = loss(turns, True)
        cluster.keep_adapter("second")
        assert loss(turns, "first") == kept
        other = loss(turns, "second")
        assert other == of_b
        cluster.drop_adapter("first")
        turns.take("a")
        cluster.keep_adapter("third")  # in the memory of the one that was dropped
        turns.take("b")
        assert loss(turns, "third") == now
        assert loss(turns, "second") == other
