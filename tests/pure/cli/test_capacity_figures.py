"""Figures of capacities."""

from __future__ import annotations

from math import inf

import pytest

from onbeat.cli.capacity_output import capacity_over_figure
from onbeat.planner.capacity import Capacity, SearchEnd


def make_capacity(rate: float, **labels: str) -> Capacity:
    return Capacity(
        labels=tuple(labels.items()),
        outcome=SearchEnd.FOUND if rate else SearchEnd.INFEASIBLE,
        rate=rate,
        interval=(rate * 0.9, inf if rate > 5 else rate * 1.1),
        num_devices=2,
        reason="P99 TBT 0.2 s > 0.1 s",
        repeats=(),
    )


CAPACITIES = [
    make_capacity(1.0, policy="sarathi", slo_tbt_ms="100"),
    make_capacity(6.0, policy="sarathi", slo_tbt_ms="50"),
    make_capacity(0.0, policy="orca", slo_tbt_ms="100"),
]


def test_lines_show_capacity_over_a_numeric_setting() -> None:
    figure = capacity_over_figure(CAPACITIES, "slo_tbt_ms")
    assert figure is not None
    sarathi, orca = figure["data"]
    assert (sarathi["x"], sarathi["y"]) == ([50.0, 100.0], [3.0, 0.5])
    assert orca["y"] == [0.0]
    assert sarathi["error_y"]["arrayminus"] == pytest.approx([0.3, 0.05])
    assert sarathi["error_y"]["array"] == pytest.approx([0.0, 0.05])
    assert figure["layout"]["xaxis"]["ticktext"] == ["50", "100"]
    assert capacity_over_figure(CAPACITIES, "policy") is None
