"""Hidden states in host memory, on the stand-in: what is kept comes back, and memory is used again."""

from __future__ import annotations

import pytest
import torch

from kt_ray.model.hidden_shelf import HostShelf, KeptOnDevice

CPU = torch.device("cpu")


def test_what_is_kept_comes_back_and_is_a_copy() -> None:
    shelf = HostShelf(CPU)
    shapes = [(2, 3, 5), (1, 4, 2, 5)]
    shelf.clear(shapes, torch.bfloat16)
    states = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    expected = [state.clone() for state in states]
    kept = [shelf.keep(state) for state in states]
    for state in states:
        state.zero_()  # the device's memory is used again
    for one, value in zip(kept, expected, strict=True):
        one.fetch()
        assert torch.equal(one.take(), value) and torch.equal(one.take(), value)  # without fetch, too


def test_memory_is_used_again_and_grows() -> None:
    shelf = HostShelf(CPU)
    shelf.clear([(4, 16)], torch.float32)
    assert shelf.nbytes == 256
    address = shelf._memory.data_ptr()
    shelf.keep(torch.ones(4, 16))
    shelf.clear([(2, 16)], torch.float32)
    assert shelf._memory.data_ptr() == address
    shelf.keep(torch.ones(2, 16))
    with pytest.raises(RuntimeError, match="512 bytes of hidden states, 256 were asked for"):
        shelf.keep(torch.ones(2, 16))
    shelf.clear([(4, 16), (1, 1)], torch.float32)
    assert shelf.nbytes == 512


def test_spare_memory_is_no_more_than_the_plan_has() -> None:
    shelf = HostShelf(CPU, most=25600)
    held = []
    for rows in (40, 97, 98, 100, 101):
        shelf.clear([(rows, 64)], torch.float32)
        held.append(shelf.nbytes)
    assert held == [10240, 24832, 25600, 25600, 25856]
    shelf = HostShelf(CPU, most=25600)
    held = []
    for rows in (40, 41, 51):
        shelf.clear([(rows, 64)], torch.float32)
        held.append(shelf.nbytes)
    assert held == [10240, 12800, 16000]


def test_a_state_that_stays_is_itself() -> None:
    hidden = torch.ones(2)
    kept = KeptOnDevice(hidden)
    kept.fetch()
    assert kept.take() is hidden
