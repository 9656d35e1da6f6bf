"""The server on Ray Serve: one deployment holds the session of generation, Serve's proxy the port.

The deployment finds the actors by their names. It asks for no CPU: the placement group of the actors has
them all. When it dies the session is lost, and the server ends: the actors still hold half of it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve

from kt_ray.actors.ray.ray_cluster import RayCluster, RayHandle
from kt_ray.actors.specs import ActorSpecs
from kt_ray.config.schema import ClusterConfig, RayRule
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request
from kt_ray.placement.plan_types import Plan
from kt_ray.serve.app import make_app
from kt_ray.serve.completions import FAREWELL, CompletionService, Served
from kt_ray.serve.run import make_service
from kt_ray.transport.messages import Address

APPLICATION = "kt_ray"
LOOK = 2.0  # seconds between looks at the deployment
PATIENCE = 60.0  # seconds that it gets to answer one
ONGOING = 100_000  # requests inside the deployment: the service counts and refuses by itself
QUIET: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}


class AttachedCluster(RayCluster):
    """A started cluster in another process, for its calls; never shut down from there."""

    def __init__(
        self,
        plan: Plan,
        specs: ActorSpecs,
        config: ClusterConfig,
        rule: RayRule,
        namespace: str,
        names: Mapping[Address, str],
    ) -> None:
        super().__init__(plan, specs, config, rule, "serve")
        self._instructions = ThreadPoolExecutor(1, thread_name_prefix="kt-instructions")
        for address in sorted(names):
            actor = ray.get_actor(names[address], namespace=namespace)
            (self.workers if address[0] == "worker" else self.experts).append(RayHandle(address, actor))

    @staticmethod
    def parts(cluster: RayCluster) -> tuple[Any, ...]:
        """What another process builds it from."""
        c = cluster
        return c.plan, c.specs, c.config, c.rule, c.namespace, c.names()

    def instruct(
        self, rank: int, kind: str, session: int, number: int = -1, request: Request | None = None
    ) -> None:
        # On a thread that belongs to no HTTP request. When a client leaves, Serve cancels the request's task
        # and with it the actor calls made in it; one that then never comes holds up all later ones.
        self._instructions.submit(super().instruct, rank, kind, session, number, request)


class Server:
    """The deployment."""

    service: CompletionService | None = None  # of this process: there is one replica in it

    def __init__(self, cluster: tuple[Any, ...], served: Served) -> None:
        from kt_ray.data.template import load_tokenizer

        self.generator = Generator(
            AttachedCluster(*cluster), load_tokenizer(served.tokenizer), **served.session
        )
        Server.service = make_service(served, self.generator)

    def look(self) -> UserError | None:
        """What ended the service; None while it runs."""
        error = self.generator.error
        if error is None or isinstance(error, UserError):
            return error
        return UserError("generation has ended", observed=f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        """Refuse new requests, give running ones a moment, end the session."""
        assert Server.service is not None
        Server.service.close()


def _build() -> Any:
    """The ASGI application, in the replica, after `Server.__init__`."""
    assert Server.service is not None
    return make_app(Server.service)


def run_on_serve(
    cluster: RayCluster, served: Served, host: str, port: int, ready: Callable[[], None]
) -> None:
    """Serve until an interrupt (which passes), or until the service ends.

    Args:
        host, port: where Serve's proxy listens, on the cluster's head node.
        ready: called once requests are answered.

    Raises:
        UserError: the deployment did not start, or the service ended.
    """
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    environment = cluster.environment()
    options: dict[str, Any] = {"num_cpus": 0}
    if environment:
        options["runtime_env"] = {"env_vars": environment}
    deployment: Any = serve.deployment(
        serve.ingress(_build)(Server),
        name="server",
        num_replicas=1,
        max_ongoing_requests=ONGOING,
        ray_actor_options=options,
        graceful_shutdown_timeout_s=FAREWELL,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=1,
        logging_config=QUIET,
    )
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            logging_config=QUIET,
        )
        try:
            handle = serve.run(
                deployment.bind(AttachedCluster.parts(cluster), served), name=APPLICATION, route_prefix="/"
            )
        except RuntimeError as error:
            raise UserError(
                "the server did not start",
                where="Ray Serve",
                observed=error,
                remedy="see the log of the deployment on the Ray dashboard, tab Serve",
            ) from error
        ready()
        try:
            _watch(handle)
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):
                handle.stop.remote().result(timeout_s=2 * FAREWELL)
            raise
    finally:
        if cluster.joined:  # one of our own ends as a whole
            with contextlib.suppress(Exception):
                serve.shutdown()


def refuse_company() -> None:
    """Ports are Serve's, not an application's, and `serve.shutdown` ends all applications.

    Raises:
        UserError: Serve runs in the cluster that this process is connected to.
    """
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return
    raise UserError(
        "Ray Serve runs in this cluster already",
        observed="its controller runs, with its own port",
        required="a cluster without Ray Serve",
        remedy="end it with 'serve shutdown', or set cluster.address=local",
    )


def _watch(handle: Any) -> None:
    """Until the service ends or the deployment does not answer."""
    while True:
        time.sleep(LOOK)
        try:
            fault = handle.look.remote().result(timeout_s=PATIENCE)
        except Exception as error:
            raise UserError(
                "the server's deployment on Ray Serve is gone",
                observed=f"{type(error).__name__}: {error}",
                remedy="look for the kernel's out-of-memory killer (dmesg), then start the server again",
            ) from error
        if fault is not None:
            raise UserError(
                fault.what,
                where=fault.where,
                observed=fault.observed,
                remedy="look for the kernel's out-of-memory killer (dmesg) and at the actors' logs, then "
                "start the server again",
            )
