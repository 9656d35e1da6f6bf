"""mode=serve: an OpenAI-compatible server. On Ray Serve; with cluster=local, in this process without Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from kt_ray.actors.cluster import ActorCluster
from kt_ray.config.schema import Config
from kt_ray.runs.generation import Setup, generator_on, setup, started, take_adapter
from kt_ray.serve.access import VARIABLE, bare, check_address, digest
from kt_ray.serve.completions import Served, now
from kt_ray.serve.run import check_port, make_service, run_server


def run(config: Config) -> int:
    """Until Ctrl-C. Returns the exit code."""
    from kt_ray.modes.train import _say, _terminated_as_interrupt

    serve = replace(config.serve, host=bare(config.serve.host))
    config = replace(config, serve=serve)
    key = (serve.api_key or os.environ.get(VARIABLE) or "").strip() or None
    check_address(serve.host, key)
    check_port(serve.host, serve.port)
    # The plan counts caches for generate.batch_size rows.
    generate = replace(config.generate, batch_size=serve.max_batch)
    made = setup(replace(config, generate=generate), serve.adapters)
    served = served_of(made, key)

    def ready() -> None:
        shown = f"[{serve.host}]" if ":" in serve.host else serve.host
        _say(f"serving {', '.join([served.name, *served.adapters])} at http://{shown}:{serve.port}/v1")
        _say(f"a key is {'needed' if key else 'not needed'}; Ctrl-C ends the server")

    with _terminated_as_interrupt():
        try:
            with started(made, f"{config.model.name}-serve", _check_company(config)) as cluster:
                take_adapter(made, cluster)
                _serve(made, served, cluster, ready)
        except KeyboardInterrupt:
            pass
    _say("the server has ended")
    return 0


def served_of(made: Setup, key: str | None) -> Served:
    """What is served, from a checked configuration."""
    config, serve, room = made.config, made.config.serve, made.cache_tokens
    return Served(
        name=serve.name or config.model.name,
        adapters=tuple(made.adapters),
        tokenizer=config.model.tokenizer or made.model_dir,
        template=config.model.chat_template,
        template_name=config.data.template,
        eos=made.eos,
        context=min(made.context or room, room),
        max_tokens=serve.max_tokens,
        running=serve.max_batch * made.plan.replicas,
        max_queue=serve.max_queue,
        session={
            "max_rows": serve.max_batch,
            "prefill_tokens": config.generate.prefill_tokens,
            "cache_tokens": room,
        },
        max_body=serve.max_body,
        key=digest(key) if key else None,
        fingerprint=made.fingerprint,
        created=now(),
    )


def _check_company(config: Config) -> Callable[[], None] | None:
    if config.cluster.name == "local":
        return None
    from kt_ray.actors.ray.serve_app import refuse_company

    return refuse_company


def _serve(made: Setup, served: Served, cluster: ActorCluster, ready: Callable[[], None]) -> None:
    serve = made.config.serve
    if made.config.cluster.name == "local":
        with generator_on(made, cluster) as generator:
            run_server(make_service(served, generator), serve.host, serve.port, ready)
        return
    from kt_ray.actors.ray.ray_cluster import RayCluster
    from kt_ray.actors.ray.serve_app import run_on_serve

    assert isinstance(cluster, RayCluster)
    run_on_serve(cluster, served, serve.host, serve.port, ready)
