"""The cheapest mixes of GPUs that two other solvers proved."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from onbeat.planner.mix_search import MixProblem, solve_mix
from tests.long.published import shared_data


def cases() -> list[Any]:
    path = shared_data() / "cases" / "gpu_mix_cases.json"
    loaded: list[Any] = json.loads(path.read_text())["cases"]
    return loaded


def test_costs_are_the_proven_ones() -> None:
    for case in cases():
        given = case["input"]
        gpus = given["gpu_info"].values()
        rates = np.array([np.ravel(gpu["tputs"]) for gpu in gpus])
        demand = given["total_request_rate"] * np.ravel(given["workload_distribution"])
        problem = MixProblem(
            costs=tuple(gpu["cost"] for gpu in gpus),
            loads=demand[:, None] / rates.T,
            slices=given["slice_factor"],
        )
        mix = solve_mix(problem)
        assert mix is not None
        assert np.dot(problem.costs, mix) == pytest.approx(case["expected_cost"]), case["name"]
