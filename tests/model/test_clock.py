"""Seconds by term: what nests is counted once."""

from __future__ import annotations

import time

import pytest
import torch

from kt_ray.model.clock import Clock


def test_time_inside_another_term_is_not_counted_twice() -> None:
    clock = Clock(torch.device("cpu"))
    begun = time.perf_counter()
    with clock.device("attention"):
        time.sleep(0.05)
        with clock.host("experts_wait"):
            time.sleep(0.3)
    with clock.host("experts_wait"):
        time.sleep(0.1)
    whole = time.perf_counter() - begun
    seconds = clock.read()
    assert seconds["experts_wait"] >= 0.4
    assert 0.05 <= seconds["attention"] <= whole - 0.4
    assert sum(seconds.values()) <= whole


def test_an_error_leaves_no_open_span() -> None:
    clock = Clock(torch.device("cpu"))
    with pytest.raises(ValueError), clock.device("attention"), clock.host("experts_wait"):
        raise ValueError
    with clock.host("loss"):
        time.sleep(0.01)
    assert clock.read()["loss"] >= 0.01
