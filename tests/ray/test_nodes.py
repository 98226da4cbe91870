"""Nodes that die, that are full, and whose clocks are others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest

from onbeat.cluster.launcher import ReplicaNeeds
from onbeat.core.errors import ConfigError, EngineDead
from tests.cpu.e2e.program import is_running
from tests.fleet.fleets import check_all, fleet_of, pid_of, start_requests, state_of
from tests.waiting import until

HEAD = {"CPU": 1.0, "node:__internal_head__": 0.001}
FAR = {"CPU": 1.0, "far": 1.0}


async def test_a_replica_without_a_place_is_given_up(on_ray, caplog) -> None:
    async with fleet_of(1) as client:
        launcher: Any = client.controller._launcher
        launcher._bundle = {"CPU": 64.0}
        launcher._start_timeout = 5.0
        await client.scale(2)
        assert [view.state for view in client.replicas()] == ["ready", "starting"]
        await check_all(start_requests(client, 4))
        await until(lambda: client.counts.lost["r1"] == 1, timeout=20)
        assert state_of(client, "r0") == "ready"
        await client.scale(1)
    assert "it needs 64 CPU" in caplog.text
    assert " 5 s" in caplog.text


async def test_the_first_replica_without_a_place_ends_the_start(on_ray) -> None:
    client = fleet_of(1, launcher=on_ray.launcher(num_cpus=64, start_timeout=3))
    with pytest.raises(EngineDead, match=r"r0 .* 3 s"):
        await client.start()


async def test_who_has_left_the_cluster_does_not_join_it_again(on_ray, monkeypatch) -> None:
    import ray

    async with fleet_of(1) as client:
        launcher: Any = client.controller._launcher
        (group,) = [started.group for started in launcher._started.values()]
    await until(lambda: not ray.is_initialized())
    joined: list[str] = []
    monkeypatch.setattr(ray, "init", lambda *_, **__: joined.append("again"))
    launcher._release(None, group)
    for thread in threading.enumerate():
        if thread.name == "onbeat-ray-release":
            thread.join(10)
    assert not joined


def _sleep_for_ever(_on_progress):
    time.sleep(600)


@pytest.mark.slow  # an actor and a process
async def test_a_replica_that_never_gets_ready_is_given_up(on_ray) -> None:
    client = fleet_of(1, make_build=lambda _replica, _life: _sleep_for_ever)
    client.controller.processes.start_timeout = 4.0
    with pytest.raises(EngineDead, match=r"r0 .* for 4 s"):
        await client.start()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:9", "cannot be reached: Connection refused"),
        ("10.99.0.1:6379", "cannot be reached"),
        ("ray://127.0.0.1:10001", "must be auto or HOST:PORT"),
        ("head", "must be auto or HOST:PORT"),
        ("127.0.0.1:99999", "cannot be reached"),
    ],
)
async def test_an_address_where_no_cluster_is(ray_cluster, address: str, why: str) -> None:
    ray_cluster.address, right = address, ray_cluster.address
    launcher = ray_cluster.launcher()
    ray_cluster.address = right
    started = time.monotonic()
    with pytest.raises(ConfigError, match=why):
        await fleet_of(1, launcher=launcher).start()
    assert time.monotonic() - started < 5


def test_what_a_replica_needs() -> None:
    def bundle(device: str, num_cpus: int | None, **cluster: float) -> dict[str, float]:
        return ReplicaNeeds(device=device, num_cpus=num_cpus).bundle(cluster)

    assert bundle("cuda", None) == {"CPU": 1.0, "GPU": 1.0}
    assert bundle("auto", 4, GPU=8.0) == {"CPU": 1.0, "GPU": 1.0}
    assert bundle("auto", 4, CPU=8.0) == {"CPU": 4.0}
    assert bundle("cpu", 4, GPU=8.0) == {"CPU": 4.0}
    with pytest.raises(ConfigError, match="give --threads"):
        bundle("cpu", None)


@pytest.mark.slow  # a raylet of its own
async def test_the_streams_of_a_lost_node_go_on_elsewhere(on_ray) -> None:
    node = on_ray.add_node(num_cpus=1, resources={"far": 1})
    client = fleet_of(1)
    launcher: Any = client.controller._launcher
    launcher._needs = _Bundle(HEAD)
    async with client:
        launcher._bundle = FAR
        await client.scale(2)
        await until(lambda: state_of(client, "r1") == "ready", timeout=60)
        process_ids = [pid_of(client, "r1")]
        process_ids.append(_parent(process_ids[0]))
        started = start_requests(client, 6, max_tokens=900)
        await until(lambda: all(view.num_streaming == 3 for view in client.replicas()))
        launcher._bundle = HEAD
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        killed = time.monotonic()
        await until(lambda: state_of(client, "r1") == "starting", timeout=4)
        assert time.monotonic() - killed < 2
        await until(lambda: not any(map(is_running, process_ids)), timeout=5)
        await check_all(started, timeout=60)
        assert client.counts.num_resumed == 3
        await until(lambda: state_of(client, "r1") == "ready", timeout=60)
    on_ray.cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow  # starts an actor twice
async def test_a_killed_actor_takes_its_engine_with_it(on_ray) -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 4, max_tokens=300)
        await until(lambda: all(view.num_streaming == 2 for view in client.replicas()))
        engine = pid_of(client, "r0")
        os.kill(_parent(engine), signal.SIGKILL)
        await until(lambda: state_of(client, "r0") == "starting", timeout=2)
        await until(lambda: not is_running(engine), timeout=5)
        await check_all(started)
        await until(lambda: state_of(client, "r0") == "ready", timeout=60)


class _Bundle:
    def __init__(self, resources: dict[str, float]) -> None:
        self._resources = resources

    def bundle(self, _cluster: dict[str, float]) -> dict[str, float]:
        return self._resources


def _parent(process_id: int) -> int:
    with open(f"/proc/{process_id}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@contextmanager
def node_with_another_clock(address: str, ahead: int):
    """Start a raylet whose monotonic clock is ahead of everybody's."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, "--block"]
    options = ["--node-ip-address", "127.0.0.1", "--num-cpus", "1", "--resources", '{"far": 1}']
    unshare = ["unshare", "--time", "--monotonic", str(ahead), "--fork", "--kill-child"]
    node = subprocess.Popen([*unshare, *ray, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        node.kill()
        node.wait()


@pytest.mark.slow  # a raylet of its own
async def test_a_node_with_another_clock_keeps_deadlines_and_times(on_ray) -> None:
    if subprocess.run(["unshare", "--time", "--monotonic", "9", "true"], check=False).returncode:
        pytest.skip("a namespace of time is not permitted")
    client = fleet_of(1)
    launcher: Any = client.controller._launcher
    launcher._needs = _Bundle(FAR)
    with node_with_another_clock(on_ray.address, 100_000):
        async with client:
            life = client.controller.lives["r0"]
            offset = client.controller._launcher.clock_offset("r0", 0)
            assert offset == pytest.approx(-100_000, abs=0.1)
            seen: list[Any] = []
            client.add_observer(_Observer(seen))
            sent = time.monotonic()
            await check_all(start_requests(client, 3))
            assert all(sent < message.stats.start <= message.now <= time.monotonic() for message in seen)
            await asyncio.sleep(1)  # it says that it lives
            assert abs(time.monotonic() - life.pulse.time) < 2
            for message in seen:
                for output in message.outputs:
                    assert sent <= output.scheduled_time + 0.1


class _Observer:
    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def on_step(self, message, _replica: int = 0) -> None:
        if message.stats is not None:
            self._seen.append(message)
