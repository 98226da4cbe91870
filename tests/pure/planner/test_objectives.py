"""Named objectives: what they measure, what binds, what they refuse."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cli.answers import promise_text
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.metrics.distribution import percentile
from onbeat.planner.cases import MissCounter, ObjectiveMissed
from onbeat.planner.objectives import (
    OBJECTIVES,
    SHARES,
    VIDUR,
    Objective,
    ShareObjective,
    Verdict,
    allowed_above,
    parse_objective,
    sarathi,
)
from onbeat.simulator.simulate import simulate
from onbeat.workload.job import Call, Job
from onbeat.workload.job_kinds import job_load
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from tests.pure.planner.fakes import make_load, make_record, make_result
from tests.pure.simulator.loads import ShapeTime, make_config


def test_sarathi_pools_all_gaps() -> None:
    steady = [make_record(np.arange(1, 102) * 0.1) for _ in range(9)]
    stalled = make_record([*np.arange(1, 91) * 0.1, *(9 + np.arange(1, 12) * 0.5)])
    verdict = sarathi(0.2).judge(make_result([*steady, stalled]))  # 11 of 1000 gaps are long
    assert not verdict.is_met
    assert "P99 TBT 500.0 ms > 200.0 ms" in verdict.reason
    assert sarathi(0.6).judge(make_result([*steady, stalled])).is_met


def test_sarathi_limits_the_median_scheduling_delay() -> None:
    records = [make_record([9.0, 9.1], scheduled=delay) for delay in (0.0, 2.5, 3.0)]
    verdict = sarathi(1.0).judge(make_result(records))
    assert not verdict.is_met
    assert verdict.reason.endswith("scheduling delay 2.500 s > 2.000 s")


def test_vidur_refuses_the_limit_itself() -> None:
    at_limit = make_result([make_record([9.0], scheduled=5.0)])
    assert not VIDUR.judge(at_limit).is_met
    assert VIDUR.judge(make_result([make_record([9.0], scheduled=4.99)])).is_met


def test_a_request_that_never_ran_has_an_infinite_delay() -> None:
    verdict = VIDUR.judge(make_result([make_record([1.0]), make_record([1.0], scheduled=None)]))
    assert not verdict.is_met
    assert verdict.measures[0].value == float("inf")


@pytest.mark.parametrize(("num_good", "is_met"), [(9, True), (8, False)])
def test_attainment_counts_good_requests(num_good: int, is_met: bool) -> None:
    slo = SLO(ttft=1.0, tbt=0.1)
    good = [make_record([0.5, 0.55, 0.6], slo=slo) for _ in range(num_good)]
    late = [make_record([1.5, 1.55, 1.6], slo=slo) for _ in range(10 - num_good)]
    verdict = ShareObjective(share=0.9).judge(make_result(good + late))
    assert verdict.is_met is is_met
    assert f"TTFT met by {num_good * 10:.2f} %" in verdict.reason


def test_distserve_judges_the_mean_gap_where_attainment_sees_the_stall() -> None:
    stalled = make_record([0.5, *(0.5 + np.arange(1, 50) * 0.05), 4.0], slo=SLO(ttft=1.0, tbt=0.1))
    result = make_result([stalled])
    assert ShareObjective(share=1.0, is_joint=True).judge(result).is_met
    assert not ShareObjective(share=1.0, mode="gap").judge(result).is_met


def test_both_objectives_must_be_met_by_the_same_request() -> None:
    slo = SLO(ttft=1.0, tbt=0.1)
    late_start = [make_record([2.0, 2.05, 2.1], slo=slo) for _ in range(8)]
    slow_stream = [make_record([0.5, 1.0, 1.5], slo=slo) for _ in range(8)]
    good = [make_record([0.5, 0.55, 0.6], slo=slo) for _ in range(84)]
    verdict = ShareObjective(share=0.9, is_joint=True).judge(make_result(late_start + slow_stream + good))
    assert verdict.measures[0].value == pytest.approx(0.84)  # 92 % meet each of the two
    assert not verdict.is_met


@pytest.mark.parametrize("name", [*OBJECTIVES, *SHARES])
def test_an_unfinished_run_misses_every_objective(name: str) -> None:
    result = make_result([make_record([0.1, 0.2], slo=SLO(ttft=1.0))], num_requests=3)
    verdict = parse_objective(name, tbt=1.0).judge(result)
    assert not verdict.is_met
    assert ": 1 of 3 requests" in verdict.reason


def test_parses_names_and_shares() -> None:
    assert parse_objective("sarathi", tbt=0.2) == sarathi(0.2)
    assert parse_objective("vidur") == VIDUR
    assert parse_objective("attainment:0.99", mode="gap") == ShareObjective(share=0.99, mode="gap")
    assert parse_objective("attainment").name == "attainment:0.9"
    assert parse_objective("distserve:0.5") == ShareObjective(share=0.5, is_joint=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sarati", "mean sarathi"),
        ("p99", "known are sarathi, vidur"),
        ("sarathi", "--slo-tbt-ms"),
        ("vidur:0.9", "takes no share"),
        ("attainment:most", "as attainment:0.9"),
        ("attainment:90", r"lie in \(0, 1\]"),
        ("attainment:nan", r"lie in \(0, 1\]"),
    ],
)
def test_says_what_is_wrong_with_a_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_objective(text)


def jobs_of(*deadlines: float) -> OfferedLoad:
    """Return jobs of two calls, one after the other, of 2 tokens each, that come together."""
    call = Call(input_tokens=10, output_tokens=2)
    jobs = [Job(calls=(call, replace(call, continues=0)), deadline=each) for each in deadlines]
    return job_load("jobs", jobs, np.zeros(len(jobs)))


def judged(load: OfferedLoad, share: float) -> Verdict:
    objective = ShareObjective(share=share).of(load)
    objective.allowances(load)
    return objective.judge(simulate(load, make_config(), ShapeTime(lambda shape: 1.0)))


def test_of_jobs_that_have_deadlines_alone_a_share_is_to_be_kept() -> None:
    load = jobs_of(100.0, 100.0, 100.0, 1.0)  # of the last one only the first call is sent
    assert judged(load, 0.75).is_met
    verdict = judged(load, 0.9)
    assert not verdict.is_met
    assert verdict.reason == "jobs kept 75.00 % < 90.00 % (0 late, 1 lost)"
    assert promise_text(ShareObjective(share=0.9).of(load), {}) == "keep the deadlines of 90 % of the jobs"
    with pytest.raises(ConfigError, match="--job-deadline-ms"):
        judged(jobs_of(inf), 0.9)


def test_calls_of_jobs_that_never_came_are_not_good() -> None:
    load = jobs_of(100.0, 100.0, 100.0, 1.0).with_classes((SLOClass(name="own", slo=SLO(ttft=50.0)),), seed=0)
    assert judged(load, 0.75).is_met  # six of eight calls
    assert not judged(load, 0.8).is_met


def test_a_share_of_requests_without_objectives_is_refused() -> None:
    with pytest.raises(ConfigError, match="--slo-ttft-ms"):
        ShareObjective().allowances(make_load(5))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300), st.sampled_from([50, 90, 99]))
def test_more_than_the_allowed_values_push_a_percentile_above_the_limit(values: list[float], p: int) -> None:
    limit = 5.0
    num_above = sum(value > limit for value in values)
    if num_above > allowed_above(len(values), p):
        assert percentile(values, p) > limit


@pytest.mark.parametrize(
    "objective",
    [sarathi(0.2), VIDUR, ShareObjective(), ShareObjective(is_joint=True)],
    ids=lambda objective: objective.name,
)
def test_a_run_that_is_given_up_would_have_missed_its_objective(objective: Objective) -> None:
    slo, rng, num_given_up = SLO(ttft=1.0, tbt=0.2), np.random.default_rng(0), 0
    for _ in range(60):
        scale = rng.uniform(0.01, 0.3)
        records = []
        for _ in range(50):
            delay = rng.exponential(scale * 20)
            times = delay + np.cumsum(rng.exponential(scale, size=20))
            records.append(make_record(times, scheduled=delay, slo=slo))
        watch = MissCounter(objective.allowances(make_load(50, output=20, slo=slo)), 50, batch=5)
        try:
            for record in records:
                watch.on_finish(record)
        except ObjectiveMissed:
            num_given_up += 1
            assert not objective.judge(make_result(records)).is_met
    assert 0 < num_given_up < 60
