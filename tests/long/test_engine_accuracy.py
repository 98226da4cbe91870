"""Terms of engines against published times; `benchmarks.check.engine_accuracy` prints the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.check import engine_accuracy as accuracy
from benchmarks.check import engine_rows as rows
from benchmarks.check import engine_versions as versions
from onbeat.perfmodel.engines import BOUNDS, ENGINES, find_engine


def median(cases: list[Any], steps: object, **wanted: object) -> float:
    chosen = [
        np.abs(case.errors(steps))
        for case in cases
        if all(getattr(case.deployment, key) == value for key, value in wanted.items())
    ]
    assert chosen
    return float(np.median(np.concatenate(chosen)))


def test_held_back_deployments_are_met() -> None:
    fitted, held = rows.halves(rows.cases_of(rows.read_rows()))
    assert not {case.deployment for case in fitted} & {case.deployment for case in held}
    assert sum(len(case.rows) for case in (*fitted, *held)) == 1343
    dense = [case for case in held if not case.deployment.spec.is_moe]
    experts = [case for case in held if case.deployment.spec.is_moe]
    assert median(dense, accuracy.data_sheet) > 0.15
    assert median(dense, accuracy.of_package) <= 0.055
    for tensor in accuracy.DEGREES:
        assert median(dense, accuracy.of_package, tensor=tensor) <= 0.10, tensor
    for engine in ENGINES:
        assert median(dense, accuracy.of_package, engine=engine) <= 0.07, engine
    assert median(experts, accuracy.of_package) <= 0.12


def test_the_packages_terms_are_those_of_the_fit() -> None:
    fitted, _ = rows.halves(rows.cases_of(rows.read_rows()))
    for (engine, is_older), terms in accuracy.fit_all(fitted).items():
        own = find_engine(rows.OLDER[engine] if is_older else engine)
        assert {name: getattr(own, name) for name in BOUNDS} == pytest.approx(
            {name: getattr(terms, name) for name in BOUNDS}, rel=0.05
        ), (engine, is_older)


def test_the_host_time_of_a_row_of_the_newer_vllm_is_that_of_the_fit() -> None:
    seconds, error = versions.fit_row_seconds()
    assert find_engine("vllm").row_seconds == pytest.approx(seconds, rel=0.01)
    assert find_engine("vllm@0.6").row_seconds > seconds + 4 * error


def test_loads_that_no_fit_saw_are_met_twice_as_well_with_the_newer_terms() -> None:
    loads = versions.read_loads()
    for is_moe, most in ((False, 0.08), (True, 0.09)):
        some = [load for load in loads if load.spec.is_moe == is_moe]
        old, new = (
            np.abs(versions.errors(some, find_engine(name))).mean() for name in ("vllm@0.6", "vllm@0.20")
        )
        assert new <= most
        assert new < 0.6 * old
