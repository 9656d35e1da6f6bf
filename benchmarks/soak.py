"""Does a long run grow? Steps of a small model under Ray, and what every process holds as they go by.

    python benchmarks/soak.py --steps 1000 --json benchmarks/results/soak.json

Every `--every` steps, of the driver and of each actor: resident memory without pages of files, file
descriptors, threads, and the objects that Ray counts references to; of the machine: bytes in /dev/shm. The
exit code is 1 if anything grew by more than a fixed allowance between the first sample after `--warm` steps
and the last. Until then arenas grow to their working size, and on a CPU torch's oneDNN compiles its matrix
products for every new length of row and keeps up to 1,024 of them (0.6 MB each): the longer, the rarer.

glibc keeps freed blocks of up to 32 MiB, which looks like growth: processes are started so that it does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPO))

# What may differ between two samples of a run that does not grow.
ALLOWED = {"memory_bytes": 16 << 20, "fds": 4, "threads": 2, "ray_objects": 16, "shm_bytes": 1 << 20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--warm", type=int, default=500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="options of launch.py")
    given = parser.parse_args()

    from kt_ray.config.compose import compose
    from kt_ray.runs.prepare import prepare
    from kt_ray.runs.start_cluster import make_cluster
    from kt_ray.train.trainer import Events, Trainer

    config = compose(
        [
            "trainer.batch_size=2",
            "trainer.eval_every=0",
            "lora.rank=2",
            "cluster.address=local",
            f"trainer.max_steps={given.steps}",
            *given.overrides,
        ]
    )
    about = common.machine()
    prepared = prepare(config)
    cluster = make_cluster(prepared, f"soak-{os.getpid()}")
    samples: list[dict[str, Any]] = []
    begun = time.monotonic()

    def on_step(metrics: Any) -> None:
        if metrics.step % given.every == 0:
            samples.append(sample(cluster, metrics.step, time.monotonic() - begun))
            print(_line(samples[-1]), flush=True)

    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # for processes that start from here on
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 20))
    try:
        cluster.connect()
        cluster.start()
        summary = Trainer(config, cluster, prepared.batches, Events(on_step=on_step)).run()
    finally:
        cluster.shutdown()
    grown = growth([one for one in samples if one["step"] >= given.warm])
    result = {
        "impl": "kt_ray",
        "model": config.model.name,
        "steps": summary.steps,
        "seconds": summary.seconds,
        "overrides": given.overrides,
        "samples": samples,
        "warm": given.warm,
        "growth": grown,
        "allowed": ALLOWED,
    }
    if given.json:
        common.write_json(given.json, [result], about)
    too_much = [f"{who}: {what} +{by}" for who, kinds in grown.items() for what, by in kinds.items()
                if by > ALLOWED[what]]  # fmt: skip
    print("\n".join(too_much) or f"nothing grew in {summary.steps} steps ({summary.seconds:.0f} s)")
    return 1 if too_much else 0


def sample(cluster: Any, step: int, seconds: float) -> dict[str, Any]:
    """What driver, actors and machine hold now."""
    counts = ray_objects()
    pids = {"driver": os.getpid(), **{fact["actor"]: fact["pid"] for fact in cluster.info()}}
    processes = {name: {**process(pid), "ray_objects": counts.get(pid, 0)} for name, pid in pids.items()}
    return {"step": step, "seconds": seconds, "shm_bytes": shm_bytes(), "processes": processes}


def process(pid: int) -> dict[str, int]:
    """Of one process; memory that it shares counts in full, pages of files (which come and go) do not."""
    folder = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "memory_bytes": sum(int(status[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem")),
        "fds": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
    }


def shm_bytes() -> int:
    """What lies in /dev/shm and takes memory (Ray's store is a sparse file there)."""
    total = 0
    for root, _, files in os.walk("/dev/shm"):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def ray_objects() -> dict[int, int]:
    """Objects that every process holds references to, by process id, as `ray memory` counts them."""
    import ray
    from ray._private.internal_api import get_state_from_address, node_stats

    if not ray.is_initialized():
        return {}
    address = ray.get_runtime_context().gcs_address
    state = get_state_from_address(address)
    counts: dict[int, int] = {}
    for raylet in state.node_table():
        if raylet["Alive"]:
            stats = node_stats(raylet["NodeManagerAddress"], raylet["NodeManagerPort"])
            for worker in stats.core_workers_stats:
                counts[worker.pid] = len(worker.object_refs)
    return counts


def growth(samples: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Last sample less the first, by process and kind; the machine's own beside them."""
    first, last = samples[0], samples[-1]
    grown: dict[str, dict[str, int]] = {
        name: {kind: last["processes"][name][kind] - before for kind, before in kinds.items()}
        for name, kinds in first["processes"].items()
    }
    grown["machine"] = {"shm_bytes": last["shm_bytes"] - first["shm_bytes"]}
    return grown


def _line(one: dict[str, Any]) -> str:
    parts = [
        f"{name} {p['memory_bytes'] / 1e6:.1f} MB, {p['fds']} fds, {p['threads']} threads, "
        f"{p['ray_objects']} objects"
        for name, p in one["processes"].items()
    ]
    machine = f"step {one['step']} ({one['seconds']:.0f} s), /dev/shm {one['shm_bytes'] / 1e6:.1f} MB"
    return "; ".join([machine, *parts])


if __name__ == "__main__":
    sys.exit(main())
