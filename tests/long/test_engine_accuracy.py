"""Terms of engines against published times; `benchmarks/engine_accuracy.py` prints the tables."""

from __future__ import annotations

from dataclasses import asdict
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onbeat.perfmodel.engines import BOUNDS, find_engine
from tests.long.scripts import load_script


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    return load_script("engine_accuracy")


def median(accuracy: ModuleType, cases: list[Any], steps: object, **wanted: object) -> float:
    chosen = [
        np.abs(case.errors(steps))
        for case in cases
        if all(getattr(case.deployment, key) == value for key, value in wanted.items())
    ]
    assert chosen
    return float(np.median(np.concatenate(chosen)))


def test_held_back_deployments_are_met(accuracy: ModuleType) -> None:
    fitted, held = accuracy.halves(accuracy.cases_of(accuracy.read_rows()))
    assert not {case.deployment for case in fitted} & {case.deployment for case in held}
    assert sum(len(case.rows) for case in (*fitted, *held)) == 1343
    dense = [case for case in held if not case.deployment.spec.is_moe]
    experts = [case for case in held if case.deployment.spec.is_moe]
    assert median(accuracy, dense, accuracy.data_sheet) > 0.15
    assert median(accuracy, dense, accuracy.of_package) <= 0.055
    for tensor in accuracy.DEGREES:
        assert median(accuracy, dense, accuracy.of_package, tensor=tensor) <= 0.10, tensor
    for engine in accuracy.ENGINES:
        assert median(accuracy, dense, accuracy.of_package, engine=engine) <= 0.07, engine
    assert median(accuracy, experts, accuracy.of_package) <= 0.15


def test_the_packages_terms_are_those_of_the_fit(accuracy: ModuleType) -> None:
    fitted, _ = accuracy.halves(accuracy.cases_of(accuracy.read_rows()))
    for engine, terms in accuracy.fit_all(fitted).items():
        own = asdict(find_engine(engine))
        assert {name: own[name] for name in BOUNDS} == pytest.approx(
            {name: getattr(terms, name) for name in BOUNDS}, rel=0.05
        ), engine
