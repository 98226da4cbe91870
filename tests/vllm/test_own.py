"""What vLLM decides by itself beside our plans: adapters, and KV that a connector loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from tests.vllm.chaos import let_chaos_plan
from tests.vllm.harness import Clock, Engine, check_ended, make_request, make_scheduler, model_folder
from tests.vllm.test_plans import OBJECTIVES

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


class LoadsPrompts:
    """A KV connector that loads three blocks of each prompt, for which it takes four steps."""

    requires_kv_delivery = supports_divergent_local_hybrid_hits = False

    def __init__(self, scheduler) -> None:
        self.steps_left: dict[str, int] = {}
        self.loaded: set[str] = set()
        self._take, scheduler.connector = scheduler.update_from_output, self
        scheduler.update_from_output = self.take

    def get_num_new_matched_tokens(self, request, _num):
        return (0, False) if request.request_id in self.loaded else (48, True)

    def get_loaded_kv_cache_group_ids(self, _request):
        return ()

    def update_state_after_alloc(self, request, _blocks, num) -> None:
        if num:
            self.steps_left[request.request_id] = 4

    def request_finished(self, _request, _blocks):
        return False, None

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: () if name == "take_events" else None

    def take(self, output, result):
        done = {name for name, left in self.steps_left.items() if left == 1}
        self.steps_left = {name: left - 1 for name, left in self.steps_left.items() if left > 1}
        self.loaded |= done
        if done:
            names = ("finished_sending", "invalid_block_ids", "failed_recving", "kv_connector_stats")
            told = SimpleNamespace(**dict.fromkeys(names), finished_recving=done)
            result.kv_connector_output = told
        return self._take(output, result)


@pytest.mark.parametrize("is_async", [False, True])
def test_kv_is_loaded_while_others_are_planned(folder, is_async):
    clock = Clock()
    scheduler = make_scheduler(folder, clock, is_async=is_async)
    connector = LoadsPrompts(scheduler)
    engine = Engine(scheduler, clock, depth=2 if is_async else 1)
    requests = [
        make_request(f"r{index}", 100, 20, 1000.0 + 0.02 * index, **OBJECTIVES) for index in range(30)
    ]
    engine.add(*requests)
    engine.run(20_000)
    check_ended(engine, requests)
    assert len(connector.loaded) == 30
    assert scheduler.onbeat.num_faults == 0


def test_streams_that_are_skipped_keep_their_adapters(folder):
    clock = Clock()
    scheduler = make_scheduler(folder, clock)
    scheduler.lora_config = SimpleNamespace(max_loras=1)
    let_chaos_plan(scheduler, seed=1)
    requests = [make_request(f"r{index}", 40, 60, 1000.0 + 0.05 * index) for index in range(40)]
    for index, request in enumerate(requests):
        request.lora_request = SimpleNamespace(lora_int_id=1 + index % 2, lora_name="l", lora_path="p")
    engine = Engine(scheduler, clock)
    engine.add(*requests)
    engine.run(20_000)
    check_ended(engine, requests)
    assert scheduler.onbeat.num_faults == 0
