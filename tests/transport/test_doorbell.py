"""Frames between processes through a pipe: whole, never waiting, and gone with whoever dies."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.actors.ray.ray_actor import INLINE_BYTES, RUNG_BYTES, Packed, Peer, RayPort
from kt_ray.placement.transports import Transport
from kt_ray.transport.messages import Address, Mailbox, Message, Stalled
from kt_ray.transport.shared_memory import FRAME_BYTES, PIPE_BYTES, Doorbell, DoorbellAddress, Ringer
from tests.helpers.descriptors import descriptors, left_open

SENDER = """
import pickle, sys, time
from kt_ray.transport.shared_memory import FRAME_BYTES, Ringer

address, who, count = pickle.load(sys.stdin.buffer)
ringer = Ringer(address)
for i in range(count):
    frame = bytes([who]) * (1 + i * 37 % FRAME_BYTES)
    while not ringer.ring(frame):
        time.sleep(0.001)
"""

RECEIVER = """
import pickle, sys, threading
from kt_ray.transport.shared_memory import Doorbell

bell = Doorbell(lambda frame: print("took", len(frame), flush=True), lambda why: None)
pickle.dump(bell.address, sys.stdout.buffer)
sys.stdout.buffer.flush()
threading.Event().wait()
"""


def sender(*given: Any) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(pickle.dumps(given))
    child.stdin.close()
    return child


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Heard:
    """A doorbell and what it heard."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.lost: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.bell = Doorbell(self._take, self.lost.append)

    def _take(self, frame: bytes) -> None:
        assert self.go_on.wait(60)
        if frame == b"bad":
            raise ValueError("cannot read this")
        self.frames.append(frame)


@pytest.fixture
def heard() -> Iterator[Heard]:
    made = Heard()
    yield made
    made.go_on.set()
    made.bell.close()


def test_frames_of_several_processes_arrive_whole_and_in_order(heard: Heard) -> None:
    children = [sender(heard.bell.address, who, 3000) for who in (1, 2, 3)]
    assert [child.wait(120) for child in children] == [0, 0, 0]
    until(lambda: len(heard.frames) == 9000)
    for who in (1, 2, 3):
        mine = [frame for frame in heard.frames if frame[0] == who]
        assert mine == [bytes([who]) * (1 + i * 37 % FRAME_BYTES) for i in range(3000)]
    assert heard.lost == []


def test_nobody_waits_for_a_full_pipe(heard: Heard) -> None:
    ringer = Ringer(heard.bell.address)
    assert ringer.ring(b"x" * FRAME_BYTES) and not ringer.ring(b"x" * (FRAME_BYTES + 1))
    until(lambda: len(heard.frames) == 1)
    heard.go_on.clear()
    rung = 0
    while ringer.ring(b"y" * FRAME_BYTES):
        rung += 1
        assert rung <= PIPE_BYTES
    heard.go_on.set()
    until(lambda: len(heard.frames) == 1 + rung)
    assert ringer.ring(b"z")
    until(lambda: heard.frames[-1] == b"z")
    ringer.close()


def test_a_killed_receiver_is_noticed_by_who_rings() -> None:
    child = subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE)
    assert child.stdout is not None
    address: DoorbellAddress = pickle.load(child.stdout)
    ringer = Ringer(address)
    assert ringer.ring(b"hello")
    assert child.stdout.readline() == b"took 5\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not ringer.ring(b"hello")  # and no SIGPIPE
    ringer.close()
    with pytest.raises(OSError, match=address.path):
        Ringer(address)
    child.stdout.close()


def test_a_killed_sender_leaves_no_half_of_a_frame(heard: Heard) -> None:
    child = sender(heard.bell.address, 7, 1 << 30)
    until(lambda: len(heard.frames) > 100)
    child.kill()
    child.wait()
    ringer = Ringer(heard.bell.address)
    until(lambda: ringer.ring(b"last"))
    until(lambda: heard.frames[-1] == b"last")
    assert all(frame == bytes([7]) * len(frame) for frame in heard.frames[:-1])
    assert heard.lost == []
    ringer.close()


