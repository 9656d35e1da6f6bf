"""An attention worker's lane and expert actors together, against the actors alone."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kt_ray.config.schema import LoraConfig, OptimConfig
from kt_ray.experts import LocalExperts, LocalExpertsSpec
from kt_ray.experts.device_lane import DeviceLane
from kt_ray.experts.lane_device import PinnedWeights
from kt_ray.experts.shared_experts import OpenExperts
from kt_ray.experts.worker_lane import LaneTokens, WorkerLane
from kt_ray.model.token_exchange import TokenExchange
from kt_ray.native import DropoutSpec
from kt_ray.placement import lane_share
from kt_ray.placement.lane_share import ahead_experts
from kt_ray.placement.plan_types import LanePlan
from tests.experts.test_lane_host import close_to
from tests.helpers.devices import DEVICES

CPU = torch.device("cpu")
HELD = ((0, 2, 5), (1, 3, 4, 6, 7))  # of two actors; a token may also choose no expert (8)
EXPERTS, WIDTH, TOKENS, PER_TOKEN = 8, 48, 60, 3
LAYERS = (0, 2)
LANES = {
    "half": LanePlan(("cpu",), (), ((0, 0.5),)),
    "all": LanePlan(("cpu",), (), ((0, 1.0),)),
    "recomputed": LanePlan(("cpu",), (), ((0, 0.6),), recompute=True),
    "held": LanePlan(("cpu",), (), ((0, 0.5),), held=3),
    "more for the second group": LanePlan(("cpu",), (), ((0, 0.3),), held=4, later=((0, 0.7),)),
    "ahead": LanePlan(("cpu",), (), ((0, 0.7),), held=3, ahead=3),
    "all, ahead, recomputed": LanePlan(("cpu",), (), ((0, 1.0),), held=6, ahead=2, recompute=True),
}


class Link:
    """The exchange with actors in this process, who compute at once. sent: what they got, by layer, group."""

    def __init__(self, actors: Sequence[LocalExperts]) -> None:
        self.actors = actors
        self.sent: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.elsewhere: dict[tuple[int, int], Sequence[int]] = {}
        self._answers: dict[tuple[int, int], list[Any]] = {}

    def after(self, ready: Any) -> None:
        ready.synchronize()

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def submit_forward(
        self,
        layer: int,
        group: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        keys_T: Tensor,
        keep: bool,
        elsewhere: Sequence[int] = (),
    ) -> None:
        assert ids_TK.dtype == torch.int32 and len(x_TH) == len(ids_TK) == len(weights_TK) == len(keys_T)
        self.sent[layer, group] = x_TH, ids_TK, weights_TK, keys_T
        self.elsewhere[layer, group] = elsewhere
        answers = []
        for actor in self.actors:
            if elsewhere:
                actor.count_elsewhere(layer, group, elsewhere)
            local = actor.local_ids(layer, ids_TK, EXPERTS)
            answers.append(actor.forward(layer, group, [x_TH], local, weights_TK, keys_T, keep=keep))
        self._answers[layer, group] = answers

    def join_forward(self, layer: int, group: int) -> Tensor:
        return functools.reduce(torch.add, self._answers.pop((layer, group)))

    def submit_backward(self, layer: int, group: int, dy_TH: Tensor) -> None:
        self._answers[layer, group] = [actor.backward(layer, group, [dy_TH]) for actor in self.actors]

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        dx, dw = zip(*self._answers.pop((layer, group)), strict=True)
        return functools.reduce(torch.add, dx), functools.reduce(torch.add, dw)

    def submit_gradients(self, layer: int, group: int, of_actors: Mapping[int, dict[str, Tensor]]) -> None:
        for rank, tensors in of_actors.items():
            values = dict(tensors)
            if "ids" in values:
                self.actors[rank].add_gradients(layer, group, values.pop("ids"), values)


@contextmanager
def actors_of(path: Path, dropout: float) -> Iterator[list[LocalExperts]]:
    """Two actors with adapters that do something."""
    made = []
    for rank, held in enumerate(HELD):
        spec = LocalExpertsSpec(
            rank, -1, (), 1, held, "auto", "auto", "retain", model_dir=str(path), shared=True,
            lora=LoraConfig(rank=4, dropout=dropout), optim=OptimConfig(), seed=5,
        )  # fmt: skip
        host = LocalExperts(spec)
        host.load()
        for name, tensor in host.lora.named("param"):
            if "lora_B" in name:
                seed = sum(name.encode())
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        host.begin_pass(3, True)
        made.append(host)
    try:
        yield made
    finally:
        for host in made:
            host.close()


@contextmanager
def lane_of(plan: LanePlan, actors: Sequence[LocalExperts]) -> Iterator[WorkerLane]:
    lane = WorkerLane(plan, 1, EXPERTS)
    lane.take({a.spec.rank: OpenExperts(a.export()) for a in actors}, range(4))
    try:
        yield lane
    finally:
        lane.close()


def a_pass(
    tokens: TokenExchange, actors: Sequence[LocalExperts], sizes: Sequence[int] = (23, 37)
) -> dict[str, Tensor]:
    """Two groups of micro-batches of these sizes forward and backward; gradients by name."""
    device = tokens.device
    g = torch.Generator().manual_seed(9)
    found, dys, total = dict[str, Tensor](), {}, sum(sizes)
    for layer in LAYERS:
        for group in range(2):
            ids = torch.randint(0, EXPERTS + 1, (total, PER_TOKEN), generator=g, dtype=torch.int32)
            x, dy = (torch.randn(total, WIDTH, generator=g) for _ in range(2))
            weights = torch.rand(total, PER_TOKEN, generator=g)
            keys = torch.arange(total) + 2**32 * group
            parts = [tensor.to(device).split(list(sizes)) for tensor in (x, ids, weights)]
            tokens.submit_forward(layer, group, *parts, keys.split(list(sizes)), True)
            tokens.settle()
            dys[layer, group] = dy.to(device)
        for group in range(2):
            found[f"y {layer} {group}"] = tokens.join_forward(layer, group).cpu().clone()
    for layer in reversed(LAYERS):
        for group in range(2):
            tokens.submit_backward(layer, group, dys[layer, group].split(list(sizes)))
        for group in range(2):
            dx, dw = tokens.join_backward(layer, group)
            found |= {f"dx {layer} {group}": dx.cpu().clone(), f"dw {layer} {group}": dw.cpu().clone()}
    return found | {name: grad.clone() for actor in actors for name, grad in actor.lora.named("grad")}


def with_lane(
    path: Path, plan: LanePlan, dropout: float, device: str = "cpu", **more: Any
) -> tuple[dict[str, Tensor], Link, int]:
    """What a pass gives, what the actors got, and the bytes of experts that were carried."""
    plan = replace(plan, devices=(device,))
    with actors_of(path, dropout) as actors, lane_of(plan, actors) as lane:
        link = Link(actors)
        spec = DropoutSpec(p=dropout, seed=5, step=3) if dropout else None
        tokens = LaneTokens(lane, link, torch.device(device), spec, True, 2)
        found = a_pass(tokens, actors, **more)
        tokens.close()
        return found, link, lane.lane.carried


def plain(path: Path, dropout: float, **more: Any) -> tuple[dict[str, Tensor], list[Any]]:
    with actors_of(path, dropout) as actors:
        found = a_pass(TokenExchange(Link(actors), CPU), actors, **more)
        return found, [actor.take_counters() for actor in actors]


@pytest.mark.accept("lane")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", LANES)
def test_a_lane_changes_nothing_but_rounding(
    checkpoint: tuple[Path, torch.dtype], name: str, dropout: float, device: str
) -> None:
    path, dtype = checkpoint
    found, link, carried = with_lane(path, LANES[name], dropout, "cuda:0" if device == "cuda" else device)
    wanted, counters = plain(path, dropout)
    close_to(found, wanted, dtype)
    assert carried > 0
    for actor, reference in zip(link.actors, counters, strict=True):
        own = actor.take_counters()
        assert own.tokens_per_expert == reference.tokens_per_expert
        slots = (own.forward_slots, own.backward_slots)
        assert slots == (reference.forward_slots, reference.backward_slots)
        assert 0 < own.lane_slots <= sum(slots)
        if name.startswith("all"):
            assert own.lane_slots == sum(slots)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["held", "ahead"])
def test_every_run_gives_the_same_bits(checkpoint: tuple[Path, torch.dtype], name: str, device: str) -> None:
    on = "cuda:0" if device == "cuda" else device
    first, _, _ = with_lane(checkpoint[0], LANES[name], 0.2, on)
    second, _, _ = with_lane(checkpoint[0], LANES[name], 0.2, on)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("together", [1, 8])
def test_what_is_there_already_changes_no_bit(
    checkpoint: tuple[Path, torch.dtype], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held and copied ahead, or not: the same experts are computed, of the same weights; and a second pass,
    which finds the last layer's experts there, has the bits of the first."""
    monkeypatch.setattr(lane_share, "LANE_BATCH", together)
    results, carried = [], []
    for held in (0, 8):
        found, _, size = with_lane(checkpoint[0], LanePlan(("cpu",), (), ((0, 1.0),), held=held), 0.2)
        results.append(found)
        carried.append(size)
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())
    assert carried[1] < carried[0]
    plan = LANES["ahead"]
    with actors_of(checkpoint[0], 0.2) as actors, lane_of(plan, actors) as lane:
        passes = []
        for _ in range(2):
            spec = DropoutSpec(p=0.2, seed=5, step=3)
            passes.append(a_pass(LaneTokens(lane, Link(actors), CPU, spec, True, 2), actors))
            for actor in actors:
                actor.lora.discard_gradients()
                actor.begin_pass(3, True)
    assert all(torch.equal(passes[0][name], value) for name, value in passes[1].items())


