"""Simulated jobs: calls come in order, prompts are cached, and deadlines are shared out."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.metrics.jobs import JobSummary
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.workload.job import Call, Job
from onbeat.workload.job_kinds import draw_jobs, job_load, summarise_calls
from onbeat.workload.offered import OfferedLoad

FIRST = Call(input_tokens=320, output_tokens=32)


def run(load: OfferedLoad, **settings: object) -> SimulationResult:
    own = {"model": "meta-llama/Llama-3.1-8B", "device": "a100-80-sxm", **settings}
    simulation = resolve(make(Deployment, **own))
    return simulate(load, simulation.config, simulation.step_time)


def kinds(load: OfferedLoad, result: SimulationResult) -> dict[str, JobSummary]:
    assert load.jobs is not None
    return summarise_calls(load.jobs, {int(each.request_id): each for each in result.records})


def test_a_call_comes_after_those_that_it_needs_and_its_think_time() -> None:
    calls = (
        FIRST,
        Call(input_tokens=16, output_tokens=8, think=0.5, continues=0),
        Call(input_tokens=16, output_tokens=64),
        Call(input_tokens=16, output_tokens=8, think=0.25, quotes=(1, 2)),
    )
    load = job_load("jobs", [Job(calls=calls, start=1.0)], np.array([1.0]))
    first, second, other, last = run(load).records
    assert first.arrival == other.arrival == 1.0
    assert second.arrival == pytest.approx(first.end + 0.5)
    assert last.arrival == pytest.approx(max(second.end, other.end) + 0.25)
    # Prompt and answer of the call that it continues, in whole blocks; an answer's last token has no KV.
    assert second.num_cached_tokens == 336


@pytest.mark.parametrize("settings", [{}, {"replicas": 2}, {"max_concurrency": 1}])
def test_all_calls_of_all_jobs_come_once(settings: dict[str, object]) -> None:
    jobs = draw_jobs("map-reduce", 5, np.random.default_rng(0), deadline=75.0)
    load = job_load("map-reduce", jobs, np.linspace(0.0, 2.0, 5))
    result = run(load, **settings)
    assert [int(each.request_id) for each in result.records] == list(range(len(load)))
    assert kinds(load, result)["map-reduce"].attainment == 1.0


def test_a_call_gets_its_share_of_the_time_that_is_left() -> None:
    chain = [FIRST] + [Call(input_tokens=16, output_tokens=32, continues=i) for i in range(3)]
    load = job_load("jobs", [Job(calls=tuple(chain), deadline=8.0)], np.zeros(1))
    records = run(load).records
    shares = [each.slo.e2e for each in records if each.slo is not None and each.slo.e2e is not None]
    assert len(shares) == 4
    assert shares[0] < shares[1] < shares[2] < shares[3], "the job is quick, and what it saved is shared"
    assert shares[3] == pytest.approx(8.0 - records[3].arrival), "the last call may take all that is left"


def test_a_job_whose_call_is_refused_sends_no_more() -> None:
    chain = (FIRST, Call(input_tokens=16, output_tokens=32, continues=0))
    load = job_load("jobs", [Job(calls=chain)] * 40, np.zeros(40))
    result = run(load, max_num_queued_reqs=4, max_num_seqs=4)
    summary = kinds(load, result)["job"]
    assert summary.lost > 0
    num_refused = sum(each.finish_reason == "rejected" for each in result.records)
    assert num_refused == summary.lost
    assert len(result.records) == len(load) - sum(
        each.finish_reason == "rejected" and int(each.request_id) % 2 == 0 for each in result.records
    )


def test_a_job_past_its_deadline_sends_no_more() -> None:
    chain = (FIRST, Call(input_tokens=16, output_tokens=32, continues=0))
    load = job_load("jobs", [Job(calls=chain, deadline=0.05)], np.zeros(1))
    result = run(load)
    assert len(result.records) == 1
    assert kinds(load, result)["job"].lost == 1


def test_calls_without_a_deadline_keep_their_own_objectives() -> None:
    load = job_load("jobs", [Job(calls=(FIRST,), deadline=inf)], np.zeros(1))
    assert run(load).records[0].slo is None
    jobs = job_load("jobs", [Job(calls=(FIRST,), deadline=5.0)], np.zeros(1))
    slo = run(jobs).records[0].slo
    assert slo == SLO(e2e=5.0)
