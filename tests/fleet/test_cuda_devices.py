"""Which CUDA devices each replica of a machine gets. None is needed: the driver is a fake one."""

from __future__ import annotations

import os
from functools import partial

import pytest

from onbeat.cluster import start
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.cluster.start import share_devices
from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.scheduler.cluster.events import ScaleAsked
from tests.fake_runner import build_fake_engine
from tests.fleet.fleets import fleet_of, is_ready
from tests.waiting import until


@pytest.fixture
def four_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(start, "_num_devices", lambda: 4)


@pytest.mark.parametrize(
    ("device", "num_replicas", "devices"),
    [("cuda", 2, ["0", "1", "2", "3"]), ("auto", 4, ["0", "1", "2", "3"]), ("cuda:1", 2, []), ("cpu", 8, [])],
)
@pytest.mark.usefixtures("four_devices")
def test_each_replica_gets_a_device_of_its_own(device, num_replicas, devices):
    assert share_devices(device, num_replicas) == devices


@pytest.mark.usefixtures("four_devices")
def test_too_few_devices_are_said_with_what_fits():
    with pytest.raises(ConfigError, match=r"5 CUDA.*--replicas 4"):
        share_devices("cuda", 5)


@pytest.mark.parametrize(
    ("named", "devices"),
    [("2, 3", ["2", "3"]), ("GPU-1f,MIG-2e", ["GPU-1f", "MIG-2e"]), ("", []), ("1,-1,2", ["1"])],
)
@pytest.mark.usefixtures("four_devices")
def test_what_the_environment_hides_is_not_shared_out(monkeypatch, named, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert start.visible_devices() == devices


def test_a_machine_without_a_driver_has_none(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(start.ctypes, "CDLL", lambda _name: (_ for _ in ()).throw(OSError))
    assert share_devices("auto", 2) == []


def build_that_notes_its_devices(on_progress, *, folder, replica):
    (folder / replica).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    return build_fake_engine(on_progress)


async def test_processes_see_their_own_devices_and_a_replica_too_many_says_so(tmp_path, caplog):
    launcher = LocalLauncher(devices=["4", "6"])

    def make_build(replica, _life):
        return partial(build_that_notes_its_devices, folder=tmp_path, replica=replica)

    async with fleet_of(2, launcher=launcher, make_build=make_build) as client:
        await until(lambda: all(is_ready(client, each) for each in ("r0", "r1")))
        assert {path.read_text() for path in tmp_path.iterdir()} == {"4", "6"}
        with pytest.raises(InvalidRequest, match="CUDA devices: 2"):
            await client.scale(3)
        client.controller.ask(ScaleAsked(3))  # as where one that drains still has its devices
        await until(lambda: "r2 has got no CUDA device" in caplog.text)
