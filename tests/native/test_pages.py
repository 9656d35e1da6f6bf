"""Memory for weights: alignment, huge pages where the kernel has them, given back with the tensor."""

from __future__ import annotations

import gc
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from kt_ray.native import MemoryFile, allocate, allocating, pages
from kt_ray.native.pages import HUGE_PAGE, map_whole

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(address: int) -> dict[str, str]:
    """What /proc/self/smaps says of the mapping that holds an address."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside:
            key, _, value = line.partition(":")
            found[key] = value.strip()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 3, 5), (3, 1024, 1031)])
def test_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = allocate(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.device.type == "cpu" and not tensor.requires_grad
    if tensor.nbytes >= HUGE_PAGE:
        assert tensor.data_ptr() % HUGE_PAGE == 0
    values = torch.arange(tensor.numel()).reshape(shape).to(dtype)
    tensor.copy_(values)
    assert torch.equal(tensor.view(torch.uint8), values.view(torch.uint8))


def test_huge_pages_are_asked_for() -> None:
    tensor = allocate((8 * HUGE_PAGE,), torch.uint8).zero_()
    seen = mapping_of(tensor.data_ptr())
    modes = HAS_HUGE_PAGES.read_text() if HAS_HUGE_PAGES.exists() else "[never]"
    if "[never]" in modes:
        assert seen["AnonHugePages"] == "0 kB"
    else:
        assert "hg" in seen["VmFlags"].split()  # whether there are any left is the kernel's affair


def test_what_has_huge_pages_is_seen() -> None:
    assert pages.in_huge_pages(torch.zeros(100)) is None
    size = 16 * HUGE_PAGE
    plain = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain.madvise(mmap.MADV_NOHUGEPAGE)
    assert pages.in_huge_pages(torch.frombuffer(plain, dtype=torch.uint8).zero_()) is False
    tensor = allocate((size,), torch.uint8).zero_()
    huge = int(mapping_of(tensor.data_ptr())["AnonHugePages"].split()[0]) << 10
    assert pages.in_huge_pages(tensor) is (huge >= size // 2)


def test_memory_goes_back_with_the_last_view() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    before = mapped()
    view = allocate((64 * HUGE_PAGE,), torch.uint8)[5:7]
    view.fill_(3)
    gc.collect()
    assert mapped() - before >= 64 * HUGE_PAGE and view.tolist() == [3, 3]
    del view
    assert mapped() - before < 8 * HUGE_PAGE


def test_no_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot allocate"):
        allocate((2**62,), torch.uint8)


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert allocate((HUGE_PAGE,), torch.uint8).fill_(7).sum() == 7 * HUGE_PAGE


@pytest.mark.parametrize("size", [5, HUGE_PAGE + 7])
def test_a_file_that_another_mapping_shows(size: int) -> None:
    """Tensors of a file: aligned like any other, zeros, the same bytes wherever the file is mapped."""
    file = MemoryFile("kt_ray-test")
    with allocating(file):
        before, tensor = allocate((3,), torch.float32), allocate((size,), torch.bfloat16)
        assert allocate((0, 4), torch.float32).shape == (0, 4)
    assert allocate((3,), torch.float32).untyped_storage().nbytes() == 12
    assert file.offset(allocate((3,), torch.float32)) is None
    unit = HUGE_PAGE if tensor.nbytes >= HUGE_PAGE else mmap.PAGESIZE
    offset = file.offset(tensor[4:])
    assert file.offset(before) == 0 and offset is not None
    assert (offset - 8) % unit == 0 and tensor.data_ptr() % unit == 0 and not tensor.any()
    assert os.stat(file.path).st_ino == file.inode
    assert os.stat(file.path).st_size == file.size >= offset + tensor[4:].nbytes
    fd = os.open(file.path, os.O_RDWR)
    whole = map_whole(fd, file.size)
    os.close(fd)
    tensor.copy_(torch.arange(size))
    assert torch.equal(whole[offset : offset + 2].view(torch.bfloat16), tensor[4:5])
    whole[offset : offset + 2].view(torch.bfloat16).fill_(-3)
    assert tensor[4] == -3


def test_the_memory_of_a_file_goes_back_with_the_last_view() -> None:
    """Although another mapping of the file lives on; and the file with the last tensor."""
    file = MemoryFile("kt_ray-test")
    view = file.allocate((16 * HUGE_PAGE,), torch.uint8).fill_(1)[7:9]
    kept = file.allocate((100,), torch.uint8).fill_(2)
    fd = os.open(file.path, os.O_RDWR)
    whole, path = map_whole(fd, file.size), file.path
    assert os.fstat(fd).st_blocks * 512 >= 16 * HUGE_PAGE
    del view
    assert os.fstat(fd).st_blocks * 512 < HUGE_PAGE and not whole[: 16 * HUGE_PAGE].any()
    assert whole[16 * HUGE_PAGE :][:100].eq(2).all()
    os.close(fd)
    del file
    assert os.path.exists(path) and kept.eq(2).all()
    del kept
    assert not os.path.exists(path)


def test_a_forked_child_leaves_the_memory_of_a_file_alone() -> None:
    file = MemoryFile("kt_ray-test")
    tensors = [file.allocate((size,), torch.uint8).fill_(1) for size in (100, HUGE_PAGE)]
    child = os.fork()
    if child == 0:
        tensors.clear()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [int(tensor.sum()) for tensor in tensors] == [100, HUGE_PAGE]


@pytest.mark.parametrize("setting", ["as it is", "always within_size advise [never] deny force"])
def test_a_file_has_huge_pages(setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where shared memory may not have them by itself, too, from Linux 6.1 on."""
    if setting != "as it is":
        (tmp_path / "shmem_enabled").write_text(setting)
        monkeypatch.setattr(pages, "SHARED_HUGE_PAGES", tmp_path / "shmem_enabled")
    file = MemoryFile("kt_ray-test")
    tensor = file.allocate((8 * HUGE_PAGE + 9,), torch.uint8).fill_(1)
    seen = mapping_of(tensor.data_ptr())
    if file.huge:  # whether there are any left is the kernel's affair
        assert "hg" in seen["VmFlags"].split() and seen["ShmemPmdMapped"].endswith(" kB")


def test_a_file_on_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "SHARED_HUGE_PAGES", tmp_path / "none")
    file = MemoryFile("kt_ray-test")
    assert file.allocate((HUGE_PAGE,), torch.uint8).fill_(7).sum() == 7 * HUGE_PAGE
    assert not file.huge


def test_no_memory_in_a_file_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot allocate"):
        MemoryFile("kt_ray-test").allocate((2**61,), torch.uint8)
