"""Who has a lease: taken, renewed, left, given back; and the end of a keeper that cannot renew it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onbeat.cluster import lease as leases
from onbeat.cluster.lease import KubernetesLease, LeaseRecord, LeaseTaken, Tenure, keeper_endpoint, open_lease
from onbeat.core.errors import ConfigError
from tests.kubernetes_api import LeaseServer, lease_server
from tests.waiting import until

ADDRESS = "tcp://10.0.0.1:7000"


class Shared:
    """What several leases of this process have in common."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.lock = threading.Lock()


class MemoryLease:
    """A lease in this process; `fails` has all calls fail."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._read, self.fails = shared, "", False

    def read(self) -> LeaseRecord | None:
        self._check()
        record = self._shared.record
        self._read = "" if record is None else record.version
        return record

    def write(self, record: LeaseRecord) -> None:
        self._check()
        with self._shared.lock:
            known = self._shared.record.version if self._shared.record else ""
            if known != self._read:
                raise LeaseTaken
            self._shared.record = record._replace(version=str(int(known or 0) + 1))

    def _check(self) -> None:
        if self.fails:
            raise OSError("nobody answers")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals by which tenures would have ended this process; times are short."""
    found: list[int] = []
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(leases, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(os, "kill", lambda _, number: found.append(number))
    return found


async def test_one_takes_it_and_another_hears_where_it_is(ends: list[int]) -> None:
    shared = Shared()
    first, second = (Tenure(MemoryLease(shared), name) for name in ("a", "b"))
    heard: list[LeaseRecord] = []
    second.on_found = heard.append
    await first.begin()
    await second.begin()
    assert first.is_mine
    assert not second.is_mine
    first.tell(ADDRESS)
    await until(lambda: heard and heard[-1].address == ADDRESS)
    assert heard[-1].holder == "a"
    await asyncio.sleep(1)  # twice as long as others wait for one that is not renewed
    assert first.is_mine
    assert not second.is_mine
    assert not ends
    for each in (second, first):
        await each.close()
    assert shared.record is not None
    assert not shared.record.holder


async def test_one_that_is_not_renewed_is_taken_later_and_no_sooner(ends: list[int]) -> None:
    shared = Shared()
    gone, other = MemoryLease(shared), Tenure(MemoryLease(shared), "b")
    gone.read()
    gone.write(LeaseRecord("a", ADDRESS))
    await other.begin()
    began = asyncio.get_running_loop().time()
    await until(lambda: bool(ends))
    assert asyncio.get_running_loop().time() - began > 0.45
    assert ends[0] == signal.SIGKILL  # the next process here is a keeper
    assert other.is_mine
    await other.close()


async def test_one_that_is_given_back_is_taken_at_once(ends: list[int]) -> None:
    shared = Shared()
    first, second = (Tenure(MemoryLease(shared), name) for name in ("a", "b"))
    await first.begin()
    await first.close()
    await second.begin()
    assert second.is_mine
    await second.close()


async def test_a_keeper_that_finds_another_in_its_place_ends(ends: list[int], caplog: Any) -> None:
    shared = Shared()
    tenure, other = Tenure(MemoryLease(shared), "a"), MemoryLease(shared)
    await tenure.begin()
    other.read()
    other.write(LeaseRecord("b", ADDRESS))
    await until(lambda: bool(ends))
    assert "held by b" in caplog.text
    await tenure.close()
    assert shared.record is not None
    assert shared.record.holder == "b"  # who has lost it gives nothing back


async def test_who_cannot_reach_it_says_so_and_goes_on(ends: list[int], caplog: Any) -> None:
    lease = MemoryLease(Shared())
    lease.fails = True
    tenure = Tenure(lease, "a")
    beginning = asyncio.create_task(tenure.begin())
    await until(lambda: "nothing starts: nobody answers" in caplog.text)
    lease.fails = False
    await beginning
    lease.fails = True
    await until(lambda: "this keeper ends if that lasts" in caplog.text)
    lease.fails = False
    await asyncio.sleep(0.1)
    assert not ends
    await tenure.close()


STANDING_STILL = """
import asyncio, time
from onbeat.cluster import lease
from tests.fleet.test_lease import MemoryLease, Shared
lease.RENEW_SECONDS = 1.0
async def main():
    tenure = lease.Tenure(MemoryLease(Shared()), "a")
    await tenure.begin()
    {meanwhile}
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "meanwhile", ["time.sleep(30)", "tenure._lease.fails = True; await asyncio.sleep(30)"]
)
def test_the_kernel_ends_a_keeper_that_does_not_renew_it(meanwhile: str) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", STANDING_STILL.format(meanwhile=meanwhile)], cwd=root, timeout=20, check=False
    )
    assert ended.returncode == -signal.SIGALRM


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaseServer]:
    pytest.importorskip("kubernetes", reason="pip install 'onbeat[kubernetes]'")
    with lease_server(tmp_path) as (server, config):
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
        yield server


def test_a_lease_of_kubernetes_says_who_has_it_and_where(api: LeaseServer) -> None:
    lease = KubernetesLease("chat", "keeper")
    assert lease.read() is None
    lease.write(LeaseRecord("a", ""))
    found = lease.read()
    assert found is not None
    assert found[:2] == ("a", "")
    lease.write(LeaseRecord("a", ADDRESS))
    kept = api.leases["chat/keeper"]
    assert kept["metadata"]["annotations"] == {"onbeat/keeper-address": ADDRESS}
    assert kept["spec"]["holderIdentity"] == "a"
    assert kept["spec"]["leaseDurationSeconds"] == 15
    assert kept["spec"]["acquireTime"] < kept["spec"]["renewTime"]
    other = KubernetesLease("chat", "keeper")
    assert other.read() == LeaseRecord("a", ADDRESS, kept["metadata"]["resourceVersion"])
    other.write(LeaseRecord("b", ""))
    assert api.leases["chat/keeper"]["spec"]["leaseTransitions"] == 1


def test_of_two_that_write_at_once_one_has_it(api: LeaseServer) -> None:
    for _ in range(2):  # there is none yet; there is one
        first, second = (KubernetesLease("chat", "keeper") for _ in range(2))
        first.read()
        second.read()
        second.write(LeaseRecord("b", ""))
        with pytest.raises(LeaseTaken):
            first.write(LeaseRecord("a", ""))
    assert api.leases["chat/keeper"]["spec"]["holderIdentity"] == "b"


def test_what_is_wrong_with_a_lease_of_kubernetes(api: LeaseServer) -> None:
    lease = KubernetesLease("elsewhere", "keeper")
    assert lease.read() is None
    with pytest.raises(OSError, match="answers 404"):
        lease.write(LeaseRecord("a", ""))
    api.refuses = 403
    with pytest.raises(ConfigError, match="get, create and update leases"):
        lease.read()
    api.refuses = 503
    with pytest.raises(OSError, match="answers 503"):
        lease.read()


@pytest.mark.parametrize(
    "text", ["etcd:keeper", "kubernetes", "kubernetes:", "kubernetes:keeper", "kubernetes:/a", ""]
)
def test_what_names_no_lease(text: str) -> None:
    with pytest.raises(ConfigError, match="names no lease"):
        open_lease(text)


def test_where_a_keeper_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeper_endpoint("10.1.2.3") == "tcp://10.1.2.3:*"
    assert keeper_endpoint("10.1.2.3:7000") == "tcp://10.1.2.3:7000"
    assert keeper_endpoint("[fd00::1]:7000") == "tcp://[fd00::1]:7000"
    for wrong in ("10.1.2.3:x", "no.such.host.invalid", "10.1.2.3:99999"):
        with pytest.raises(ConfigError, match="is no address"):
            keeper_endpoint(wrong)
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(ConfigError, match="give --keeper-address"):
        keeper_endpoint(None)
