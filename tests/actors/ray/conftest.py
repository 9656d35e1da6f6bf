"""One local Ray for the tests of a module, joined by this process before the first of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ray_place import ray_place


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray with two CPUs and four GPUs that only Ray believes in. A `RayCluster` takes the cluster that its
    process is connected to, and leaves it when it shuts down."""
    import ray

    with ray_place() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(place.path))
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(
            address="local",
            namespace="tests",
            include_dashboard=False,
            num_cpus=2,
            num_gpus=4,
            log_to_driver=False,
            logging_level="error",
        )
        try:
            yield
        finally:
            ray.shutdown()
