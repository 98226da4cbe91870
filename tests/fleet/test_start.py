"""From options to a fleet: what they leave open."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from onbeat.cluster import local_launcher
from onbeat.cluster.fleet_options import FleetOptions
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.cluster.start import open_fleet
from onbeat.core.errors import ConfigError
from onbeat.engine.engine_config import EngineConfig
from onbeat.hub.files import ModelFiles
from onbeat.recording.fleet_log import read_header
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.cluster.scaling import ScaleBounds
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.fake_runner import build_fake_engine
from tests.fleet.fleets import fleet_of

pytestmark = pytest.mark.usefixtures("comparators")


@pytest.mark.parametrize(
    ("policy", "router"), [(None, "slo"), ("slo", "slo"), ("sarathi", "least-outstanding")]
)
def test_the_router_follows_the_policy_that_replicas_run(tmp_path, policy, router):
    record = tmp_path / "fleet.record"
    model = ModelFiles(kind="hf", path=tmp_path, name="tiny")
    engine = EngineConfig(model=model, limits=SchedulerLimits(policy=policy), record=record)
    with ExitStack() as stack:
        open_fleet(
            FleetOptions(fleet=FleetConfig(replicas=2)), engine, build_fake_engine, stack, on_progress=print
        )
    header = read_header(record)
    assert header is not None
    assert header["router"] == router


@pytest.mark.parametrize(
    ("num_replicas", "bounds"), [(9, None), (1, ScaleBounds(1, 9))], ids=["replicas", "autoscale"]
)
async def test_what_has_no_room_is_not_started(
    monkeypatch: pytest.MonkeyPatch, num_replicas: int, bounds: ScaleBounds | None
) -> None:
    monkeypatch.setattr(local_launcher, "usable_cores", lambda: 1)
    launcher = LocalLauncher()
    autoscale = "" if bounds is None else "freeness"
    client = fleet_of(num_replicas, bounds=bounds, autoscale=autoscale, launcher=launcher)
    with pytest.raises(ConfigError, match=r"9 .* 8 .*cores: 1"):
        await client.start()
    assert client.controller.lives == {}, "the first one ends too"


def test_each_device_has_room_for_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launcher, "usable_cores", lambda: 64)
    capacity = LocalLauncher(devices=["0", "1"]).capacity()
    assert capacity == (2, "CUDA devices: 2")


@pytest.mark.parametrize(
    ("policy", "given", "bound"),
    [("slo", None, 60.0), ("slo", 5.0, 5.0), ("slo", 0.0, None), ("sarathi", None, None)],
)
def test_requests_wait_for_a_start_as_long_as_for_their_turn(tmp_path, policy, given, bound):
    limits = SchedulerLimits(policy=policy, max_queue_seconds=given)
    engine = EngineConfig(model=ModelFiles(kind="hf", path=tmp_path, name="tiny"), limits=limits)
    with ExitStack() as stack:
        client = open_fleet(FleetOptions(), engine, build_fake_engine, stack, on_progress=print)
    assert client._fleet._rules.max_wait_seconds == bound
