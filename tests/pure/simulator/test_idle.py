"""Requests that even an idle replica cannot serve in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, SLO_MODES
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.result import IdleReplica
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.pure.simulator.loads import ShapeTime, make_config, make_load


def slow_time() -> ShapeTime:
    """10 ms, 1 ms a token, and 0.1 ms for each token of context that a decode reads."""
    return ShapeTime(lambda shape: 0.01 + 1e-3 * shape.num_new_tokens + 1e-4 * shape.decode_context_tokens)


def idle_replica(model: ShapeTime, **scheduler: object) -> IdleReplica:
    return IdleReplica(model, make_config(scheduler=scheduler))


@pytest.mark.parametrize(
    ("slo", "is_out_of_reach"),
    [
        (SLO(), False),
        (SLO(ttft=0.1101), False),
        (SLO(ttft=0.109), True),
        (SLO(tbt=0.0212), False),
        (SLO(tbt=0.021), True),
        (SLO(ttft=0.1101, tbt=0.02), True),
    ],
)
def test_a_prompt_of_100_tokens_by_hand(slo, is_out_of_reach):
    """0.11 s for the prompt in one step; 0.01 + 0.001 + 0.0101 s for the first decode."""
    assert idle_replica(slow_time()).is_infeasible(slo, 100) is is_out_of_reach


@pytest.mark.parametrize(
    ("ttft", "num_output", "is_out_of_reach"),
    [(None, 2, True), (0.2, 20, False), (0.2, 75, False), (0.2, 77, True), (2.0, 500, False)],
)
def test_a_stream_uses_the_slack_of_its_first_token(ttft, num_output, is_out_of_reach):
    """A decode takes 1.2 ms more than the 19.9 ms of the objective: 75 of them take 90 ms more."""
    slo = SLO(ttft=ttft, tbt=0.0199)
    assert idle_replica(slow_time()).is_infeasible(slo, 100, num_output) is is_out_of_reach
    assert idle_replica(slow_time(), slo_mode="gap").is_infeasible(slo, 100, num_output)


def test_a_single_token_has_no_gap_to_miss():
    idle = idle_replica(slow_time())
    assert idle.is_infeasible(SLO(tbt=0.001), 100, 2)
    assert not idle.is_infeasible(SLO(tbt=0.001), 100, 1)


def test_the_end_comes_after_all_decodes():
    idle = idle_replica(slow_time())
    assert not idle.is_infeasible(SLO(e2e=0.1101), 100, 1)
    assert idle.is_infeasible(SLO(e2e=0.1), 100, 1)
    assert not idle.is_infeasible(SLO(e2e=0.5), 100, 10)
    assert idle.is_infeasible(SLO(e2e=0.5), 100, 50)


def test_the_host_takes_its_time_too():
    assert not idle_replica(slow_time()).is_infeasible(SLO(ttft=0.12), 100)
    assert IdleReplica(slow_time(), make_config(host_overhead=0.02)).is_infeasible(SLO(ttft=0.12), 100)


def test_it_remembers():
    model = slow_time()
    idle = idle_replica(model)
    for num_output_tokens in (2, 30, 400):
        idle.is_infeasible(SLO(ttft=1.0, tbt=1.0), 100, num_output_tokens)
    assert model.num_predictions == 2
    idle.is_infeasible(SLO(ttft=1.0, tbt=1.0), 101, 5)
    assert model.num_predictions == 4


@given(
    prompt=st.integers(1, 150),
    output=st.integers(1, 40),
    ttft=st.floats(0.01, 0.3),
    tbt=st.floats(0.01, 0.04),
    e2e=st.none() | st.floats(0.05, 1.5),
    mode=st.sampled_from(SLO_MODES),
)
def test_no_policy_serves_an_infeasible_request_in_time(prompt, output, ttft, tbt, e2e, mode):
    """Alone on a replica that may run its whole prompt at once: infeasible is never good."""
    slo = SLO(ttft=ttft, tbt=tbt, e2e=e2e)
    load = make_load([prompt], [output], [0.0]).with_classes([SLOClass(name="one", slo=slo)], seed=0)
    config = make_config(scheduler={"max_num_batched_tokens": 256})
    model = slow_time()
    [record] = simulate(load, config, model).records
    [is_good] = good_requests([record], mode=mode)
    assert not (is_good and idle_replica(model, slo_mode=mode)(record))


def test_records_are_asked_about_what_they_wanted():
    idle = idle_replica(slow_time())
    record = RequestRecord(request_id="r", arrival=0.0, num_prompt_tokens=100)
    assert not idle(record)
    record.slo = SLO(tbt=0.001)
    assert not idle(record)  # it got no token, and nobody knows how many it wanted
    record.offered_output_tokens = 5
    assert idle(record)