def test_actors_get_what_is_left(checkpoint: tuple[Path, torch.dtype]) -> None:
    """Rows without an expert stay; of the others the experts computed here are named no more."""
    _, whole, _ = with_lane(checkpoint[0], LanePlan(("cpu",), (), ((10**6, 1.0),)), 0.0)
    _, link, _ = with_lane(checkpoint[0], LANES["half"], 0.0)
    for at, (x, ids, weights, keys) in whole.sent.items():
        assert len(x) == TOKENS and not whole.elsewhere[at]
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS + 1)[:EXPERTS]
        chosen = {e for e, rows in enumerate(link.elsewhere[at]) if rows}
        assert len(chosen) == EXPERTS // 2
        assert all(link.elsewhere[at][e] == counts[e] for e in chosen)
        assert min(counts[list(chosen)]) >= max(counts[e] for e in range(EXPERTS) if e not in chosen)
        left = torch.where(torch.isin(ids, torch.tensor(sorted(chosen))), EXPERTS, ids)
        stays = (left < EXPERTS).any(dim=1)
        assert 0 < stays.sum() < TOKENS
        for sent, wanted in zip(link.sent[at], (x, left, weights, keys), strict=True):
            assert torch.equal(sent, wanted[stays])


def test_nothing_is_left(checkpoint: tuple[Path, torch.dtype]) -> None:
    found, link, _ = with_lane(checkpoint[0], LANES["all"], 0.0)
    assert all(len(x) == 0 for x, *_ in link.sent.values())
    close_to(found, plain(checkpoint[0], 0.0)[0], checkpoint[1])


