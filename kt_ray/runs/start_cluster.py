"""The cluster that a configuration names: made, started with progress, and ended with its mode."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.runs.prepare import PreparedModel
from kt_ray.tracking.console import say
from kt_ray.tracking.progress import LoadProgress
from kt_ray.train.stop_signals import SAME

logger = logging.getLogger(__name__)


class Ended(KeyboardInterrupt):
    """By SIGTERM or SIGHUP, which end the mode also where Ctrl-C ends less, as in a chat."""


def make_cluster(
    model: PreparedModel, name: str, progress: LoadProgress | None = None, run_dir: str | None = None
) -> ActorCluster:
    """The cluster that the configuration names, not started.

    Args:
        name: of the run; names the Ray namespace.
        progress: told what every actor has loaded.
        run_dir: of a training run.
    """
    config, plan = model.config, model.plan
    start = model.start if model.start is not None and model.start.is_read else None
    specs = actor_specs(plan, config, model.model_dir, model.formulas, model.root, start)
    specs = specs.expecting(model.own_fingerprint, model.fingerprint)

    def note(actor: str, layer: int, done: int, total: int) -> None:
        if progress is not None:
            progress.update(actor, done, total, layer)

    if config.cluster.name == "local":
        return LocalCluster(plan, specs, note)
    from kt_ray.actors.ray.ray_cluster import RayCluster

    return RayCluster(plan, specs, config.cluster, config.rule.ray, name, note, run_dir)


@contextlib.contextmanager
def started(
    model: PreparedModel,
    name: str,
    connected: Callable[[], None] | None = None,
    run_dir: str | None = None,
) -> Iterator[ActorCluster]:
    """A started cluster, which ends with the block. Its LoRA has no effect yet: it is the base model.

    In the block SIGTERM and SIGHUP do what Ctrl-C does, as `Ended`. None of them disturbs the first second of
    its end.

    Args:
        name, run_dir: as in `make_cluster`.
        connected: called once Ray is there, before anything starts on it.
    """
    progress = LoadProgress(live=model.config.tracking.progress)
    cluster = make_cluster(model, name, progress, run_dir)
    cluster.say = progress.line
    with _interrupted() as end:
        try:
            for line in cluster.connect():
                say(line)
                logger.info("%s", line)
            if connected is not None:
                connected()
            with progress:
                facts = cluster.start()
            for line in (note for actor in facts for note in actor.get("notes", ())):
                say(line)
            yield cluster
        finally:
            end()
            cluster.shutdown()


@contextlib.contextmanager
def _interrupted() -> Iterator[Callable[[], None]]:
    """By SIGTERM, and by SIGHUP unless it is ignored (nohup): `Ended`. Several within `SAME` seconds are one.

    Yields what begins the end: from then on SIGINT is as these, and what comes within `SAME` seconds asks for
    nothing else, such as a second Ctrl-C in haste.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    last = -SAME

    def interrupt(*_: object) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= SAME:
            last = now
            raise Ended

    def take(number: signal.Signals) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)

    def end() -> None:
        nonlocal last
        last = time.monotonic()
        take(signal.SIGINT)

    before: dict[signal.Signals, Any] = {}
    take(signal.SIGTERM)
    take(signal.SIGHUP)
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
