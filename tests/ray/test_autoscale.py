"""A fleet on Ray changes its own size: Ray places what it starts; what has no place yet carries nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.e2e.program import is_running, serving
from tests.fleet.test_autoscale import L4, complete, num_ready
from tests.ray.conftest import RayCluster, ray_cluster_of
from tests.waiting import wait_for

FLAGS = (*L4, "--launcher", "ray", "--autoscale", "1..2", "--scale-down-seconds", "20")


@pytest.fixture
def small_cluster(network: None) -> Iterator[RayCluster]:
    """A cluster with room for one replica."""
    with ray_cluster_of(num_cpus=1) as cluster:
        yield cluster


@pytest.mark.slow  # a cluster of its own
def test_ray_places_what_autoscaling_starts(small_cluster: RayCluster, smollm2_gguf: Path) -> None:
    flags = (*FLAGS, "--ray-address", small_cluster.address, "--tokenizer", smollm2_gguf)
    with serving("Llama-3.1-8B", *flags) as server, ThreadPoolExecutor(100) as pool:
        sent: list[Future[httpx.Response]] = []

        def send_more(num: int = 1) -> dict[str, Any]:
            """Send prompts, two of which keep a replica busy for a second, and look half a second later."""
            sent.extend(pool.submit(complete, server, len(sent) + each) for each in range(num))
            time.sleep(0.5)
            return server.fleet()

        # It wants a second replica, which has no place: it waits for one, and nothing is sent to it.
        wait_for(lambda: send_more(3)["scaling"]["num_wanted"] == 2, timeout=120)
        wait_for(lambda: any("r1 waits for a place" in line for line in server.lines), timeout=30)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            first, second = send_more()["replicas"]
            assert first["state"] == "ready"
            assert (second["state"], second["num_lives"], second["num_outstanding"]) == ("starting", 0, 0)
        assert server.fleet()["scaling"]["num_wanted"] == 2, "it is asked for once"
        # A node comes with room for it: it gets ready there, and takes its part.
        small_cluster.add_node(num_cpus=1)
        wait_for(lambda: send_more() and num_ready(server) == 2, timeout=120)
        wait_for(lambda: send_more()["replicas"][1]["num_outstanding"] > 0, timeout=60)
        answers = [each.result() for each in sent]
        assert {each.status_code for each in answers} == {200}
        second = server.fleet()["replicas"][1]["process_id"]
        # Nobody asks: it ends, and its place is free.
        wait_for(lambda: len(server.fleet()["replicas"]) == 1, timeout=120)
        wait_for(lambda: not is_running(second), timeout=10)
        values = server.metrics()
        assert values["onbeat_fleet_rescales_total{up,work}"] == 1
        assert values["onbeat_fleet_rescales_total{down,spare}"] == 1
        assert values["onbeat_fleet_replicas_wanted"] == 1