@pytest.mark.parametrize("sizes", [(60,), (0, 60), (0,)])
def test_micro_batches_of_any_size(checkpoint: tuple[Path, torch.dtype], sizes: tuple[int, ...]) -> None:
    found, _, _ = with_lane(checkpoint[0], LANES["ahead"], 0.2, sizes=sizes)
    close_to(found, plain(checkpoint[0], 0.2, sizes=sizes)[0], checkpoint[1])


def test_copies_ahead_save_no_copy_and_cost_none(checkpoint: tuple[Path, torch.dtype]) -> None:
    """With every expert streamed and held, each is carried once per layer and direction, whenever that is;
    at the turn from forward to backward the last layer's are still there."""
    carried = {}
    for ahead in (0, 3):
        plan = LanePlan(("cpu",), (), ((0, 1.0),), held=8, ahead=ahead)
        carried[ahead] = with_lane(checkpoint[0], plan, 0.0)[2]
    assert carried[0] == carried[3]


def test_experts_ahead_are_of_every_owner() -> None:
    assert ahead_experts([range(3), range(3, 8)], 4) == (0, 1, 3, 4)
    assert ahead_experts([range(1), range(1, 8)], 4) == (0, 1, 2, 3)
    assert ahead_experts([range(3)], 9) == (0, 1, 2)
    assert ahead_experts([], 2) == ()


