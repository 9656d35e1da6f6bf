"""Memory for weights: alignment, huge pages where the kernel has them, given back with the tensor."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from kt_ray.native import allocate
from kt_ray.native.pages import HUGE_PAGE

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
