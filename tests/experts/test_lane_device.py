"""Page-locked memory, by a stand-in for CUDA: what is registered, given back, and refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kt_ray.experts.lane_device import LaneDevice, PinnedWeights
from kt_ray.pulse import beats


class Registry:
    """CUDA's calls, as cudart has them: an address that is registered, or 2 (out of memory)."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.held: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1, "for every GPU of the process"
        overlaps = any(a < address + size and address < a + n for a, n in self.held.items())
        assert not overlaps, "CUDA refuses what is registered already"
        if sum(self.held.values()) + size > self.most:
            return 2
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0


def pinned(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> PinnedWeights:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registry)
    device = LaneDevice("cpu")
    monkeypatch.setattr(type(device), "is_cuda", property(lambda _: True))
    return PinnedWeights(device)


def test_storages_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage whole and once; parts each by itself, with a beat for each, and given back together."""
    registry = Registry()
    lock = pinned(monkeypatch, registry)
    other, memory = torch.zeros(100), torch.zeros(4096, dtype=torch.uint8)
    lock.add([other[:10], other[50:]])
    assert registry.held == {other.data_ptr(): 400}
    before = beats()
    lock.add_parts([memory[:1024], memory[1024:]])
    lock.add_parts([memory[:1024], memory[1024:]])
    lock.add([memory[2000:]])  # registered as parts
    assert beats() - before == 2 and lock.bytes == 4496 == sum(registry.held.values())
    lock.remove(memory[100:])
    assert registry.held == {other.data_ptr(): 400}
    lock.release()
    assert not registry.held and lock.bytes == 0


def test_the_first_refusal_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered stays; the rest is pageable, and nothing is asked for again."""
    registry = Registry(most=1000)
    lock = pinned(monkeypatch, registry)
    memory = torch.zeros(4096, dtype=torch.uint8)
    lock.add_parts([memory[:1000], memory[1000:2000], memory[2000:2001]])
    registry.most = 1 << 40
    lock.add([torch.zeros(4)])
    assert registry.held == {memory.data_ptr(): 1000}
    assert lock.refusal == "cudaHostRegister of 1000 bytes: error 2"


def test_a_stand_in_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace())
    lock = PinnedWeights(LaneDevice("cpu"))
    lock.add([torch.zeros(4)])
    lock.add_parts([torch.zeros(4)])
    assert lock.bytes == 0 and lock.refusal is None
