"""From options to a fleet: what they leave open."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from onbeat.cluster.config import FleetOptions
from onbeat.cluster.start import open_fleet
from onbeat.engine.config import EngineConfig
from onbeat.hub.files import ModelFiles
from onbeat.recording.fleet import read_header
from onbeat.scheduler.config import SchedulerLimits
from tests.fake_runner import build_fake_engine


@pytest.mark.parametrize(
    ("policy", "router"), [(None, "slo"), ("slo", "slo"), ("sarathi", "least-outstanding")]
)
def test_the_router_follows_the_policy_that_replicas_run(tmp_path, policy, router):
    record = tmp_path / "fleet.record"
    model = ModelFiles(kind="hf", path=tmp_path, name="tiny")
    engine = EngineConfig(model=model, limits=SchedulerLimits(policy=policy), record=record)
    with ExitStack() as stack:
        open_fleet(FleetOptions(replicas=2), engine, build_fake_engine, stack, on_progress=print)
    header = read_header(record)
    assert header is not None
    assert header["router"] == router
