"""mode=train_server: the Tinker API over one base model, for training loops of the user's own."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path

from kt_ray.checkpoint.safetensors_file import writing
from kt_ray.config.schema import Config
from kt_ray.data.tokenizer_files import load_tokenizer
from kt_ray.placement.generation_memory import within_server
from kt_ray.runs.disk_room import gigabytes, training_bytes
from kt_ray.runs.generation import generation_of
from kt_ray.runs.prepare import prepare_model
from kt_ray.runs.run_lock import locked
from kt_ray.runs.start_cluster import started
from kt_ray.runs.train_backend import ClusterBackend
from kt_ray.serve.access import bare, check_address, digest, is_loopback, taken_key
from kt_ray.serve.run import check_port
from kt_ray.tracking.console import say, setup_logging
from kt_ray.train_server.http_server import serve_backend

logger = logging.getLogger(__name__)

PREFIX = "tml-"  # of every key, to the tinker SDK


def run(config: Config) -> int:
    """Until Ctrl-C. Returns the exit code."""
    serve = replace(config.serve, host=bare(config.serve.host))
    key = taken_key(serve.api_key)
    check_address(serve.host, key)
    check_port(serve.host, serve.port)
    config = within_server(replace(config, serve=serve))
    model = prepare_model(config, training=True)
    named = "model.tokenizer" if config.model.tokenizer else "model.path"
    generation = generation_of(model, load_tokenizer(config.model.tokenizer or model.model_dir, named))
    name = serve.name or config.model.name
    own = Path(config.run.root, "train_server", name.strip("/").replace("/", "--"))
    directory = Path(config.train_server.directory or own)
    host = f"[{serve.host}]" if ":" in serve.host else serve.host

    def ready() -> None:
        say(f"training {name} for clients at http://{host}:{serve.port}; saved weights: {directory}")
        say(
            f"clients: TINKER_BASE_URL=http://{host}:{serve.port} "
            f"TINKER_API_KEY={PREFIX}{'any' if key is None else '<the key>'}"
        )
        on_disk = gigabytes(training_bytes(model.plan.dims, config))
        most, held = config.train_server.trainings, config.train_server.adapters
        say(f"trainings: at most {most}, {held} in memory at a time; on disk up to {on_disk} each")
        say("Ctrl-C ends the server")

    remedy = "set train_server.directory to a directory that you may write to"
    with writing("the directory of saved weights", directory, remedy=remedy):
        directory.mkdir(parents=True, exist_ok=True)
        log = setup_logging(directory / "server.log")
    with (
        contextlib.suppress(KeyboardInterrupt),
        log,
        contextlib.ExitStack() as stack,
        locked(directory, "train_server.directory"),
        started(generation, f"{config.model.name}-train-server") as cluster,
    ):
        facts = cluster.info()
        for actor in facts:
            logger.info("%s is process %d on %s", actor["actor"], actor["pid"], actor["host"])
        moves = next(filter(None, (actor.get("padding_moves") for actor in facts)), "")
        if moves:
            say(f"padding moves this model ({moves}): micro-batches hold rows of one length only")
        # On another machine only the hub has it.
        near = is_loopback(serve.host) or "/" not in name
        tokenizer = (config.model.tokenizer or model.model_dir) if near else name
        snapshots = directory / ".kt_ray_snapshots"  # the directory may have others' files
        backend = ClusterBackend(generation, cluster, name, tokenizer, snapshots, unpadded=bool(moves))
        stack.callback(backend.close)
        serve_backend(
            backend,
            directory,
            host=serve.host,
            port=serve.port,
            key=digest(key) if key else None,
            max_body=serve.max_body,
            most_samplers=config.train_server.samplers,
            ready=ready,
        )
    say("the server has ended")
    return 0
