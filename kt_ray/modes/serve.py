"""mode=serve: an OpenAI-compatible server. On Ray Serve; with cluster=local, in this process without Ray."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

from kt_ray.config.schema import Config
from kt_ray.generate.generator import Generator
from kt_ray.runs.generation import (
    PreparedGeneration,
    Revivals,
    generator_on,
    prepare_generation,
)
from kt_ray.runs.start_cluster import started
from kt_ray.serve.access import bare, check_address, digest, taken_key
from kt_ray.serve.completions import Served
from kt_ray.serve.header_timeout import INSTALL, PROXY_VARIABLE
from kt_ray.serve.run import check_port, make_service, run_server
from kt_ray.supervisor import note_ready
from kt_ray.tracking.console import say


def run(config: Config) -> int:
    """Until Ctrl-C. Returns the exit code."""
    serve = replace(config.serve, host=bare(config.serve.host))
    config = replace(config, serve=serve)
    key = taken_key(serve.api_key)
    check_address(serve.host, key)
    check_port(serve.host, serve.port)
    # The plan counts caches for generate.batch_size rows.
    generate = replace(config.generate, batch_size=serve.max_batch)
    generation = prepare_generation(replace(config, generate=generate), serve.adapters)
    served = served_of(generation, key)

    def ready() -> None:
        host = f"[{serve.host}]" if ":" in serve.host else serve.host
        say(f"serving {', '.join([served.name, *served.adapters])} at http://{host}:{serve.port}/v1")
        say(f"a key is {'needed' if key else 'not needed'}; Ctrl-C ends the server")
        note_ready()

    local = config.cluster.name == "local"
    if not local:
        os.environ.setdefault(PROXY_VARIABLE, INSTALL)  # a local cluster's processes inherit it
        from kt_ray.actors.ray.ray_cluster import RayCluster
        from kt_ray.actors.ray.serve_app import refuse_company, run_on_serve

    with (
        contextlib.suppress(KeyboardInterrupt),
        started(generation, f"{config.model.name}-serve", None if local else refuse_company) as cluster,
    ):
        revivals = Revivals(generation, cluster)
        revivals.load_adapters()
        if local:

            def revive(error: BaseException) -> Generator:
                revivals.bring_back(error)
                return generator_on(generation, cluster)

            service = make_service(served, generator_on(generation, cluster))
            run_server(service, serve.host, serve.port, ready, revive)
        else:
            assert isinstance(cluster, RayCluster)
            run_on_serve(cluster, served, serve.host, serve.port, ready, revivals.bring_back)
    say("the server has ended")
    return 0


def served_of(generation: PreparedGeneration, key: str | None) -> Served:
    """What is served, from a checked configuration."""
    config, serve, room = generation.config, generation.config.serve, generation.cache_tokens
    return Served(
        name=serve.name or config.model.name,
        adapters=tuple(generation.adapters),
        tokenizer=config.model.tokenizer or generation.model_dir,
        template=config.model.chat_template,
        template_name=config.data.template,
        date=config.data.date,
        eos=generation.eos,
        context=min(generation.context or room, room),
        max_tokens=serve.max_tokens,
        running=serve.max_batch * generation.plan.replicas,
        max_queue=serve.max_queue,
        session=generation.session(serve.max_batch),
        max_body=serve.max_body,
        key=digest(key) if key else None,
        fingerprint=generation.fingerprint,
        created=int(time.time()),
    )
