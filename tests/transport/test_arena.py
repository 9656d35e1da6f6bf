"""Shared segments: contents, reuse, growth, and nothing left behind."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kt_ray.actors.ray.ray_actor import pack_inline, unpack
from kt_ray.transport.messages import Message
from kt_ray.transport.shared_memory import ALIGNMENT, Arena, ArenaReader, Block, TensorRef


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


def test_reserved_memory_is_one_segment_and_what_does_not_fit_makes_small_ones() -> None:
    arena = Arena("test")
    whole = arena.reserve((64 << 20) + 1)
    size = arena.bytes
    assert whole.nbytes == whole.segment_bytes == size and (64 << 20) < size <= (64 << 20) + 4096
    ref, block = arena.write(torch.ones(60 << 18))
    assert ref.path == whole.path and arena.bytes == size
    assert torch.equal(ArenaReader().read(whole)[: 60 << 20], torch.ones(60 << 18).view(torch.uint8))
    arena.write(torch.ones(2 << 20))  # 8 MiB: reserved memory does not count in the doubling
    assert arena.bytes == size + (8 << 20)
    arena.free(block)
    assert arena.write(torch.ones(60 << 18))[0].path == whole.path


def test_reserved_memory_is_touched_only_where_a_peer_will_lock_it() -> None:
    for resident in (False, True):
        arena = Arena("test")
        ref = arena.reserve(8 << 20, resident=resident)
        assert os.stat(ref.path).st_blocks * 512 == (8 << 20 if resident else 0)
        arena.close()


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
    arena = Arena("shared-once")
    ref, _ = arena.write(torch.arange(1000, dtype=torch.float32))
    code = textwrap.dedent(
        f"""
        from kt_ray.transport.shared_memory import ArenaReader, TensorRef
        tensor = ArenaReader().read({ref!r})
        assert tensor.sum().item() == 499500.0
        tensor.add_(1)
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert ArenaReader().read(ref).sum().item() == 500500.0
    assert not [name for name in os.listdir("/dev/shm") if "shared-once" in name]


def test_inline_messages_keep_types_and_shapes() -> None:
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5), "c": torch.empty(0, 7)}
    message = unpack(pack_inline(Message(("t", 1), tensors, {"k": 2})), ArenaReader())
    assert message.tag == ("t", 1) and message.facts == {"k": 2}
    for name, tensor in tensors.items():
        assert message.tensors[name].dtype == tensor.dtype
        assert torch.equal(message.tensors[name], tensor)
        message.tensors[name].zero_()  # writable


def test_allocated_memory_is_filled_in_place() -> None:
    arena, reader = Arena("test"), ArenaReader()
    view, ref, block = arena.alloc((5, 3), torch.bfloat16)
    view.copy_(torch.arange(15).reshape(5, 3))
    assert torch.equal(reader.read(ref), torch.arange(15).reshape(5, 3).bfloat16())
    arena.free(block)


def test_a_reference_that_does_not_fit_is_refused() -> None:
    arena, reader = Arena("test"), ArenaReader()
    ref, _ = arena.write(torch.ones(1000))
    for wrong, message in [
        (dataclasses.replace(ref, offset=ref.segment_bytes - 8), "outside its shared memory"),
        (dataclasses.replace(ref, offset=-64), "outside its shared memory"),
        (dataclasses.replace(ref, segment_bytes=2 * ref.segment_bytes), "has 1048576 bytes"),
        (dataclasses.replace(ref, inode=ref.inode + 1), "no longer the shared memory"),
        (dataclasses.replace(ref, path="/proc/self/fd/99999"), "cannot be opened"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ArenaReader().read(wrong)
    assert torch.equal(reader.read(ref), torch.ones(1000))


def test_the_size_of_a_segment_can_never_change() -> None:
    arena = Arena("test")
    ref, _ = arena.write(torch.ones(10))
    fd = os.open(ref.path, os.O_RDWR)
    try:
        for size in (0, 2 * ref.segment_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_an_arena_does_not_grow_over_thousands_of_passes() -> None:
    arena = Arena("test")
    sizes: list[int] = []
    most = 0
    for number in range(2000):
        # A pass of one of 50 kinds: messages of many sizes, released in another order than they were sent,
        # some not before its end.
        chance = random.Random(number % 50)
        live: list[Block] = []
        for _ in range(40):
            live.append(arena.alloc((chance.randrange(1, 60_000),), torch.float32)[2])
            most = max(most, sum(size for _, _, size in live))
            if len(live) > 6:
                arena.free(live.pop(chance.randrange(len(live))))
        for block in live:
            arena.free(block)
        sizes.append(arena.bytes)
    assert sizes[-1] == sizes[100]
    assert sizes[-1] <= 4 * most


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys, torch
        from kt_ray.transport.shared_memory import Arena
        arena = Arena("kt_ray-killed")
        ref, _ = arena.write(torch.ones(1 << 20))
        print(ref.path, ref.inode, ref.segment_bytes, flush=True)
        sys.stdin.read()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    path, inode, size = process.stdout.readline().split()
    ref = TensorRef(path, int(inode), int(size), 0, "float32", (1 << 20,))
    reader = ArenaReader()
    seen = reader.read(ref)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert seen.sum().item() == 1 << 20  # what was mapped stays readable
    left = [name for name in os.listdir("/dev/shm") if "kt_ray-killed" in name or str(process.pid) in name]
    assert not Path(path).exists() and not left and not [p for p in tmp_path.iterdir() if "kt_ray" in p.name]
    reader.forget()
    with pytest.raises(RuntimeError, match="cannot be opened"):
        reader.read(ref)
    process.stdin.close()  # type: ignore[union-attr]
    process.stdout.close()
