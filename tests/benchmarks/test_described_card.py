"""described_card.py: queues take their time in order, wait for each other, and share links and cards."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.experts.device_lane import DeviceLane, LaneInput
from kt_ray.experts.lane_device import LaneDevice
from kt_ray.gpu import aside, driver, use_driver
from kt_ray.placement.lane_share import LANE_BATCH
from tests.helpers.native import Shape, make_case

REPO = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cpu:0")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two cards: 1 kB/s to them, 2 kB/s to the host, and a product as many ms as it has matrices."""
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    module = importlib.import_module("described_card")
    made = {f"cpu:{i}": module.Card(f"cuda:{i}", 1e3, 2e3, lambda count, *_: count / 1e3) for i in range(2)}
    before, stand_in = driver(), module.DescribedDriver(made)
    use_driver(stand_in)
    yield stand_in
    use_driver(before)
    stand_in.board.close()


@contextmanager
def held(cards: Any, *streams: Any) -> Iterator[None]:
    """What is given to these streams inside begins together, at the end."""
    gate = importlib.import_module("described_card").Event()
    for stream in streams:
        stream.wait_event(gate)
    yield
    cards.stream(DEVICE, "gate").record_event(gate)


def spans(cards: Any) -> dict[str, tuple[float, float]]:
    """By name, from the first one's beginning."""
    begun = min(d.start for d in cards.board.done)
    return {d.name: (d.start - begun, d.end - begun) for d in cards.board.done}


def test_work_of_a_stream_follows_without_a_gap(cards: Any) -> None:
    stream = cards.current(DEVICE)
    with held(cards, stream):
        for number in range(20):
            stream.work("cuda:0", 0.002, str(number))
    stream.synchronize()
    done = cards.board.done
    assert [d.name for d in done] == [str(number) for number in range(20)]
    assert all(one.end == two.start for one, two in itertools.pairwise(done))
    assert done[-1].end - done[0].start == pytest.approx(0.04)


def test_streams_that_use_a_resource_share_it(cards: Any) -> None:
    one, two = (cards.stream(DEVICE, name) for name in ("one", "two"))
    with held(cards, one, two):
        one.work("link", 0.01, "one")
        two.work("link", 0.03, "two")
    two.synchronize()
    found = spans(cards)
    assert found["one"] == pytest.approx((0.0, 0.02)) and found["two"] == pytest.approx((0.0, 0.04))


def test_streams_wait_for_events_and_the_host_does(cards: Any) -> None:
    copying, computing = cards.stream(DEVICE, "copying"), cards.current(DEVICE)
    with held(cards, copying, computing):
        copying.work("link", 0.03, "copy")
        computing.work("cuda:0", 0.01, "before")
        event = copying.record_event()
        computing.wait_event(event)
        computing.work("cuda:0", 0.01, "after")
        cards.claim(DEVICE)
        mark = cards.mark(DEVICE)
        assert not mark.reached and not event.reached
    mark.synchronize()
    assert mark.reached and event.reached
    assert spans(cards) == {
        "before": pytest.approx((0.0, 0.01)),
        "copy": pytest.approx((0.0, 0.03)),
        "after": pytest.approx((0.03, 0.04)),
    }
    mark.synchronize()  # again, at once


def test_copies_and_products_take_what_the_card_says(cards: Any) -> None:
    device = LaneDevice("cpu:0")
    with device.copying():
        there = device.upload(torch.arange(10.0))
    with device.computing():
        device.compute_after(device.copied())
        made = driver().product(torch.ones(5, 1, 2), torch.ones(5, 2, 3))
    device.return_after(device.computed())
    with device.returning():
        host = device.download(there)
    with device.computing():
        device.compute_after(device.returned())
    device.finish()
    assert host.equal(torch.arange(10.0)) and made.eq(2).all()
    found = {(d.resource, d.stream): d.end - d.start for d in cards.board.done}
    assert found["pcie cuda:0 in", "experts"] == pytest.approx(0.04)
    assert found["cuda:0", "lane"] == pytest.approx(0.005)
    assert found["pcie cuda:0 out", "kept"] == pytest.approx(0.02)
    ends = [d.end for d in cards.board.done]
    assert ends == sorted(ends) and cards.board.done[1].start >= ends[0]


@pytest.mark.parametrize("products", [0.001, 0.02])
def test_a_lane_copies_the_next_batch_while_it_computes_one(cards: Any, products: float) -> None:
    """Held until the whole call is given, so that the host's speed does not matter: as it is simulated
    (kt_ray.timing.simulate), whether copies or products take longer."""
    rows, experts, batch = 4, 3 * LANE_BATCH, LANE_BATCH
    case = make_case(Shape(rows * experts, 1, experts, 64, 32, rank=0), torch.bfloat16)
    case.ids = torch.arange(experts).repeat_interleave(rows).unsqueeze(1)
    card = cards.cards[DEVICE]
    cards.cards[DEVICE] = card._replace(
        to_device=5e6,
        to_host=5e6,
        product=lambda count, *size: products * count / batch * size[1] * size[2] / 2048,
    )
    lane = DeviceLane(0, "cpu:0", 1, recompute=False)
    try:
        lane.add_layer(0, range(experts), [case.weights], None, ())
        call = LaneInput([case.x], case.ids, case.weights_TK, None, None, case.keys, case.x, [rows] * experts)
        lane.forward(0, range(experts), call).result()  # its buffers are made
        forward = whole(cards, lane, lambda: lane.forward(0, range(experts), call))
        seconds = spans_of(cards)
        size, moved, kept = 3 * 64 * 32 * 2, rows * experts * 64, rows * experts * 2 * 32 * 2
        copies, x = experts * size / 5e6, moved * 2 / 5e6
        first, last = copies / 3, 3 * products
        expected = x + first + max(2 / 3 * copies, 2 * last) + last + moved * 4 / 5e6
        assert seconds == pytest.approx(expected, rel=0.05)
        assert forward.saved is not None
        whole(cards, lane, lambda: lane.backward(0, forward.saved, [case.dy], None))
        copies += kept / 5e6
        first = copies / 3
        expected = 3 * x + first + max(2 / 3 * copies, 2 * last) + last + moved * 4 / 5e6
        assert spans_of(cards) == pytest.approx(expected, rel=0.05)
    finally:
        lane.close()


def whole(cards: Any, lane: DeviceLane, start: Callable[[], Future[Any]]) -> Any:
    """What a call gives; its queues begin once all of it is in them."""
    cards.board.done.clear()
    device, given = lane.device, threading.Event()
    finish, device.finish = device.finish, lambda: (given.set(), finish())  # type: ignore[method-assign]
    try:
        with held(cards, device._copying, device._computing, device._returning):
            call = start()
            assert given.wait(60)
            time.sleep(0.05)  # until it waits
        return call.result()
    finally:
        device.finish = finish  # type: ignore[method-assign]


def spans_of(cards: Any) -> float:
    """From the first work's beginning to the last one's end."""
    done = cards.board.done
    return max(d.end for d in done) - min(d.start for d in done)


def test_only_described_devices_have_queues(cards: Any) -> None:
    assert driver().queues(torch.device("cpu:1")) and not driver().queues(torch.device("cpu"))
    with aside(torch.device("cpu"), "answers") as stream:
        assert stream is None
    with aside(DEVICE, "answers") as stream:
        assert stream is cards.named(DEVICE, "answers") is cards.current(DEVICE)
    assert cards.current(DEVICE) is cards.streams[DEVICE]
    driver().copy_in(torch.empty(3), torch.ones(3))  # on a thread that has no card
    assert not cards.board.done
