"""Page-locking on a stand-in for the CUDA runtime: what is registered, once, on both sides, and undone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kt_ray.actors.ray.ray_actor import Peer, RayPort
from kt_ray.errors import UserError
from kt_ray.gpu import PageLock
from kt_ray.placement.transports import Transport
from kt_ray.transport.messages import Address
from kt_ray.transport.shared_memory import Arena, ArenaReader
from tests.helpers.devices import on_cuda


class FakeCudart:
    """Refuses what the real one refuses: overlapping registrations, and unknown addresses."""

    def __init__(self, refuse: bool = False) -> None:
        self.live: dict[int, int] = {}
        self.calls = 0
        self.refuse = refuse

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.refuse:
            return 2
        assert flags == 1 and size > 0
        if any(a < address + size and address < a + s for a, s in self.live.items()):
            return 712
        self.live[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.live.pop(address, None) is not None else 713


def test_segments_with_pinned_tensors_are_registered_once_and_undone() -> None:
    cuda = FakeCudart()
    arena = Arena("test", PageLock(cuda))
    arena.alloc((100,), torch.float32)
    assert cuda.calls == 0
    tensor, _, _ = arena.alloc((100,), torch.float32, pinned=True)
    arena.alloc((100,), torch.float32, pinned=True)
    assert cuda.calls == 1 and list(cuda.live.values()) == [arena.bytes]
    (start,) = cuda.live
    assert start <= tensor.data_ptr() < start + arena.bytes
    arena.alloc((3 << 20,), torch.float32, pinned=True)
    assert cuda.calls == 2 and sum(cuda.live.values()) == arena.bytes
    arena.close()
    assert not cuda.live and arena.bytes == 0


def test_reserved_memory_is_registered_at_once() -> None:
    cuda = FakeCudart()
    arena = Arena("test", PageLock(cuda))
    arena.reserve(100_000, pinned=True)
    assert cuda.calls == 1 and list(cuda.live.values()) == [arena.bytes]
    arena.alloc((100,), torch.float32, pinned=True)
    assert cuda.calls == 1


def test_a_worker_locks_what_its_first_pass_will_read_when_it_meets_its_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCudart()
    monkeypatch.setattr(PageLock, "_cuda", lambda self: cuda)
    sizes: dict[Address, int] = {
        ("worker", 0): 1 << 20, ("worker", 1): 2 << 20, ("worker", 2): 3 << 20, ("experts", 0): 4 << 20,
        ("experts", 1): 5 << 20,
    }  # fmt: skip
    ports, peers = {}, {}
    for address in sizes:
        pinned = address == ("worker", 1)
        transport = Transport("arena", "ray")
        ports[address] = RayPort("test", lambda _: None, lambda _: None, transport=transport, pinned=pinned)
        memory = ports[address].reserve(sizes[address])
        assert memory is not None and memory == ports[address].reserve(sizes[address])
        node = "there" if address == ("experts", 1) else "here"
        peers[address] = Peer(None, node, None, memory)
    assert list(cuda.live.values()) == [2 << 20]  # its own
    ports["worker", 1].connect(("worker", 1), peers)
    assert sorted(cuda.live.values()) == [1 << 20, 2 << 20, 3 << 20, 4 << 20]
    ports["worker", 1].connect(("worker", 1), peers)  # again, after a death
    assert sorted(cuda.live.values()) == [1 << 20, 2 << 20, 3 << 20, 4 << 20]
    for port in ports.values():
        port.close()
    assert cuda.live == {}


def test_without_shared_memory_nothing_is_reserved() -> None:
    port = RayPort("test", lambda _: None, lambda _: None, transport=Transport("ray", "ray"))
    assert port.reserve(1 << 20) is None
    port.close()


def test_a_reader_registers_what_it_maps_and_forgets_it() -> None:
    writer, cuda = Arena("test"), FakeCudart()
    reader = ArenaReader(PageLock(cuda))
    refs = [writer.write(torch.full((1000,), float(i)))[0] for i in range(3)]
    for i, ref in enumerate(refs):
        assert torch.equal(reader.read(ref), torch.full((1000,), float(i)))
    assert cuda.calls == 1 and list(cuda.live.values()) == [writer.bytes]
    reader.forget()
    assert not cuda.live
    assert torch.equal(reader.read(refs[1]), torch.ones(1000))
    assert cuda.calls == 2


def test_threads_that_read_at_once_map_a_segment_once() -> None:
    """Ray delivers in two threads; a second mapping would be registered and then thrown away."""

    class Slow(FakeCudart):
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            time.sleep(0.2)
            return super().cudaHostRegister(address, size, flags)

    writer, cuda = Arena("test"), Slow()
    reader = ArenaReader(PageLock(cuda))
    refs = [writer.write(torch.full((1000,), float(i)))[0] for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(reader.read, refs))
    assert [float(tensor[0]) for tensor in seen] == [0.0, 1.0]
    assert cuda.calls == 1 and list(cuda.live.values()) == [writer.bytes]
    reader.forget()
    assert not cuda.live


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"cudaError 2.*ulimit -l.*rule.transport=ray"):
        Arena("test", PageLock(FakeCudart(refuse=True))).alloc((10,), torch.float32, pinned=True)


@pytest.mark.accept("memory")
@on_cuda
def test_cuda_itself_locks_and_gives_back() -> None:
    arena = Arena("test", PageLock())
    tensor, ref, _ = arena.alloc((1 << 20,), torch.float32, pinned=True)
    assert tensor.is_pinned()
    tensor.fill_(3.0)
    on_card = torch.empty_like(tensor, device="cuda")
    on_card.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((on_card == 3.0).all())
    reader = ArenaReader(PageLock())
    read = reader.read(ref)
    assert read.is_pinned() and torch.equal(read, tensor)
    reader.forget()
    assert tensor.is_pinned(), "each side registers its own mapping"
    arena.close()
