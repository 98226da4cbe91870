"""Terms of engines against published times; `benchmarks.check.engine_accuracy` prints the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.check import engine_accuracy as accuracy
from benchmarks.check import engine_first_tokens as first_tokens
from benchmarks.check import engine_rows as rows
from benchmarks.check import engine_versions as versions
from benchmarks.check import operators
from onbeat.perfmodel.device_spec import device_ids, find_device
from onbeat.perfmodel.engines import BOUNDS, ENGINES, find_engine
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import RooflineParameters, default_parameters


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
    assert median(dense, accuracy.data_sheet) <= 0.09
    assert median(dense, accuracy.of_package) <= 0.048
    for tensor in accuracy.DEGREES:
        assert median(dense, accuracy.of_package, tensor=tensor) <= 0.08, tensor
    for engine in ENGINES:
        assert median(dense, accuracy.of_package, engine=engine) <= 0.065, engine
    assert median(experts, accuracy.of_package) <= 0.11


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


@pytest.mark.parametrize(
    ("device", "is_moe", "most"),
    [
        ("h100-sxm", False, 0.04),
        ("h100-sxm", True, 0.04),
        ("a100-80-sxm", False, 0.06),
        ("l40s", False, 0.05),
    ],
)
def test_loads_that_no_fit_saw_are_met(device: str, is_moe: bool, most: float) -> None:
    some = [load for load in versions.read_loads() if load.device == device and load.spec.is_moe == is_moe]
    assert some
    assert np.abs(versions.errors(some, find_engine("vllm@0.20"))).mean() <= most


def test_first_tokens_of_a_newer_vllm_are_met_without_a_sign() -> None:
    loads = [
        load
        for load in versions.read_loads()
        if load.decoding < first_tokens.MOST_SEATS * first_tokens.SERVER.max_num_seqs and load.rate < 10
    ][1::2]
    errors = np.array([first_tokens.simulated(load).ttft / load.ttft - 1 for load in loads])
    assert len(errors) >= 8
    assert np.abs(errors).mean() <= 0.10
    assert abs(errors.mean()) <= 0.04
    assert errors.min() < 0 < errors.max()
    without = [first_tokens.simulated(load, request_overhead=0.0).ttft / load.ttft - 1 for load in loads]
    assert max(without) < 0


def test_what_kernels_reach_is_what_was_measured_of_them() -> None:
    for architecture, found in operators.by_architecture().items():
        device = next(d for d in map(find_device, device_ids()[:-1]) if d.architecture == architecture)
        wide, narrow = (default_parameters(device, Precision(compute=dtype)) for dtype in ("bf16", "fp8"))
        for field, value in found.items():
            own = getattr(narrow if "narrow" in field else wide, field.removeprefix("narrow "))
            assert own == pytest.approx(value, rel=0.04), (architecture, field)


def test_all_reduces_over_pcie_take_what_nccl_takes() -> None:
    ratios = []
    for kernel in operators.read_kernels():
        if kernel.operator == "all-reduce" and kernel.device in ("l40s", "rtx-pro-6000"):
            link = find_device(kernel.device).link(kernel.rows)
            assert link is not None
            crossing = 2 * (kernel.rows - 1) / kernel.rows * kernel.width
            share = RooflineParameters().link_efficiency
            ratios.append(np.log((link.start_seconds + crossing / share / link.bandwidth) / kernel.seconds))
    assert np.abs(ratios).max() < np.log(2.6)  # it was off by a factor of ten
    assert np.median(np.abs(ratios)) < np.log(1.25)
