"""Requests that even an idle machine could not serve in time count neither way, if so asked."""

from __future__ import annotations

import pickle

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.planner.grid import HopelessOn, ReplicaCase
from onbeat.planner.share_objectives import AttainmentObjective
from onbeat.planner.trial import MissWatch, ObjectiveMissed
from onbeat.simulator.settings import ReplicaSettings
from onbeat.workload.slo_classes import SLOClass
from tests.pure.planner.fakes import make_record, make_result
from tests.pure.simulator.loads import make_load

STRICT = SLO(ttft=1.0, tbt=0.1)


def is_long(record) -> bool:
    return bool(record.num_prompt_tokens > 1000)


def records(num_good: int, num_late: int, num_long: int):
    good = [make_record([0.5, 0.55], slo=STRICT) for _ in range(num_good)]
    late = [make_record([1.5, 1.55], slo=STRICT) for _ in range(num_late)]
    long = [make_record([1.5, 1.55], slo=STRICT) for _ in range(num_long)]
    for record in long:
        record.num_prompt_tokens = 4000
    return [*good, *late, *long]


def test_they_leave_numerator_and_denominator():
    result = make_result(records(9, 1, 5))
    assert not AttainmentObjective(share=0.9).judge(result).is_met
    verdict = AttainmentObjective(share=0.9, is_hopeless=is_long).judge(result)
    assert verdict.is_met
    assert verdict.measures[0].value == 0.9
    assert verdict.reason.endswith("; 5 hopeless ones left out")
    assert not AttainmentObjective(share=0.9, is_hopeless=is_long).judge(make_result(records(8, 2, 5))).is_met


def test_a_run_of_hopeless_requests_alone_keeps_nothing():
    verdict = AttainmentObjective(is_hopeless=is_long).judge(make_result(records(0, 0, 3)))
    assert not verdict.is_met
    assert "an idle machine" in verdict.reason


def offered(num_short: int, num_long: int):
    load = make_load([100] * num_short + [4000] * num_long, [2] * (num_short + num_long))
    return load.with_classes([SLOClass(name="one", slo=STRICT)], seed=0)


@pytest.mark.parametrize("num_late", [2, 3])
def test_a_run_is_given_up_when_it_is_lost_and_no_sooner(num_late: int):
    """Of 20 that count, 2 may be late; hopeless ones may be late in any number."""
    objective = AttainmentObjective(share=0.9, is_hopeless=is_long)
    load = offered(20, 10)
    [allowance] = objective.allowances(load)
    assert allowance.allowed == 2
    watch = MissWatch([allowance], len(load), batch=1)
    ended = records(20 - num_late, num_late, 10)
    is_lost = False
    try:
        for record in ended:
            watch.on_finish(record)
    except ObjectiveMissed:
        is_lost = True
    assert is_lost is (num_late > 2)
    assert objective.judge(make_result(ended)).is_met is not is_lost


def test_a_load_of_hopeless_requests_is_refused():
    with pytest.raises(ConfigError, match="an idle machine could keep: loosen --slo-ttft-ms"):
        AttainmentObjective(is_hopeless=is_long).allowances(offered(0, 4))


def test_a_case_knows_its_own_in_any_process():
    case = ReplicaCase(settings=ReplicaSettings(model="meta-llama/Llama-3.1-8B", device="h100-sxm"))
    objective = AttainmentObjective(is_hopeless=HopelessOn(case))
    short, long = records(1, 0, 1)
    long.num_prompt_tokens = 120_000
    for each in (objective, pickle.loads(pickle.dumps(objective))):
        assert each.is_hopeless is not None
        assert [each.is_hopeless(record) for record in (short, long)] == [False, True]
    assert pickle.loads(pickle.dumps(objective)) == objective  # also once the replica has been built
