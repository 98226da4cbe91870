"""What is told of vLLM's own steps makes a record of what was served."""

from __future__ import annotations

import pytest

from onbeat.core.slo import Fate
from onbeat.recording.reader import Recording
from onbeat.simulator.replay.history import read_history

pytest.importorskip("vllm.v1.core.sched.scheduler")
from vllm.v1.request import RequestStatus

from onbeat.vllm.origin import origin_of
from tests.cpu.vllm.fake_scheduler import recorded
from tests.vllm.harness import Clock, Engine, make_request, make_scheduler, model_folder, told_by
from tests.vllm.test_plans import OBJECTIVES, check_planned, workload

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_told_makes_a_record_of_what_was_served(tmp_path, is_async):
    clock, told = Clock(), []
    scheduler = make_scheduler(model_folder(tmp_path / "model"), clock, is_async=is_async, num_blocks=90)
    told_by(scheduler, told)
    engine = Engine(scheduler, clock, depth=2 if is_async else 1, noise=0.05)
    requests = workload(60, 20.0, long_every=0, **OBJECTIVES)
    engine.add(*requests)
    late = [
        make_request(f"late{index}", 500, 5, 1001.0 + index / 10, slo_ttft_ms=1.0, slo_shed="reject")
        for index in range(10)
    ]
    engine.add(*late)
    for _ in range(40):
        engine._arrive()
        if scheduler.has_requests():
            engine.step()
        else:
            clock.now = engine.arrivals[0].arrival_time
    left = scheduler.running[0].request_id
    scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED)
    engine.run()
    check_planned(engine)
    path = tmp_path / "run.gz"
    counts = recorded(path, scheduler.onbeat.keeper, origin_of(scheduler.vllm_config), told)
    assert sum(each["kind"] == "step" for each in told) == counts.num_steps
    history = read_history(Recording(path))
    assert [step.end for step in history.steps] == sorted(step.end for step in history.steps)
    served = {each.record.request_id: each.record for each in history.requests}
    names = {each.request_id for each in late}
    assert {served[name].fate for name in names} == {Fate.REJECTED}
    assert min(served[name].predicted_ttft for name in names) > 0.001
    for name, tokens in engine.tokens.items():
        if name in names:  # before 0.33 the text of a refusal comes with a token
            continue
        record = served[name]
        if name == left:
            assert record.finish_reason == "abort"
            continue
        assert list(record.delivery_times) == [now for now, _ in tokens], name
    preempted = [name for each in told if each["kind"] == "step" for name in each["preempted"]]
    assert len(preempted) == sum(each.num_preemptions for each in requests) > 0