def test_a_strangers_bytes_are_dropped_and_told(heard: Heard) -> None:
    stranger = os.open(heard.bell.address.path, os.O_WRONLY)
    os.write(stranger, pickle.dumps("anything" * 10))
    until(lambda: len(heard.lost) == 1)
    assert "stranger" in heard.lost[0] and heard.frames == []
    os.close(stranger)
    ringer = Ringer(heard.bell.address)
    assert ringer.ring(b"a friend")
    until(lambda: heard.frames == [b"a friend"])
    ringer.close()


def test_a_frame_that_cannot_be_taken_is_told_and_the_next_is_taken(heard: Heard) -> None:
    ringer = Ringer(heard.bell.address)
    assert ringer.ring(b"bad") and ringer.ring(b"good")
    until(lambda: heard.frames == [b"good"])
    assert heard.lost == ["could not take a message: ValueError: cannot read this"]
    ringer.close()


def test_what_is_not_the_peers_pipe_is_refused(heard: Heard, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    before = descriptors()
    for wrong in ({"inode": heard.bell.address.inode + 1}, {"path": str(file), "inode": file.stat().st_ino}):
        with pytest.raises(FileNotFoundError, match="not the peer's pipe"):
            Ringer(dataclasses.replace(heard.bell.address, **wrong))
    assert not left_open(before)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_kept_out(heard: Heard) -> None:
    write = ["/bin/sh", "-c", f"printf '%0100d' 0 > {heard.bell.address.path}"]
    done = subprocess.run(write, user=65534, group=65534, extra_groups=[], capture_output=True, text=True)
    assert done.returncode != 0 and "denied" in done.stderr
    assert heard.lost == []
    subprocess.run(write, check=True)  # the same command gets in as this user
    until(lambda: len(heard.lost) == 1)


def test_close_leaves_no_descriptor_and_no_thread() -> None:
    before, threads = descriptors(), set(threading.enumerate())
    for full in (False, True):
        heard = Heard()
        ringer = Ringer(heard.bell.address)
        if full:
            heard.go_on.clear()
            while ringer.ring(b"x" * FRAME_BYTES):
                pass
            threading.Timer(0.2, heard.go_on.set).start()
        heard.bell.close()
        heard.bell.close()
        assert not ringer.ring(b"x")
        ringer.close()
    until(lambda: threads.issuperset(threading.enumerate()))
    assert not left_open(before)


# -- ports -----------------------------------------------------------------------------------------


class Calls:
    """Stands where a Ray handle stands."""

    def __init__(self, port: RayPort) -> None:
        self.deliver = self
        self.port, self.count = port, 0

    def remote(self, packed: Packed) -> None:
        self.count += 1
        self.port.receive(packed)


class Pair:
    """Two actors' ports, introduced as the driver does."""

    here: Address = ("worker", 0)
    there: Address = ("experts", 0)

    def __init__(self, near: str = "arena") -> None:
        self.lost: list[str] = []
        self.transport = Transport(near, "ray")
        self.mailboxes = {a: Mailbox(str(a)) for a in (self.here, self.there)}
        self.ports = {a: self.port(a) for a in self.mailboxes}
        self.calls: dict[Address, Calls] = {}

    def port(self, address: Address) -> RayPort:
        return RayPort("pair", self.mailboxes[address].put, self.lost.append, transport=self.transport)

    def meet(self, epoch: int = 0, *only: Address, **wrong: Any) -> None:
        self.calls = {a: Calls(port) for a, port in self.ports.items()}
        peers = {a: Peer(self.calls[a], "node", port.listen()) for a, port in self.ports.items()}
        if wrong:
            peers = {
                a: dataclasses.replace(p, doorbell=p.doorbell and dataclasses.replace(p.doorbell, **wrong))
                for a, p in peers.items()
            }
        for address in only or tuple(self.ports):
            self.ports[address].connect(address, peers, epoch)

    def arrives(self, tag: str, size: int = 4, facts: Any = None) -> torch.Tensor:
        x = torch.randn(size // 4)
        lease = self.ports[self.here].send([self.there], Message((tag,), {"x": x}, {"facts": facts}))
        message = self.mailboxes[self.there].take((tag,), 30)
        assert torch.equal(message.tensors["x"], x) and message.facts["facts"] == facts
        seen = message.tensors["x"].clone()
        self.ports[self.here].release(lease)
        return seen

    def close(self) -> None:
        for port in self.ports.values():
            port.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(*getattr(request, "param", ()))
    yield made
    made.close()
    assert made.lost == []


SIZES = (4, RUNG_BYTES, RUNG_BYTES + 4, INLINE_BYTES, INLINE_BYTES + 4, 1 << 20)


def test_ports_ring_where_they_share_memory(pair: Pair) -> None:
    pair.meet()
    for size in SIZES:
        pair.arrives(f"of {size}", size)
    many = {f"tensor {i}": torch.full((2, 3), float(i), dtype=torch.bfloat16) for i in range(8)}
    pair.ports[pair.here].send([pair.there], Message(("many",), many))
    found = pair.mailboxes[pair.there].take(("many",), 30).tensors
    assert all(torch.equal(found[name], many[name]) for name in many)
    assert pair.calls[pair.there].count == 0
    pair.arrives("too much for a frame", facts="x" * FRAME_BYTES)
    assert pair.calls[pair.there].count == 1


@pytest.mark.parametrize("pair", [("ray",)], indirect=True)
def test_rule_transport_ray_calls(pair: Pair) -> None:
    before = descriptors()
    assert pair.ports[pair.here].listen() is None
    pair.meet()
    for size in SIZES:
        pair.arrives(f"of {size}", size)
    assert pair.calls[pair.there].count == len(SIZES)
    assert not left_open(before)


def test_a_peer_that_cannot_be_rung_is_called(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.meet(inode=1)
    assert "messages to experts-0 go through Ray" in caplog.text
    for size in SIZES:
        pair.arrives(f"of {size}", size)
    assert pair.calls[pair.there].count == len(SIZES)


def test_messages_of_an_older_introduction_are_passed_over(pair: Pair) -> None:
    pair.meet(1)
    pair.arrives("first")
    pair.meet(2, pair.there)
    pair.ports[pair.here].send([pair.there], Message(("old",), {"x": torch.zeros(1)}))
    with pytest.raises(Stalled):
        pair.mailboxes[pair.there].take(("old",), 0.3)
    pair.meet(2)
    pair.arrives("second")
    assert pair.calls[pair.there].count == 0


def test_a_dead_peer_does_not_disturb_its_sender_and_is_replaced(pair: Pair) -> None:
    pair.meet(1)
    pair.arrives("before", 1 << 16)
    pair.ports[pair.there].close()
    called = pair.calls[pair.there]
    called.port = pair.ports[pair.here]  # what Ray does with calls to the dead does not matter here
    pair.ports[pair.here].epoch = 0  # so that it is not taken
    pair.ports[pair.here].send([pair.there], Message(("nobody",), {"x": torch.zeros(1)}))
    assert called.count == 1
    pair.ports[pair.there] = pair.port(pair.there)
    pair.meet(2)
    pair.arrives("after", 1 << 16)
    assert pair.calls[pair.there].count == 0


def test_ports_give_back_what_they_opened() -> None:
    before = descriptors()
    pair = Pair()
    for epoch in range(5):
        pair.meet(epoch)
        pair.arrives("m", 1 << 16)
    most = 2 * 2 + 2 + 3  # two pipes, two ringers; one segment, mapped twice
    assert len(left_open(before, most)) == most
    pair.close()
    assert not left_open(before)
