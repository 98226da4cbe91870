"""A Ray cluster of two raylets on this machine, in a network of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onbeat.cluster.launcher import ReplicaNeeds
from onbeat.cluster.ray_launcher import RAY_SETTINGS, RayLauncher
from tests.fleet import fleets
from tests.ray.namespace import own_network

ROOT = Path(__file__).resolve().parents[2]

TOKEN = secrets.token_hex(32)
"""Of all clusters of this process: Ray reads it once."""


@dataclass
class RayCluster:
    """A head, and raylets that tests add and kill."""

    cluster: Any
    address: str

    def add_node(self, **resources: Any) -> Any:
        return self.cluster.add_node(node_ip_address="127.0.0.1", **resources)

    def launcher(self, **options: Any) -> RayLauncher:
        """Return a launcher of replicas that take a CPU each."""
        needs = ReplicaNeeds(device="cpu", num_cpus=options.pop("num_cpus", 1))
        return RayLauncher(self.address, needs, **options)


@pytest.fixture(scope="package")
def network() -> Iterator[None]:
    try:
        context = own_network()
        with context:
            yield
    except OSError as error:
        pytest.skip(f"Ray is tested in a network of its own: {error}")


@pytest.fixture(scope="package")
def ray_cluster(network: None) -> Iterator[RayCluster]:
    """A head with three CPUs; Ray does not look how many there are."""
    with ray_cluster_of(num_cpus=3) as cluster:
        yield cluster


@contextmanager
def ray_cluster_of(num_cpus: int) -> Iterator[RayCluster]:
    """Start a cluster whose folder, home and token are its own."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'onbeat[cluster]'")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets want short paths
    Path(folder, "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **RAY_SETTINGS,  # it reads them when it is imported, which is here
            "HOME": folder,
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }.items():
            patch.setenv(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ray.cluster_utils import Cluster

            head = {"num_cpus": num_cpus, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
            cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield RayCluster(cluster, cluster.address)
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def on_ray(ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """Fleets that a test makes start their replicas on Ray."""
    import ray

    monkeypatch.setattr(fleets, "make_launcher", partial(ray_cluster.launcher, start_timeout=60))
    yield ray_cluster
    end = time.monotonic() + 60
    while ray.is_initialized() and time.monotonic() < end:  # a launcher does not wait for it for long
        time.sleep(0.05)
