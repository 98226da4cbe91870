"""Capacities that are known on paper, found through the real scheduler and simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest

from onbeat.core.slo import SLO
from onbeat.planner.capacity import COARSE, CapacityTask, SearchEnd, combine_repeats, find_capacity
from onbeat.planner.cases import run_trial
from onbeat.planner.objectives import (
    VIDUR,
    Allowance,
    Measure,
    Objective,
    ShareObjective,
    Verdict,
    sarathi,
    scheduling_delays,
    verdict_of,
)
from onbeat.planner.search import SearchOptions
from onbeat.simulator.result import SimulationResult
from onbeat.workload.offered import OfferedLoad
from tests.pure.planner.fakes import FakeCase, Hearing, make_load, quiet


@dataclass(frozen=True)
class MeanDelay:
    """The mean wait stays below a limit: the quantity that queueing theory gives in closed form."""

    limit: float
    name: str = "mean-delay"

    def judge(self, result: SimulationResult) -> Verdict:
        mean = float(scheduling_delays(result.records).mean())
        return verdict_of((Measure(name="mean scheduling delay", value=mean, limit=self.limit),))

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        return ()


def make_task(
    case: FakeCase, load: OfferedLoad, objective: Objective, tolerance: float = 0.025
) -> CapacityTask:
    return CapacityTask(case=case, load=load, objective=objective, options=SearchOptions(tolerance=tolerance))


def test_finds_the_rate_at_which_a_fixed_server_falls_behind() -> None:
    # Request i waits i (D - 1 / R); the 99th percentile of n waits reaches 5 s at R = 1 / (D - 5 / (0.99 n)).
    n, service = 1000, 0.5
    expected = 1 / (service - 5 / (0.99 * (n - 1)))
    repeat = find_capacity(make_task(FakeCase(service), make_load(n), VIDUR, 0.005), quiet())
    assert repeat.bracket is not None
    assert repeat.bracket.low <= expected * 1.001
    assert repeat.bracket.high >= expected * 0.999
    assert repeat.bracket.high - repeat.bracket.low <= 0.005 * repeat.bracket.low


def test_finds_the_load_of_a_poisson_queue_with_fixed_service() -> None:
    # M/D/1: mean wait = rho D / (2 (1 - rho)); it reaches 1.5 D at rho = 0.75.
    repeats = [
        find_capacity(make_task(FakeCase(1.0), make_load(1500, seed=seed), MeanDelay(1.5)), quiet())
        for seed in range(3)
    ]
    capacity = combine_repeats((), repeats)
    assert capacity.outcome is SearchEnd.FOUND
    assert capacity.rate == pytest.approx(0.75, rel=0.1)
    assert capacity.interval[0] <= 0.75 <= capacity.interval[1]
    assert capacity.rate_per_device == capacity.rate / 2
    assert "scheduling delay" in capacity.reason


def test_a_looser_objective_never_lowers_the_capacity() -> None:
    load, case = make_load(300, seed=1, output=20), FakeCase(0.01, 1e-4, max_num_seqs=8, token_budget=256)
    rates = []
    for tbt in (0.02, 0.03, 0.08):
        repeat = find_capacity(make_task(case, load, sarathi(tbt)), quiet())
        assert repeat.bracket is not None
        rates.append(repeat.bracket.low)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_is_the_same_every_time() -> None:
    task = make_task(FakeCase(0.5), make_load(300, seed=3), VIDUR)
    assert find_capacity(task, quiet()) == find_capacity(task, quiet())


def test_giving_up_early_changes_no_verdict() -> None:
    load = make_load(600, seed=5)
    for rate in (0.7, 0.95, 1.05, 2.0):
        verdicts = [
            run_trial(FakeCase(1.0), load.at_rate(rate), VIDUR, lambda: False, to_the_end=to_the_end)
            for to_the_end in (False, True)
        ]
        assert verdicts[0].is_met is verdicts[1].is_met


def test_says_why_even_a_lone_request_misses() -> None:
    load = make_load(100, seed=0, prompt=1024, slo=SLO(ttft=2.0))
    repeat = find_capacity(make_task(FakeCase(1.0), load, ShareObjective()), quiet())
    capacity = combine_repeats((), [repeat])
    assert capacity.outcome is SearchEnd.INFEASIBLE
    assert capacity.rate == 0
    assert " 8.000 s" in capacity.reason  # 1024 tokens in steps of 128


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (FakeCase(error="the weights take 141.2 GB"), "141.2 GB"),
        (FakeCase(num_blocks=4), "do not fit a context of 64 tokens"),
        (FakeCase(policy="orca"), "least max_model_len"),
    ],
    ids=["memory", "length", "policy"],
)
def test_a_case_that_cannot_run_is_infeasible(case: FakeCase, message: str) -> None:
    repeat = find_capacity(make_task(case, make_load(10), VIDUR), quiet())
    capacity = combine_repeats((("policy", "x"),), [repeat])
    assert capacity.outcome is SearchEnd.INFEASIBLE
    assert message in capacity.reason


def test_too_short_a_load_is_unbounded() -> None:
    repeat = find_capacity(make_task(FakeCase(0.01), make_load(20), VIDUR), quiet())
    capacity = combine_repeats((), [repeat])
    assert capacity.outcome is SearchEnd.UNBOUNDED
    assert capacity.interval[1] == inf


def test_an_interrupted_search_keeps_its_bracket() -> None:
    task = make_task(FakeCase(0.5), make_load(300, seed=0), VIDUR)
    heard = Hearing(most_events=3)
    repeat = find_capacity(task, heard.context)
    assert repeat.bracket is not None
    assert not repeat.bracket.is_finished
    assert heard.is_stop_wanted
    capacity = combine_repeats((), [repeat, None])
    assert capacity.outcome is SearchEnd.INTERRUPTED
    assert capacity.values["outcome"] == "interrupted"


def test_a_case_that_did_not_run_is_interrupted() -> None:
    capacity = combine_repeats((), [None])
    assert capacity.outcome is SearchEnd.INTERRUPTED
    assert capacity.reason


def test_one_infeasible_repeat_makes_the_case_infeasible() -> None:
    good = find_capacity(make_task(FakeCase(0.5), make_load(300), VIDUR), quiet())
    bad = find_capacity(make_task(FakeCase(error="too big"), make_load(300), VIDUR), quiet())
    assert combine_repeats((), [good, bad]).outcome is SearchEnd.INFEASIBLE


def test_a_saved_capacity_has_plain_values() -> None:
    repeat = find_capacity(make_task(FakeCase(0.5), make_load(200), VIDUR), quiet())
    saved = combine_repeats((("policy", "sarathi"),), [repeat]).values
    assert saved["case"] == {"policy": "sarathi"}
    assert saved["resolved"]["max_num_batched_tokens"] == 128
    assert saved["request_rate_per_gpu"] == saved["request_rate"] / 2
    assert all(np.isfinite(trial.rate) for trial in saved["repeats"][0].bracket.trials)


def test_a_first_answer_is_halved_further_and_tells_other_repeats_where_to_look() -> None:
    task = make_task(FakeCase(0.5), make_load(400, seed=0), VIDUR)
    whole = find_capacity(task, quiet())
    first = find_capacity(replace(task, is_coarse=True), quiet())
    assert first.bracket is not None
    assert whole.bracket is not None
    assert first.bracket.high - first.bracket.low <= COARSE * first.bracket.low
    fine = find_capacity(replace(task, near=first.bracket), quiet())
    assert fine.bracket is not None
    assert first.bracket.low <= fine.bracket.low < fine.bracket.high <= first.bracket.high
    assert fine.bracket.high - fine.bracket.low <= task.options.tolerance * fine.bracket.low
    rates = [trial.rate for trial in fine.bracket.trials]
    assert len(rates) == len(set(rates))
    assert fine.reason.startswith("at "), "the numbers of a whole run"

    other = replace(task, load=make_load(400, seed=1))
    alone, near = (
        find_capacity(each, quiet()) for each in (other, replace(other, near=first.bracket, is_other=True))
    )
    assert alone.bracket is not None
    assert near.bracket is not None
    assert near.bracket.low == pytest.approx(alone.bracket.low, rel=2 * task.options.tolerance)
    assert len(near.bracket.trials) <= len(alone.bracket.trials)
