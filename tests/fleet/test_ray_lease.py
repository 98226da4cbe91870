"""A lease that an actor of Ray keeps: one holder, a record that is lost, calls that end in time."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onbeat.cluster import lease as leases
from onbeat.cluster.lease import LeaseRecord, LeaseTaken, RayLease, Tenure, open_lease
from onbeat.core.errors import ConfigError, MissingExtra
from tests.fleet.test_lease import ADDRESS, ends  # noqa: F401 -- a fixture
from tests.ray_actor import RayActor, ray_actor
from tests.waiting import until


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayActor]:
    monkeypatch.setattr(leases, "CALL_SECONDS", 30.0)  # another process starts meanwhile
    with ray_actor(tmp_path, monkeypatch) as started:
        started.age(60.0)
        yield started


def test_it_says_who_has_it_and_where(actor: RayActor) -> None:
    first = RayLease("keeper")
    assert first.read() is None
    first.write(LeaseRecord("a", ""))
    first.write(LeaseRecord("a", ADDRESS))
    second = RayLease("keeper")
    found, read = second.read(), first.read()
    assert found == read
    assert found is not None
    assert found[:2] == ("a", ADDRESS)
    second.write(LeaseRecord("b", ""))
    with pytest.raises(LeaseTaken):
        first.write(LeaseRecord("a", ADDRESS))
    read = first.read()
    assert read is not None
    assert read.holder == "b"


def test_a_lost_record_is_written_again_by_its_keeper_alone(actor: RayActor) -> None:
    keeper = RayLease("keeper")
    assert keeper.read() is None
    keeper.write(LeaseRecord("a", ADDRESS))
    other = RayLease("keeper")
    assert other.read() is not None
    actor.start_again()
    with pytest.raises(OSError, match="its keeper may live"):
        other.read()
    with pytest.raises(LeaseTaken):  # what it has read is of the time before
        other.write(LeaseRecord("b", ""))
    found = keeper.read()
    assert found is not None
    assert found[:2] == ("a", ADDRESS)
    keeper.write(LeaseRecord("a", ADDRESS))
    found = other.read()
    assert found is not None
    assert found.holder == "a"

    actor.start_again()  # and now the keeper is gone
    actor.age(15.0)
    assert other.read() is None
    other.write(LeaseRecord("b", ""))
    found = keeper.read()
    assert found is not None
    assert found.holder == "b"
    actor.start_again()
    with pytest.raises(OSError, match="its keeper may live"):
        keeper.read()  # it is not the keeper any more


def test_one_that_was_given_back_is_nobodys(actor: RayActor) -> None:
    keeper = RayLease("keeper")
    assert keeper.read() is None
    keeper.write(LeaseRecord("a", ADDRESS))
    keeper.write(LeaseRecord("", ""))
    actor.start_again()
    with pytest.raises(OSError, match="its keeper may live"):
        keeper.read()


def test_calls_end_in_time(actor: RayActor, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = RayLease("keeper")
    assert lease.read() is None
    lease.write(LeaseRecord("a", ""))
    monkeypatch.setattr(leases, "CALL_SECONDS", 0.2)
    actor.answers.clear()
    for _ in range(2):
        asked = time.monotonic()
        with pytest.raises(OSError, match="does not answer"):
            lease.write(LeaseRecord("a", ADDRESS))
        assert time.monotonic() - asked < 2
    monkeypatch.setattr(leases, "CALL_SECONDS", 30.0)
    actor.answers.set()
    found = lease.read()  # and not the answer to what was asked before
    assert found is not None
    assert found[:2] == ("a", ADDRESS)


def test_another_process_speaks_with_ray_after_the_death_of_one(actor: RayActor) -> None:
    others = {child.pid for child in multiprocessing.active_children()}
    lease = RayLease("keeper")
    assert lease.read() is None
    (before,) = (child for child in multiprocessing.active_children() if child.pid not in others)
    before.kill()
    with pytest.raises(OSError, match="does not answer"):
        lease.read()
    assert lease.read() is None


async def test_an_election(actor: RayActor, ends: list[int], monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(leases, "LEASE_SECONDS", 60.0)
    tenures = [Tenure(RayLease("keeper"), name) for name in "ab"]
    await asyncio.gather(*(tenure.begin() for tenure in tenures))
    await until(lambda: all(tenure.found is not None for tenure in tenures))
    (keeper,) = (tenure for tenure in tenures if tenure.is_mine)
    (other,) = (tenure for tenure in tenures if not tenure.is_mine)
    for _ in range(3):
        actor.start_again()
        await until(lambda: actor.record is not None)
    assert [tenure.is_mine for tenure in (keeper, other)] == [True, False]
    assert not ends
    await keeper.close()
    await until(lambda: bool(ends))
    assert other.found is not None
    assert other.found.holder == other.name  # its process ends, for a keeper to come
    await other.close()


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(name='ray')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(leases, "CALL_SECONDS", 30.0)
    with pytest.raises(MissingExtra, match=r"onbeat\[cluster\]"):
        RayLease("keeper").read()


@pytest.mark.parametrize("text", ["etcd:keeper", "ray", "ray:", ""])
def test_what_names_no_lease(text: str) -> None:
    with pytest.raises(ConfigError, match="names no lease"):
        open_lease(text)
