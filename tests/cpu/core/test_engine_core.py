"""The step loop, synchronous and overlapped, with a fake runner."""

from __future__ import annotations

import pytest

from onbeat.core.errors import EngineDead
from onbeat.core.request import FinishReason, Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.cpu.core.shedding import shedding_core
from tests.fake_runner import build_fake_engine


def make_config(**limits):
    values = {"num_blocks": 64, "max_model_len": 256, "max_num_batched_tokens": 512, "policy": "sarathi"}
    return SchedulerConfig(**(values | limits))


def run_all(core, requests):
    for request in requests:
        core.add(request)
    tokens = {request.request_id: [] for request in requests}
    reasons, messages = {}, []
    while core.has_work:
        outputs = core.step()
        if outputs is None:
            continue
        messages.append(outputs)
        for output in outputs.outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    core.scheduler.check_invariants()
    core.shutdown()
    return tokens, reasons, messages


def make_requests(*lengths, prefix="r"):
    return [
        Request(
            request_id=f"{prefix}{i}",
            prompt_token_ids=tuple(range(n)),
            sampling=SamplingParams(max_tokens=m),
            cache_salt=str(i),
        )
        for i, (n, m) in enumerate(lengths)
    ]


@pytest.mark.parametrize("policy", ["static", "orca", "prefill-first", "sarathi"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_request_gets_its_tokens(policy, depth):
    budget = 64 if policy == "sarathi" else 1024
    core, _ = build_fake_engine(
        lambda text: None, policy=policy, max_in_flight_steps=depth, max_num_batched_tokens=budget
    )
    lengths = [(5, 7), (200, 1), (70, 30), (1, 12), (300, 3)]
    tokens, reasons, _ = run_all(core, make_requests(*lengths))
    for i, (n, m) in enumerate(lengths):
        assert tokens[f"r{i}"] == [(n + k) % 97 for k in range(m)]
        assert reasons[f"r{i}"] is FinishReason.LENGTH


def test_overlapped_planning_runs_ahead():
    core, _ = build_fake_engine(lambda text: None, max_in_flight_steps=2)
    core.add(make_requests((5, 7))[0])
    assert core.step() is None  # the first step was only launched
    outputs = core.step()  # launches the second before it takes the first
    assert outputs.stats.step_id == 0
    assert core.scheduler._states["r0"].num_in_flight_tokens == 1
    core.shutdown()


def test_a_failed_row_leaves_the_others_alone():
    core, _ = build_fake_engine(lambda text: None)
    requests = make_requests((5, 7)) + make_requests((5, 7), prefix="bad")
    tokens, reasons, _ = run_all(core, requests)
    assert reasons == {"r0": FinishReason.LENGTH, "bad0": FinishReason.ERROR}
    assert len(tokens["r0"]) == 7


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(caplog):
    core, _ = build_fake_engine(lambda text: None)
    core.add(make_requests((5, 7), prefix="boom")[0])
    outputs = core.step()
    assert outputs.outputs[0].finish_reason is FinishReason.ERROR
    assert "RuntimeError: boom" in outputs.outputs[0].error
    tokens, _, _ = run_all(core, make_requests((5, 7)))
    assert len(tokens["r0"]) == 7


def step_for_ever(core):
    while core.has_work:
        core.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dead_engine_is_no_failed_step(depth):
    core, _ = build_fake_engine(lambda text: None, max_in_flight_steps=depth)
    for call in range(2):
        core.add(make_requests((5, 7), prefix=f"dead{call}")[0])
        with pytest.raises(EngineDead, match="rank 1"):
            step_for_ever(core)
        core.abort([f"dead{call}0"])  # it may not have come to its step, behind one that was under way
        assert core.scheduler.num_unfinished == 0
        core.scheduler.check_invariants()
    core.shutdown()


def test_stats_describe_the_steps():
    core, info = build_fake_engine(lambda text: None, max_num_batched_tokens=64)
    _, _, messages = run_all(core, make_requests((100, 3), (4, 3)))
    stats = [message.stats for message in messages]
    assert sum(entry.shape.num_new_tokens for entry in stats) == 100 + 4 + 4
    assert stats[0].chunk_request_ids == ["r0"]
    assert all(entry.end >= entry.start for entry in stats)
    assert [entry.step_id for entry in stats] == list(range(len(stats)))
    assert stats[-1].num_used_blocks == 0
    assert stats[0].num_blocks == info.limits.num_blocks
    assert sum(entry.num_prefix_queries for entry in stats) == 104


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.mark.parametrize("depth", [1, 2])
def test_what_waited_in_vain_is_told_at_once(depth):
    clock = Clock()
    config = make_config(max_num_seqs=1)
    core = shedding_core(config, depth=depth, clock=clock)
    impatient = Request(
        request_id="late", prompt_token_ids=(1, 2), slo=SLO(ttft=0.1), shed=ShedMode.REJECT, arrival=0.0
    )
    core.add(make_requests((5, 7))[0])
    core.add(impatient)
    core.launch()
    assert core.take_news() is None
    clock.now = 1.0
    core.launch()  # at depth 1 there is no room for another step: nothing is asked
    if depth == 1:
        assert core.take_news() is None
        core.collect()
        core.launch()
    expired = core.take_news()
    assert [output.finish_reason for output in expired.outputs] == [FinishReason.EXPIRED]
    assert expired.stats is None
    assert core.take_news() is None
    core.shutdown()


def test_the_synchronous_loop_tells_too_even_where_nothing_runs():
    core = shedding_core(make_config(), clock=Clock())
    core.add(
        Request(
            request_id="late", prompt_token_ids=(1,), slo=SLO(ttft=0.1), shed=ShedMode.REJECT, arrival=-5.0
        )
    )
    message = core.step()
    assert [output.request_id for output in message.outputs] == ["late"]
    assert not core.has_work
    core.shutdown()


def test_stats_carry_budget_and_promises():
    core = shedding_core(make_config())
    core.add(make_requests((5, 7))[0])
    message = core.step()
    assert message.stats.scheduler.decode_slacks == [0.5]
    assert message.stats.budget_seconds is message.stats.budget_request_id is None
    core.shutdown()


class TestLoad:
    def test_nobody_is_told_who_did_not_ask(self):
        core, _ = build_fake_engine(lambda text: None)
        core.add(*make_requests((5, 7)))
        message = core.step()
        assert message is not None
        assert message.load is None
        assert core.take_load() is None
        assert core.message([]).load is None
        core.shutdown()

    def test_each_step_says_how_the_engine_stands_after_it(self):
        core, _ = build_fake_engine(lambda text: None, reports_load=True)
        idle = core.take_load()
        assert idle is not None
        assert idle.load is not None
        assert (idle.outputs, idle.load.num_taken, idle.load.num_running) == ([], 0, 0)
        for request in make_requests((20, 8), (30, 8)):
            core.add(request)
        assert core.take_load() is None  # the next step will say
        message = core.step()
        assert message is not None
        assert message.load is not None
        assert (message.load.num_taken, message.load.num_decodes, message.load.busy) == (2, 2, 0.0)
        assert message.load.time == message.now
        assert core.take_news() is None
        core.shutdown()

    def test_a_long_step_is_told_when_it_begins(self, monkeypatch):
        core, _ = build_fake_engine(lambda text: None, reports_load=True)
        monkeypatch.setattr(core, "_clock", lambda: 100.0)
        core.add(*make_requests((400, 8)))
        assert core.launch()
        message = core.take_news()
        assert message is not None
        assert message.load is not None
        assert (message.outputs, message.load.num_decodes) == ([], 1)
        assert message.load.busy == pytest.approx(0.042)
        assert core.take_news() is None
        core.collect()
        assert core.launch()
        assert core.take_news() is None  # the step of its second token is short
        core.collect()
        core.shutdown()

    def test_a_step_under_way_keeps_it_busy(self):
        core, _ = build_fake_engine(
            lambda text: None, step_seconds=0.01, max_in_flight_steps=2, reports_load=True
        )
        core.add(*make_requests((20, 8)))
        assert core.step() is None
        assert core.launch()
        message = core.collect()
        assert message.load is not None
        assert 0 < message.load.busy <= 2.1e-3 + 1e-9  # as predicted, by now partly over; clocks round
        core.shutdown()
