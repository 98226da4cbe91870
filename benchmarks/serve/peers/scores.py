"""Which of several servers kept the most requests' objectives."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def best_server(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the server whose attainment is highest in the mean of the loads, then whose output is.

    Of a load with two kinds of prompts the short ones count, as in the comparison.
    """
    names: list[str] = list(dict.fromkeys(run["server"] for run in runs))

    def score(name: str) -> tuple[float, float]:
        own = [run for run in runs if run["server"] == name]
        attainment = statistics.fmean(scored(run) for run in own)
        return attainment, statistics.fmean(run["output_throughput"] for run in own)

    return max(names, key=score)


def scored(run: Mapping[str, Any]) -> float:
    """Return the attainment that counts: of the short prompts where there are long ones beside them."""
    value = run["attainment"] if run["short"] is None else run["short"]["attainment"]
    return 0.0 if value is None else float(value)
