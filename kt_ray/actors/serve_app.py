"""The server on Ray Serve: one deployment holds the session of generation, Serve's proxy the port.

The deployment finds the actors by their names. It asks for no CPU: the placement group of the actors has
them all. When it dies, the session is lost, and the server ends: the actors still hold half of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve

from kt_ray.actors.mailbox import Address
from kt_ray.actors.ray_actor import RayHandle
from kt_ray.actors.ray_cluster import PASSED_ON, RayCluster, passed_on
from kt_ray.actors.specs import ActorSpecs
from kt_ray.config.schema import ClusterConfig, RayRule
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.placement.types import Plan
from kt_ray.serve.app import make_app
from kt_ray.serve.engine import Engine, Served
from kt_ray.serve.run import FAREWELL, make_engine
