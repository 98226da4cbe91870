"""Our plans on stand-ins of vLLM's scheduler and requests; `tests/vllm` has the real ones."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.vllm import plugin as plugin_module
from onbeat.vllm.plugin import MOST_FAULTS, Plugin
from onbeat.vllm.scheduler import SLOSchedulerMixin
from onbeat.vllm.surface import Surface, check_version

BLOCK = 16


class FakeQueue(deque[Any]):
    add_request = deque.append

    def remove_requests(self, requests):
        for request in requests:
            self.remove(request)

    def prepend_requests(self, requests):
        self.extendleft(requests)


class FakeRequest:
    def __init__(self, name, num_prompt, num_output, **objectives):
        self.request_id, self.num_prompt_tokens, self.max_tokens = name, num_prompt, num_output
        self.num_tokens, self.num_computed_tokens = num_prompt, 0
        self.client_index = self.num_output_placeholders = self.num_preemptions = 0
        self.arrival_time, self.next_decode_eligible_step = 0.0, 0
        self.sampling_params = SimpleNamespace(extra_args=objectives)
        self.pooling_params, self.resumable = None, False
        self.status = SimpleNamespace(name="WAITING")

    def is_finished(self):
        return self.status.name == "FINISHED"


class FakeBlocks:
    """Blocks that are counted and never shared."""

    def __init__(self, num):
        self.num_gpu_blocks, self.held, self.blocks = num + 1, {}, ()
        self.block_size, self.single_type_managers = BLOCK, [self]
        self.block_pool = self.coordinator = self
        self.req_to_blocks = self.held

    def get_num_free_blocks(self):
        return self.num_gpu_blocks - 1 - sum(map(len, self.held.values()))

    def get_computed_blocks(self, request):
        return SimpleNamespace(blocks=([],)), 0

    def touch(self, blocks):
        assert not blocks

    def free_blocks(self, blocks):
        assert not list(blocks)


class FakeScheduler:
    """Serves who comes first: running ones, then those that wait, as far as tokens go."""

    def __init__(self, **scheduling):
        settings = {
            "policy": "fcfs",
            "max_num_seqs": 8,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": 0,
            "async_scheduling": False,
        }
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(**(settings | scheduling)),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            model_config=SimpleNamespace(max_model_len=2048, runner_type="generate"),
            additional_config={"onbeat": {"ttft_ms": 1000, "tbt_ms": 50}},
        )
        self.requests, self.running, self.waiting = {}, [], FakeQueue()
        self.current_step, self.max_num_scheduled_tokens = 0, 512
        self.kv_cache_manager = FakeBlocks(200)
        self._pause_state = SimpleNamespace(name="UNPAUSED")

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_requests(self):
        return bool(self.requests)

    def schedule(self):
        self.current_step += 1
        left, rows = self.max_num_scheduled_tokens, {}
        for request in self.running:
            if self.current_step >= request.next_decode_eligible_step:
                left -= self._take(request, left, rows)
        while self.waiting and left:
            request = self.waiting[0]
            taken = self._take(request, left, rows)
            if not taken:
                break
            self.running.append(self.waiting.popleft())
            request.status.name = "RUNNING"
            left -= taken
        for name, num in rows.items():
            self.requests[name].num_computed_tokens += num
        return SimpleNamespace(num_scheduled_tokens=rows)

    def _take(self, request, left, rows):
        computed = request.num_computed_tokens
        num = self._reserve_prefill_lookahead(request, computed, min(request.num_tokens - computed, left))
        if num:
            rows[request.request_id] = num
            self.kv_cache_manager.held[request.request_id] = [
                SimpleNamespace(block_id=index, ref_cnt=1, is_null=False)
                for index in range(-(-(computed + num) // BLOCK))
            ]
        return num

    def update_from_output(self, output, result):
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                if request.num_tokens == request.num_prompt_tokens + request.max_tokens:
                    self.finish_requests(name, None)
        return {}

    def finish_requests(self, request_ids, status):
        request = self.requests.pop(request_ids)
        request.status.name = "FINISHED"
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv_cache_manager.held.pop(request_ids, None)

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        raise AssertionError("memory is plenty")

    def _reserve_prefill_lookahead(self, request, num_computed, num_new):
        return num_new

    def shutdown(self):
        pass


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(plugin_module, "engine_version", lambda: "0.32.0+cpu")
    monkeypatch.setattr(Surface, "end", lambda self, name: self.scheduler.finish_requests(name, None))
    monkeypatch.setattr(Surface, "refusal", staticmethod(lambda request, text: (request.request_id, text)))
    monkeypatch.setattr(
        Surface, "add_outputs", staticmethod(lambda outputs, refused: outputs.update({0: refused}))
    )

    class Planned(SLOSchedulerMixin, FakeScheduler):
        now = 100.0
        clock = wall = classmethod(lambda cls: cls.now)

    return Planned


def run(scheduler, *, most=2000):
    outputs, num = {}, 0
    while scheduler.has_requests():
        output = scheduler.schedule()
        assert sum(output.num_scheduled_tokens.values()) <= scheduler.max_num_scheduled_tokens
        type(scheduler).now += 0.01 + 2e-4 * sum(output.num_scheduled_tokens.values())
        outputs.update(scheduler.update_from_output(output, None))
        num += 1
        assert num < most
    return outputs


def add_some(scheduler, num=20, **objectives):
    requests = [FakeRequest(f"r{index}", 40 * index + 10, 10, **objectives) for index in range(num)]
    for request in requests:
        request.arrival_time = scheduler.now
        scheduler.add_request(request)
    return requests


def test_plans_are_carried_out_and_everybody_ends(make):
    scheduler = make()
    requests = add_some(scheduler)
    run(scheduler)
    plugin = scheduler.onbeat
    assert all(request.num_tokens == request.num_prompt_tokens + 10 for request in requests)
    assert (plugin.num_faults, plugin.num_mismatches, plugin.num_foreign) == (0, 0, 0)
    assert not plugin.keeper.mirror.states
    assert not plugin.keeper.mirror.requests


def test_requests_that_are_taken_or_refused_are_told_of(make, monkeypatch):
    scheduler = make()
    told = []
    scheduler.onbeat._publisher = SimpleNamespace(send=told.append, close=lambda: None)
    add_some(scheduler, 2, slo_id="x", slo_ttft_ms=500.0)
    scheduler.add_request(FakeRequest("late", 2000, 5, slo_id="y", slo_ttft_ms=1.0, slo_shed="reject"))
    run(scheduler)
    scheduler.shutdown()
    assert [(each["event"], each["request_id"], each["id"]) for each in told] == [
        ("added", "r0", "x"),
        ("added", "r1", "x"),
        ("refused", "late", "y"),
    ]
    assert told[-1]["status"] == 429
    assert told[-1]["predicted_ttft_ms"] > 1


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
