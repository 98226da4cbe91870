"""Stand-ins of vLLM's scheduler and its requests; `tests/vllm` has the real ones."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from onbeat.perfmodel.device_spec import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import ProfileKey
from onbeat.vllm import scheduler as plugin_module
from onbeat.vllm.scheduler import SLOSchedulerMixin
from onbeat.vllm.surface import Surface
from onbeat.vllm.telemetry import Message

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

    def get_finished_reason(self):
        return "length"


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

    options: ClassVar[dict[str, Any]] = {"ttft_ms": 1000, "tbt_ms": 50, "calibrate": "off"}

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
            additional_config={"onbeat": self.options},
        )
        self.requests, self.running, self.waiting = {}, [], FakeQueue()
        self.current_step, self.max_num_scheduled_tokens = 0, 512
        self.kv_cache_manager = FakeBlocks(200)
        self._pause_state = SimpleNamespace(name="UNPAUSED")
        self.need_mamba_block_aligned_split = False

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
        return SimpleNamespace(num_scheduled_tokens=rows, preempted_req_ids=None)

    def _take(self, request, left, rows):
        computed = request.num_computed_tokens
        num = min(request.num_tokens - computed, left)
        if self.need_mamba_block_aligned_split:
            num = self._mamba_block_aligned_split(request, num)
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
                    self._free(name)
        return {}

    def finish_requests(self, request_ids, status):
        self._free(request_ids)

    def _free(self, request_ids):
        request = self.requests.pop(request_ids)
        request.status.name = "FINISHED"
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv_cache_manager.held.pop(request_ids, None)

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        raise AssertionError("memory is plenty")

    def _mamba_block_aligned_split(self, request, num_new, num_found=0, num_loaded=0):
        raise AssertionError("the model has no Mamba layers")

    def shutdown(self):
        pass


def planned_scheduler(monkeypatch: pytest.MonkeyPatch) -> type:
    """Return the class of a scheduler whose steps onbeat plans."""
    monkeypatch.setattr(plugin_module, "engine_version", lambda: "0.32.0+cpu")
    key = ProfileKey(
        model="SmolLM2-135M-Instruct",
        device="cpu",
        device_name="a CPU",
        precision=Precision(),
        parallelism=Parallelism(),
        backend="vllm",
        engine_version="0.32.0",
    )
    monkeypatch.setattr("onbeat.vllm.calibrate.profile_key", lambda config: key)
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


def heard_by(scheduler) -> list[Message]:
    """Return a list that gets what a scheduler tells."""
    told: list[Message] = []
    scheduler.onbeat._publisher = SimpleNamespace(send=told.append, close=lambda: None)
    return told