def test_a_new_copy_of_the_lora_leaves_the_weights_locked(
    checkpoint: tuple[Path, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locking hundreds of gigabytes takes a minute: once, not for each sampler. What goes is unlocked."""
    locked, unlocked = set[int](), list[int]()
    monkeypatch.setattr(PinnedWeights, "_register", lambda _, address, size: locked.add(address))
    monkeypatch.setattr(PinnedWeights, "remove", lambda _, memory: unlocked.append(memory.data_ptr()))
    with actors_of(checkpoint[0], 0.0) as actors, lane_of(LANES["all"], actors) as lane:
        first = a_pass(LaneTokens(lane, Link(actors), CPU, None, True, 2), actors)
        before, layers, at_first = lane.held, [lane.layer(layer) for layer in LAYERS], set(locked)
        for actor in actors:
            actor.lora.keep("kept", copy=True)
            actor.lora.restart()
            actor.begin_pass(3, True, "kept")
        known = {file: opened for experts in before.values() for file, opened in experts.files.items()}
        lane.keep_only(known)
        lane.take({a.spec.rank: OpenExperts(a.export(), known) for a in actors}, range(4))
        assert not unlocked and [lane.layer(layer) for layer in LAYERS] == layers
        new = [o for e in lane.held.values() for file, o in e.files.items() if file not in known]
        assert len(new) == len(actors)
        assert locked - at_first == {part.data_ptr() for opened in new for part in opened.parts}
        again = a_pass(LaneTokens(lane, Link(actors), CPU, None, "kept", 2), actors)
        outputs = [name for name in again if name[0] in "yd"]
        assert all(torch.equal(first[name], again[name]) for name in outputs)
        gone = [opened.memory.data_ptr() for opened in lane.held[0].files.values()]
        stays = lane.held[1]
        lane.keep_only(stays.files)
        assert unlocked == gone
        lane.take({1: stays}, range(4))
        assert lane.layer(0).ids.tolist() == list(stays.weights[0][0])


def test_a_pass_that_ends_in_the_last_wait(
    checkpoint: tuple[Path, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer died: nothing writes gradients once the pass is closed, as their memory is used again."""
    written: list[str] = []
    gradient = DeviceLane._gradient

    def slow(self: DeviceLane, batch: Sequence[int], name: str, *rest: Any) -> Tensor:
        time.sleep(0.02)
        written.append(name)
        return gradient(self, batch, name, *rest)

    class Lost(Link):
        def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
            raise RuntimeError("a peer died")

    monkeypatch.setattr(DeviceLane, "_gradient", slow)
    with actors_of(checkpoint[0], 0.0) as actors, lane_of(LANES["half"], actors) as lane:
        tokens = LaneTokens(lane, Lost(actors), CPU, None, True, 1)
        g = torch.Generator().manual_seed(9)
        ids = torch.randint(0, EXPERTS, (TOKENS, PER_TOKEN), generator=g, dtype=torch.int32)
        x, weights = torch.randn(TOKENS, WIDTH, generator=g), torch.rand(TOKENS, PER_TOKEN, generator=g)
        tokens.submit_forward(0, 0, [x], [ids], [weights], [torch.arange(TOKENS)], True)
        tokens.settle()
        tokens.join_forward(0, 0)
        tokens.submit_backward(0, 0, [x])
        with pytest.raises(RuntimeError, match="a peer died"):
            tokens.join_backward(0, 0)
        tokens.close()
        at_close = len(written)
        time.sleep(0.2)
        assert at_close == len(written) > 0


def test_an_error_in_the_lane_ends_the_pass(
    checkpoint: tuple[Path, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised where the answer is awaited, and nothing reads the pass's tensors afterwards."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("the card is gone")

    with actors_of(checkpoint[0], 0.0) as actors, lane_of(LANES["half"], actors) as lane:
        tokens = LaneTokens(lane, Link(actors), CPU, None, True, 2)
        with monkeypatch.context() as patched:
            patched.setattr("kt_ray.experts.device_lane.project_in", broken)
            with pytest.raises(RuntimeError, match="the card is gone"):
                a_pass(tokens, actors)
        tokens.close()
        for actor in actors:
            actor.lora.discard_gradients()
            actor.begin_pass(3, True)
        found = a_pass(LaneTokens(lane, Link(actors), CPU, None, True, 2), actors)
    close_to(found, plain(checkpoint[0], 0.0)[0], checkpoint[1])
