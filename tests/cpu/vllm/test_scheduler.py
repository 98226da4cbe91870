"""Our plans on stand-ins of vLLM's scheduler and requests; `tests/vllm` has the real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onbeat.core.errors import ConfigError
from onbeat.vllm import scheduler as plugin_module
from onbeat.vllm.scheduler import MOST_FAULTS, Plugin
from onbeat.vllm.surface import VLLMKVView, minor_version
from onbeat.vllm.telemetry import refusal_in
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
    assert not plugin.steps.table.states
    assert not plugin.steps.table.requests


def test_who_cannot_be_in_time_and_asks_so_is_refused_with_numbers(make):
    scheduler = make()
    add_some(scheduler, 3)
    scheduler.add_request(FakeRequest("late", 2000, 5, slo_ttft_ms=1.0, slo_shed="reject"))
    ((_, (name, text)),) = run(scheduler)[0]
    assert name == "late"
    refusal = refusal_in(text)
    assert refusal.code == "slo_unattainable"
    assert refusal.predicted_ttft > 1e-3


def test_a_fault_costs_one_step_and_three_in_a_row_turn_the_plug_in_off(make, monkeypatch):
    scheduler = make()
    requests = add_some(scheduler, 6)
    plan, faults = scheduler.onbeat.steps.plan, iter([0, 1, 0, 1, 1, 1])

    def faulty(now):
        if next(faults):
            raise RuntimeError("of ours")
        return plan(now)

    monkeypatch.setattr(scheduler.onbeat.steps, "plan", faulty)
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


class TestWhatStaysVLLMs:
    """What vLLM would do by itself it does beside our plans, too."""

    @pytest.mark.parametrize(("num_computed", "num_given", "num"), [(9, 4, 4), (0, 10, 1), (9, 1, 1)])
    def test_a_row_with_room_for_drafts_is_not_cut(self, make, num_computed, num_given, num):
        scheduler = make()
        (request,) = add_some(scheduler, 1)
        with scheduler.onbeat.surface.limiting(lambda *_: 1):
            assert scheduler._mamba_block_aligned_split(request, num_given, num_computed) == num

    @pytest.mark.parametrize(
        ("num_computed", "quota", "num"), [(0, 5, 5), (0, 25, 10), (10, 5, 30), (0, 40, 40), (0, 45, 45)]
    )
    @pytest.mark.parametrize("keeps_whole", [True, False])
    def test_no_picture_is_cut_whose_parts_see_each_other(self, make, num_computed, quota, num, keeps_whole):
        scheduler = make(disable_chunked_mm_input=keeps_whole)
        request = FakeRequest("picture", 60, 1)
        request.mm_features = [SimpleNamespace(mm_position=SimpleNamespace(offset=10, length=30))]
        with scheduler.onbeat.surface.limiting(lambda *_: quota):
            assert scheduler.need_mamba_block_aligned_split
            given = scheduler._mamba_block_aligned_split(request, 60 - num_computed, num_computed)
        assert not scheduler.need_mamba_block_aligned_split
        assert given == (num if keeps_whole else quota)

    @pytest.mark.parametrize(("skipped", "num_left"), [("", 2), ("a", 2), ("ac", 2), ("b", 1), ("abc", 0)])
    def test_adapters_of_streams_that_are_skipped_keep_their_places(self, make, skipped, num_left):
        scheduler = make()
        scheduler.lora_config = own = SimpleNamespace(max_loras=2)
        for name, lora in (("a", 1), ("b", 2), ("c", None), ("d", 1)):
            request = FakeRequest(name, 10, 5)
            request.lora_request = lora and SimpleNamespace(lora_int_id=lora)
            scheduler.running.append(request)
            if name in skipped or "abc" in skipped:
                scheduler.onbeat.surface.skip(request)
        with scheduler.onbeat.surface.keeping_loras():
            assert scheduler.lora_config.max_loras == num_left
        assert scheduler.lora_config is own

    @pytest.mark.parametrize("has_own_queue", [True, False])
    def test_a_request_for_which_kv_is_loaded_waits_in_vllms_queue_alone(self, make, has_own_queue):
        scheduler = make()
        loads, other = add_some(scheduler, 2)
        loads.status.name = "WAITING_FOR_REMOTE_KVS"
        if has_own_queue:  # since 0.31
            scheduler.waiting.remove(loads)
            scheduler.kv_holding_waiting = [loads]
        rows = scheduler.schedule().num_scheduled_tokens
        assert (other.request_id in rows, loads.request_id in rows) == (True, not has_own_queue)
        assert scheduler.onbeat.num_planned == 1

    def test_a_request_that_a_fault_of_ours_lost_is_served_beside_others(self, make, monkeypatch):
        def faulty(*_):
            raise RuntimeError("of ours")

        scheduler = make()
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.onbeat.steps, "add", faulty)
            (lost,) = add_some(scheduler, 1)
        other = FakeRequest("other", 20, 5)
        scheduler.add_request(other)
        assert scheduler.schedule().num_scheduled_tokens.keys() == {lost.request_id, "other"}
        assert scheduler.onbeat.num_planned == 1


@pytest.mark.parametrize("name", ["max_admission_blocks_per_request", "_max_admission_blocks_per_request"])
def test_a_prompt_that_would_never_fit_is_counted_window_by_window(name):
    windows = [SimpleNamespace(block_size=16, **{name: 21})] * 5
    groups = [SimpleNamespace(block_size=16, req_to_blocks={"long": [None] * 40}), *windows]
    manager = SimpleNamespace(
        block_pool=SimpleNamespace(num_gpu_blocks=421),
        coordinator=SimpleNamespace(single_type_managers=groups),
    )
    scheduler = SimpleNamespace(kv_cache_manager=manager)
    view = VLLMKVView(SimpleNamespace(scheduler=scheduler, num_drafts=0, num_lookahead=0), {})
    assert (view.num_blocks, view.num_blocks_for(960), view.num_blocks_for(3000)) == (70, 60, 49)
    view.follow(
        SimpleNamespace(request_id="long", num_tokens=3000, num_in_flight_tokens=0, num_computed_tokens=640)
    )
    assert view.promised == 49 - 25  # (188 + 5 * 21) / 6 less (40 + 5 * 21) / 6


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


def test_chunks_that_vllm_aligns_by_itself_are_cut_behind_that(make, monkeypatch):
    """As those of Mamba layers, which are cached at the ends of blocks."""
    scheduler = make()
    scheduler.need_mamba_block_aligned_split = True
    monkeypatch.setattr(make, "_mamba_block_aligned_split", lambda self, request, num, *_: num // 16 * 16)
    (request,) = add_some(scheduler, 1)
    request.num_tokens = 100
    for quota, num in ((200, 80), (20, 20)):
        with scheduler.onbeat.surface.limiting(lambda name, computed, num, quota=quota: min(num, quota)):
            assert scheduler._mamba_block_aligned_split(request, 90, 4, 0) == num
    assert scheduler.need_mamba_block_aligned_split


@pytest.mark.parametrize("version", ["0.25.1", "0", "dev", ""])
def test_an_older_version_is_refused(version):
    with pytest.raises(ConfigError, match=r"0\.26 and later"):
        minor_version(version)


def test_a_newer_version_is_judged_by_its_first_plans(make, monkeypatch, caplog):
    monkeypatch.setattr(plugin_module, "engine_version", lambda: "0.34.0rc1")
    scheduler = make()
    add_some(scheduler, 40)
    run(scheduler)
    assert "vLLM 0.34" in caplog.text
    assert scheduler.onbeat.is_on
    assert scheduler.onbeat.num_planned > 50
    monkeypatch.setattr(plugin_module, "mismatch", lambda *_: {"r0": (1, 2)})
    scheduler = make()
    requests = add_some(scheduler, 40)
    run(scheduler)
    assert all(request.is_finished() for request in requests)
    assert not scheduler.onbeat.is_on
    assert not scheduler.has_requests()


def test_a_scheduler_that_knows_no_stale_output_preempts(make, monkeypatch):
    """As that of 0.26."""
    preempted = []
    scheduler = make()
    monkeypatch.setattr(scheduler, "_preempt_request", lambda request, now: preempted.append(request), False)
    (request,) = add_some(scheduler, 1)
    scheduler.running.append(request)
    scheduler.onbeat.surface.preempt(request)
    assert preempted == [request]
    assert not scheduler.running


def test_a_request_whose_preemption_fails_goes_on(make):
    scheduler = make()
    (request,) = add_some(scheduler, 1)
    scheduler.running.append(request)
    with pytest.raises(AssertionError):
        scheduler.onbeat.surface.preempt(request)
    assert scheduler.running == [request]


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0"])
@pytest.mark.parametrize("name", ["_preempt_request", "_mamba_block_aligned_split"])
def test_a_lever_that_is_missing_is_named(make, monkeypatch, name, version):
    monkeypatch.setattr(plugin_module, "engine_version", lambda: version)
    monkeypatch.delattr(FakeScheduler, name)
    with pytest.raises(ConfigError, match=name):
        make()


def test_a_model_that_pools_is_left_alone(make):
    scheduler = make()
    scheduler.vllm_config.model_config.runner_type = "pooling"
    plugin = Plugin(scheduler)
    assert not plugin.is_on
    assert plugin.plan(0.0) is None
