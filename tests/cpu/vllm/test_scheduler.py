"""Our plans on stand-ins of vLLM's scheduler and requests; `tests/vllm` has the real ones."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.vllm.plugin import MOST_FAULTS, Plugin
from onbeat.vllm.surface import check_version
from tests.cpu.vllm.fake_scheduler import FakeRequest, FakeScheduler, add_some, planned_scheduler, run


@pytest.fixture
def make(monkeypatch):
    return planned_scheduler(monkeypatch)


def test_plans_are_carried_out_and_everybody_ends(make):
    scheduler = make()
    requests = add_some(scheduler)
    run(scheduler)
    plugin = scheduler.onbeat
    assert all(request.num_tokens == request.num_prompt_tokens + 10 for request in requests)
    assert (plugin.num_faults, plugin.num_mismatches, plugin.num_foreign) == (0, 0, 0)
    assert not plugin.keeper.mirror.states
    assert not plugin.keeper.mirror.requests


def test_who_cannot_be_in_time_and_asks_so_is_refused_with_numbers(make):
    scheduler = make()
    add_some(scheduler, 3)
    scheduler.add_request(FakeRequest("late", 2000, 5, slo_ttft_ms=1.0, slo_shed="reject"))
    ((_, (name, text)),) = run(scheduler)[0]
    assert name == "late"
    assert text.startswith('onbeat:429:{"predicted_ttft_ms": ')


def test_a_fault_costs_one_step_and_three_in_a_row_turn_the_plug_in_off(make, monkeypatch):
    scheduler = make()
    requests = add_some(scheduler, 6)
    plan, faults = scheduler.onbeat.keeper.plan, iter([0, 1, 0, 1, 1, 1])

    def faulty(now):
        if next(faults):
            raise RuntimeError("of ours")
        return plan(now)

    monkeypatch.setattr(scheduler.onbeat.keeper, "plan", faulty)
    run(scheduler)
    plugin = scheduler.onbeat
    assert (plugin.is_on, plugin.num_faults, plugin.num_planned) == (False, 1 + MOST_FAULTS, 2)
    assert all(request.is_finished() for request in requests)


def test_a_pause_and_requests_that_pool_are_left_to_vllm(make):
    scheduler = make()
    pooled = FakeRequest("pooled", 100, 1)
    pooled.pooling_params = object()
    scheduler.add_request(pooled)
    add_some(scheduler, 4)
    scheduler._pause_state.name = "PAUSED_NEW"
    scheduler.update_from_output(scheduler.schedule(), None)
    assert (scheduler.onbeat.num_foreign, scheduler.onbeat.num_planned) == (1, 0)
    scheduler._pause_state.name = "UNPAUSED"
    run(scheduler)
    assert pooled.is_finished()
    assert scheduler.onbeat.num_faults == 0


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"policy": "priority"}, "--scheduling-policy is priority"),
        ({"enable_chunked_prefill": False}, "chunked prefill is off"),
        ({"long_prefill_token_threshold": 100}, "--long-prefill-token-threshold is 100"),
        ({"prefill_schedule_interval": 4}, "--prefill-schedule-interval"),
    ],
)
def test_settings_under_which_no_plan_can_be_kept_are_refused(make, setting, named):
    with pytest.raises(ConfigError, match=named):
        make(**setting)


def test_without_the_quota_order_and_total_do(make, monkeypatch):
    scheduler = make()
    scheduler.onbeat.surface.has_quota = False
    monkeypatch.setattr(make, "_reserve_prefill_lookahead", lambda self, request, computed, num: num)
    requests = add_some(scheduler)
    run(scheduler)
    assert all(request.is_finished() for request in requests)
    assert scheduler.onbeat.num_mismatches == 0


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "dev"])
def test_another_version_is_refused(version):
    with pytest.raises(ConfigError, match=r"0\.26 to 0\.33"):
        check_version(version)


def test_a_lever_that_is_missing_is_named(make, monkeypatch):
    monkeypatch.delattr(FakeScheduler, "_preempt_request")
    with pytest.raises(ConfigError, match="_preempt_request"):
        make()


def test_a_model_that_pools_is_left_alone(make):
    scheduler = make()
    scheduler.vllm_config.model_config.runner_type = "pooling"
    plugin = Plugin(scheduler)
    assert not plugin.is_on
    assert plugin.plan(0.0) is None
