"""Shared segments: contents, reuse, growth, and nothing left behind."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from kt_ray.actors.arena import ALIGNMENT, Arena, ArenaReader
from kt_ray.actors.mailbox import Message
from kt_ray.actors.ray_port import pack_inline, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(33, 7), (0, 7), (), (1,)])
def test_a_reader_sees_what_was_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    arena, reader = Arena("test"), ArenaReader()
    tensor = (torch.randn(shape) * 100).to(dtype)
    ref, _ = arena.write(tensor)
    seen = reader.read(ref)
    assert seen.dtype == dtype and seen.shape == tensor.shape
    assert torch.equal(seen, tensor)


def test_blocks_are_reused_aligned_and_segments_grow() -> None:
    arena = Arena("test")
    small = torch.ones(3)
    blocks = [arena.write(small)[1] for _ in range(4)]
    assert [offset % ALIGNMENT for _, offset, _ in blocks] == [0] * 4
    before = arena.bytes
    for block in (blocks[1], blocks[3], blocks[2], blocks[0]):
        arena.free(block)
    for _ in range(100):
        _, block = arena.write(small)
        arena.free(block)
    assert arena.bytes == before
    ref, _ = arena.write(torch.zeros(1 << 20))
    assert arena.bytes >= before + (4 << 20)
    assert torch.equal(ArenaReader().read(ref), torch.zeros(1 << 20))


def test_overlapping_blocks_do_not_exist() -> None:
    arena, reader = Arena("test"), ArenaReader()
    live = {}
    generator = torch.Generator().manual_seed(0)
    for i in range(300):
        size = int(torch.randint(1, 5000, (), generator=generator))
        tensor = torch.full((size,), float(i))
        live[i] = (tensor, *arena.write(tensor))
        if i % 3 == 0:
            victim = sorted(live)[int(torch.randint(len(live), (), generator=generator))]
            arena.free(live.pop(victim)[2])
        for tensor, ref, _ in live.values():
            assert torch.equal(reader.read(ref), tensor)


def test_another_process_maps_the_segment_and_nothing_stays_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    arena = Arena("test")
    ref, _ = arena.write(torch.arange(1000, dtype=torch.float32))
    code = textwrap.dedent(
        f"""
        from kt_ray.actors.arena import ArenaReader, TensorRef
        tensor = ArenaReader().read({ref!r})
        assert tensor.sum().item() == 499500.0
        tensor.add_(1)
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert ArenaReader().read(ref).sum().item() == 500500.0
    assert set(os.listdir("/dev/shm")) == before


def test_inline_messages_keep_types_and_shapes() -> None:
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5), "c": torch.empty(0, 7)}
    message = unpack(pack_inline(Message(("t", 1), tensors, {"k": 2})), ArenaReader())
    assert message.tag == ("t", 1) and message.facts == {"k": 2}
    for name, tensor in tensors.items():
        assert message.tensors[name].dtype == tensor.dtype
        assert torch.equal(message.tensors[name], tensor)
        message.tensors[name].zero_()  # writable
