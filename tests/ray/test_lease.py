"""A keeper's lease that a cluster of Ray keeps."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.cluster.lease import LEASE_SECONDS, LeaseRecord, LeaseTaken, RayLease
from tests.cpu.e2e.program import serving
from tests.cpu.e2e.test_death import STAND_IN_FLAGS, Stream, text_of
from tests.ray.conftest import RayCluster, ray_cluster_of
from tests.waiting import wait_for


@pytest.fixture
def cluster(network: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    with ray_cluster_of(num_cpus=1) as started:
        monkeypatch.setenv("RAY_ADDRESS", started.address)
        yield started


def why_not(lease: RayLease) -> str:
    """Return why it cannot be read; Ray says first that it has restarted the actor."""
    try:
        lease.read()
    except OSError as error:
        return str(error)
    return ""


def answers(lease: RayLease, holder: str | None) -> bool:
    """Return whether it says that somebody has it; None is nobody."""
    try:
        found = lease.read()
    except OSError:
        return False
    return (found and found.holder) == holder


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray leaves a file open
@pytest.mark.slow  # a lease lasts for 15 s, and an actor starts twice
def test_it_outlives_its_actor_and_the_head(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    keeper, other = RayLease("keeper"), RayLease("keeper")
    began = time.monotonic()
    wait_for(lambda: answers(keeper, None))
    assert time.monotonic() - began > LEASE_SECONDS - 5  # the cluster may have had one before
    keeper.write(LeaseRecord("a", "there"))
    wait_for(lambda: answers(other, "a"))
    keeper.write(LeaseRecord("a", "here"))
    with pytest.raises(LeaseTaken):
        other.write(LeaseRecord("b", ""))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address=cluster.address, namespace="onbeat", log_to_driver=False)
    try:
        ray.kill(ray.get_actor("keeper"), no_restart=False)
        wait_for(lambda: "its keeper may live" in why_not(other), 10)
        wait_for(lambda: answers(keeper, "a"), 3)
        keeper.write(LeaseRecord("a", "again"))
        found = other.read()
        assert found is not None
        assert found[:2] == ("a", "again")

        ray.kill(ray.get_actor("keeper"))  # for good: another one is made
        wait_for(lambda: "its keeper may live" in why_not(other), 10)
        wait_for(lambda: answers(keeper, "a"), 3)
        keeper.write(LeaseRecord("a", "again"))
        wait_for(lambda: answers(other, "a"))
    finally:
        ray.shutdown()

    cluster.cluster.head_node.kill_gcs_server()
    for _ in range(5):
        assert answers(keeper, "a")
        keeper.write(LeaseRecord("a", "again"))
        time.sleep(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray leaves a file open
@pytest.mark.slow  # a lease lasts for 15 s
def test_streams_outlive_the_machine_with_the_keeper(smollm2_gguf: Path, cluster: RayCluster) -> None:
    flags = (smollm2_gguf, *STAND_IN_FLAGS, "--keeper-lease", "ray:keeper")
    with (
        serving(*flags, "--keeper-address", "127.0.0.1") as first,
        serving(*flags, "--keeper-address", "127.0.0.1") as second,
    ):
        assert any("the keeper is on another machine" in line for line in second.lines)
        whole = text_of(Stream(first.url, max_tokens=3500, temperature=0).end(60))
        stream = Stream(second.url, max_tokens=3500, temperature=0)
        stream.wait_until_flowing()
        for pid in (first.process.pid, *first.keepers):
            os.kill(pid, signal.SIGKILL)
        assert text_of(stream.end(90)) == whole
        assert any("another goes on" in line for line in second.lines)
