"""The server on Ray Serve: one deployment holds the session of generation, Serve's proxy the port.

The deployment finds the actors by their names. It asks for no CPU: the placement group of the actors has
them all. When an actor dies the driver replaces it, and the deployment begins another session. When the
deployment dies its session is lost, and the server ends: the actors still hold half of it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from kt_ray.actors.ray.ray_cluster import START_AGAIN, RayCluster, RayHandle
from kt_ray.actors.specs import ActorSpecs
from kt_ray.config.schema import ClusterConfig, RayRule
from kt_ray.errors import TryAgain, UserError
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request
from kt_ray.placement.plan_types import Plan
from kt_ray.serve.app import make_app
from kt_ray.serve.completions import FAREWELL, CompletionService, Served
from kt_ray.serve.run import make_service
from kt_ray.transport.messages import Address

APPLICATION = "kt_ray"
LOOK = 1.0  # seconds between the deployment's reports, and the driver's looks at them
PATIENCE = 60.0  # seconds after which a deployment that reports nothing is gone
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
        self.namespace = namespace
        self._instructions = ThreadPoolExecutor(1, thread_name_prefix="kt-instructions")
        for address in sorted(names):
            actor = ray.get_actor(names[address], namespace=namespace)
            (self.workers if address[0] == "worker" else self.experts).append(RayHandle(address, actor))

    @staticmethod
    def parts(cluster: RayCluster) -> tuple[Any, ...]:
        """What another process builds it from."""
        c = cluster
        return c.plan, c.specs, c.config, c.rule, c.namespace, c.names()

    def detach(self) -> None:
        """Give up what this process has of the cluster, after its session has ended."""
        self._settle_aborts()  # one that arrives later would end the next session
        self._instructions.shutdown(wait=False)
        if self._inbox is not None:
            self._inbox.close()

    def instruct(
        self, rank: int, kind: str, session: int, number: int = -1, requests: Sequence[Request] = ()
    ) -> None:
        # On a thread that belongs to no HTTP request. When a client leaves, Serve cancels the request's task
        # and with it the actor calls made in it; one that then never comes holds up all later ones.
        self._instructions.submit(super().instruct, rank, kind, session, number, requests)


@dataclass(frozen=True)
class Report:
    """What the deployment says of itself, through the cluster's own key-value store.

    Not through Serve: its questions wait behind the users' on their event loop.
    """

    replica: str  # which process; Serve replaces one that died
    number: int  # grows
    error: Exception | None  # what ended the session of generation; None while it runs

    @staticmethod
    def key(namespace: str) -> str:
        return f"kt_ray_serve/{namespace}"

    def publish(self, namespace: str) -> None:
        try:
            value = pickle.dumps(self)
        except Exception:  # of the error
            plain = RuntimeError(f"{type(self.error).__name__}: {self.error}")
            value = pickle.dumps(replace(self, error=plain))
        _internal_kv_put(self.key(namespace), value)

    @staticmethod
    def last(namespace: str) -> Report | None:
        value = _internal_kv_get(Report.key(namespace))
        found: Report | None = pickle.loads(value) if value else None
        return found


class Server:
    """The deployment."""

    service: CompletionService | None = None  # of this process: there is one replica in it

    def __init__(self, cluster: tuple[Any, ...], served: Served) -> None:
        self._served = served
        self._replica, self._numbers = secrets.token_hex(8), itertools.count()
        self._reporting = threading.Lock()
        self._cluster = AttachedCluster(*cluster)
        Server.service = make_service(served, self._generator())
        threading.Thread(target=self._keep_reporting, name="kt-report", daemon=True).start()

    def _generator(self) -> Generator:
        from kt_ray.data.tokenizer_files import load_tokenizer

        return Generator(self._cluster, load_tokenizer(self._served.tokenizer), **self._served.session)

    def renew(self, cluster: tuple[Any, ...]) -> None:
        """Begin another session, after the driver has brought the actors back."""
        assert Server.service is not None
        self._cluster.detach()
        self._cluster = AttachedCluster(*cluster)
        Server.service.generator = self._generator()
        self._report()

    def stop(self) -> None:
        """Refuse new requests, give running ones a moment, end the session."""
        assert Server.service is not None
        Server.service.close()

    def _report(self) -> None:
        assert Server.service is not None
        with self._reporting:  # in order
            report = Report(self._replica, next(self._numbers), Server.service.fault())
            report.publish(self._cluster.namespace)

    def _keep_reporting(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a store that is away for a moment; the driver has patience
                self._report()
            time.sleep(LOOK)


def _build() -> Any:
    """The ASGI application, in the replica, after `Server.__init__`."""
    assert Server.service is not None
    return make_app(Server.service)


def run_on_serve(
    cluster: RayCluster,
    served: Served,
    host: str,
    port: int,
    ready: Callable[[], None],
    bring_back: Callable[[BaseException], None],
) -> None:
    """Serve until an interrupt (which passes), or until the service ends.

    Args:
        host, port: where Serve's proxy listens, on the cluster's head node.
        ready: called once requests are answered.
        bring_back: has all actors run again after an error, or raises.

    Raises:
        UserError: the deployment did not start or is gone, or the service could not be brought back.
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
            _watch(handle, cluster, bring_back)
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):
                handle.stop.remote().result(timeout_s=2 * FAREWELL)
            raise
    finally:
        with contextlib.suppress(Exception):
            _internal_kv_del(Report.key(cluster.namespace))
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


def _watch(handle: Any, cluster: RayCluster, bring_back: Callable[[BaseException], None]) -> None:
    """Until the service ends and cannot be brought back, or the deployment is gone.

    Only time in which the driver itself runs counts: where all were stopped, the reports begin again, too.
    """
    replica, number, silent, looked = "", -1, 0.0, time.monotonic()
    while True:
        time.sleep(LOOK)
        report, now = Report.last(cluster.namespace), time.monotonic()
        silent, looked = silent + min(now - looked, 2 * LOOK), now
        if report is not None and not replica:
            replica = report.replica
        if report is not None and report.replica == replica and report.number != number:
            number, silent = report.number, 0.0
        elif silent > PATIENCE or (report is not None and report.replica != replica):
            raise _gone("it has been replaced" if report and report.replica != replica else "no report")
        if report is None or report.error is None:
            continue
        bring_back(report.error)
        try:
            handle.renew.remote(AttachedCluster.parts(cluster)).result(timeout_s=PATIENCE)
        except Exception as error:
            raise _gone(error) from error
        silent, looked = 0.0, time.monotonic()


def _gone(observed: object) -> TryAgain:
    if isinstance(observed, Exception):
        observed = f"{type(observed).__name__}: {observed}"
    return TryAgain(
        "the server's deployment on Ray Serve is gone",
        observed=observed,
        remedy=START_AGAIN,
    )
