"""The record of a fleet, and its replay."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from onbeat.cli.main import main
from onbeat.core.errors import ConfigError
from onbeat.recording.fleet_log import FleetRecording, fleet_record
from onbeat.simulator.replay.decisions import replay_fleet
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import FleetChange, FleetTimes
from tests.pure.simulator.loads import linear_time, make_config, random_load

CHANGES = (
    FleetChange(1.0, "kill", 0),
    FleetChange(2.0, "restart", 1),
    FleetChange(3.0, "scale", 4),
    FleetChange(6.0, "drain", 2),
)


ROUTERS = ["slo", "prefix-affinity", "round-robin", "least-outstanding"]


@cache
def recorded(router: str, num_requests: int = 200) -> bytes:
    """Return the record of a run of five seconds under a router."""
    config = make_config(
        "slo",
        replicas=3,
        router=router,
        seed=5,
        fleet_changes=CHANGES,
        fleet_times=FleetTimes(start_seconds=1.0, drain_seconds=1.0),
    )
    load = random_load(num_requests, rate=num_requests / 5, seed=3)
    names = {
        "router": router,
        "seed": config.seed,
        "fleet": {"drain_seconds": config.fleet_times.drain_seconds},
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.record"
        with fleet_record(path, names) as on_decision:
            result = simulate(load, config, linear_time(), on_decision=on_decision)
        assert result.num_completed == num_requests
        return path.read_bytes()


@pytest.fixture
def record(request, tmp_path):
    """Return where a copy lies that a test may damage; of the default router, unless others are asked for."""
    path = tmp_path / "fleet.record"
    path.write_bytes(recorded(getattr(request, "param", "slo")))
    return path


def lines(path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines()


def write(path, text: list[bytes]) -> None:
    path.write_bytes(gzip.compress(b"\n".join(text) + b"\n"))


@pytest.mark.parametrize("record", ROUTERS, indirect=True)
def test_every_decision_is_made_again(record):
    found = replay_fleet(FleetRecording(record))
    assert found.is_identical
    assert found.is_complete
    assert found.num_calls == len(lines(record)) - 2
    assert found.events["Lost"] == 1
    assert found.events["Arrived"] == 200
    assert found.actions["resumed"] + found.actions["waited"] > 0


@pytest.mark.parametrize("record", ROUTERS, indirect=True)
def test_another_decision_is_found(record):
    text = lines(record)
    index = next(i for i, line in enumerate(text) if b'"Send"' in line)
    call = json.loads(text[index])
    call["actions"][0]["replica"] = "r9"
    write(record, [*text[:index], json.dumps(call).encode(), *text[index + 1 :]])
    difference = replay_fleet(FleetRecording(record)).difference
    assert difference is not None
    assert difference.line == index + 1
    assert difference.recorded[0]["replica"] == "r9"


def test_a_record_that_was_cut_short_is_used_as_far_as_it_goes(record):
    write(record, lines(record)[:50])
    with pytest.raises(ConfigError, match="cut short"):
        replay_fleet(FleetRecording(record))
    found = replay_fleet(FleetRecording(record, allow_partial=True))
    assert (found.is_identical, found.is_complete, found.num_calls) == (True, False, 49)


@pytest.mark.parametrize(
    ("index", "line", "match"),
    [
        (0, b'{"file": "onbeat-fleet-record", "schema_version": 9}', "schema version 9"),
        (0, b'{"file": "onbeat-fleet-record", "schema_version": 2}', "no fleet can be made of its header"),
        (0, b'{"file": "other"}', "not the record of a fleet"),
        (3, b"oops", "line 4"),
        (3, b'{"now": 1.0, "event": {"kind": "Party"}, "actions": []}', "'Party'"),
    ],
)
def test_damaged_records_are_refused_by_line(record, index, line, match):
    text = lines(record)
    text[index] = line
    write(record, text)
    with pytest.raises(ConfigError, match=match):
        replay_fleet(FleetRecording(record))


@pytest.mark.parametrize("record", ROUTERS, indirect=True)
def test_the_command_replays_fleets(record, tmp_path, capsys):
    assert main(["replay", str(record), "--json", str(tmp_path / "found.json")]) == 0
    assert "decisions: identical" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_bytes())["is_identical"] is True
    assert main(["replay", str(record), "--device", "l4"]) != 0
