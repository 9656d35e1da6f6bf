"""What mode=doctor asks of Ray, with two real actors and few messages."""

from __future__ import annotations

import pytest
import ray

from kt_ray.actors.ray.ray_probe import measure_ray, probe_ray
from kt_ray.errors import UserError


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_messages_between_two_actors_take_time() -> None:
    figures = probe_ray(rounds=10, arena_bytes=1e10)
    assert set(figures) == {"call", "arena", "ray_bytes"}
    assert all(f.value > 0 and f.source == "measured" for f in figures.values())
    assert figures["call"].value < 1 and figures["arena"].value < 1
    assert measure_ray("auto").keys() == figures.keys()  # the connected cluster is taken


def test_a_named_cluster_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="no Ray cluster answers"):
        measure_ray("127.0.0.1:1")
