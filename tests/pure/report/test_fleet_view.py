"""A fleet in `onbeat top`."""

from __future__ import annotations

from rich.console import Console

from onbeat.metrics.exposition import ScrapeWindow, read_exposition
from onbeat.report.fleet_view import FleetRows, fleet_rows, fleet_table

ONE_REPLICA = """
onbeat_fleet_replicas{state="ready"} 1
onbeat_fleet_replicas{state="starting"} 1
onbeat_replica_lives{engine="r0"} 1
onbeat_replica_state{engine="r0",state="ready"} 1
"""
SCALING = """
onbeat_fleet_replicas_wanted 2
onbeat_fleet_replicas_min 1
onbeat_fleet_replicas_max 4
onbeat_fleet_load_share 0.9
onbeat_fleet_planned_share 0.85
onbeat_fleet_rescales_total{direction="up",why="work"} 2
onbeat_fleet_rescales_total{direction="up",why="late"} 1
onbeat_fleet_rescales_total{direction="down",why="spare"} 2
"""


def rows(text: str) -> FleetRows | None:
    return fleet_rows(ScrapeWindow(None, read_exposition(text), None))


def test_a_single_replica_is_shown_where_there_can_be_more() -> None:
    assert rows(ONE_REPLICA) is None
    found = rows(ONE_REPLICA + SCALING)
    assert found is not None
    assert found.scaling is not None
    assert (found.scaling.ups, found.scaling.downs) == (3, 2)
    console = Console(width=140, record=True)
    console.print(fleet_table(found))
    text = console.export_text()
    assert "1 ready  1 starting" in text
    assert "2 wanted of 1 to 4   load takes 90 % (planned 85 %)   3 up, 2 down" in text
