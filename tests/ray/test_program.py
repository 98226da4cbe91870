"""`onbeat serve --launcher ray` as its user runs it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.e2e.program import ServerProgram, environment, is_running, run_program, serving
from tests.cpu.e2e.test_death import Stream, text_of
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.ray.conftest import RayCluster, ray_cluster_of
from tests.waiting import wait_for

FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--max-model-len", "32k"),
    *("--kv-cache-memory-bytes", "64M", "--threads", "1", "--launcher", "ray"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def own_cluster(network: None) -> Iterator[RayCluster]:
    """A cluster that a test may break."""
    with ray_cluster_of(num_cpus=2) as cluster:
        yield cluster


def replicas_of(server: ServerProgram) -> Any:
    return server.fleet()["replicas"]


def parent_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow  # two engines in actors
def test_streams_outlive_an_engine_and_nothing_outlives_the_server(
    ray_cluster: RayCluster, model: Path
) -> None:
    with serving(model, *FLAGS, "--ray-address", ray_cluster.address, "--replicas", "2") as server:
        fields = {"max_tokens": 400, "seed": 7, "temperature": 0.8, "presence_penalty": 0.5}
        whole = text_of(Stream(server.url, **fields).end())
        streams = [Stream(server.url, **fields) for _ in range(4)]
        for stream in streams:
            stream.wait_until_flowing()
        killed = max(replicas_of(server), key=lambda row: row["num_streaming"])["process_id"]
        os.kill(killed, signal.SIGKILL)
        assert [text_of(stream.end(60)) for stream in streams] == [whole] * 4
        wait_for(lambda: [row["state"] for row in replicas_of(server)] == ["ready"] * 2, timeout=60)
        endless = [Stream(server.url, max_tokens=30_000) for _ in range(2)]
        for stream in endless:
            stream.wait_until_flowing()
        engines = [row["process_id"] for row in replicas_of(server)]
        actors = [parent_of(engine) for engine in engines]
        server.send_signal(signal.SIGKILL)
        server.exit_code()
        wait_for(lambda: not any(map(is_running, [*engines, *actors])), timeout=5)


@pytest.mark.slow  # a cluster of its own
def test_serving_goes_on_while_the_head_is_gone(own_cluster: RayCluster, model: Path) -> None:
    flags = ("--ray-address", own_cluster.address, "--start-timeout", "60", "--fleet-port", "9377")
    with serving(model, *FLAGS, *flags) as server:
        whole = text_of(Stream(server.url, max_tokens=200, temperature=0).end())
        (engine,) = (row["process_id"] for row in replicas_of(server))
        stream = Stream(server.url, max_tokens=30_000)
        stream.wait_until_flowing()
        own_cluster.cluster.head_node.kill_gcs_server()
        gone = time.monotonic()
        server.change_fleet("scale", replicas=2)
        while time.monotonic() < gone + 30:
            assert text_of(Stream(server.url, max_tokens=200, temperature=0).end()) == whole
        rows = replicas_of(server)
        assert [(row["state"], row["num_lives"]) for row in rows] == [("ready", 1), ("starting", 0)]
        assert stream.error is None
        assert any("r1 waits" in x for x in server.lines)
        stopped = time.monotonic()
        server.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)  # at once
        server.exit_code(20)
        assert time.monotonic() - stopped < 15
        wait_for(lambda: not is_running(engine), timeout=5)


def test_an_address_where_nobody_answers_is_told_at_once(network: None, model: Path) -> None:
    pytest.importorskip("ray")
    started = time.monotonic()
    ended = run_program("serve", model, *FLAGS, "--port", "0", "--ray-address", "127.0.0.1:9")
    assert ended.returncode == 2
    told = "onbeat: error: the Ray cluster at 127.0.0.1:9 cannot be reached: Connection refused"
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - started < 20  # most of it imports


@pytest.mark.slow  # Ray tries for a while
def test_a_port_where_something_else_listens_is_told(network: None, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        ended = run_program("serve", model, *FLAGS, "--port", "0", "--ray-address", address, timeout=90)
    assert ended.returncode == 2
    assert f"the Ray cluster at {address} " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow  # Ray tries for a while
def test_a_wrong_token_is_told(ray_cluster: RayCluster, model: Path) -> None:
    env = environment(RAY_AUTH_TOKEN="wrong" * 8)
    flags = ("--port", "0", "--ray-address", ray_cluster.address)
    ended = run_program("serve", model, *FLAGS, *flags, env=env, timeout=90)
    assert ended.returncode == 2
    assert f"{ray_cluster.address} refuses" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, model: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(name='ray')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = environment(PYTHONPATH=path)
    ended = run_program("serve", model, *FLAGS, "--port", "0", env=env)
    assert ended.returncode == 2
    assert "'onbeat[cluster]'" in ended.stderr


def test_flags_of_ray_without_ray_are_refused(model: Path) -> None:
    ended = run_program("serve", model, "--ray-address", "auto")
    assert ended.returncode == 2
    assert "--launcher ray" in ended.stderr
