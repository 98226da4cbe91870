"""vLLM's real scheduler under a virtual clock: no model runs, a made-up one says how long a step takes."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from onbeat.vllm.scheduler import SLOSchedulerMixin

BLOCK = 16
EOS = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


init_none_hash(sha256)  # once: it may draw a seed


def model_folder(path: Path) -> Path:
    """Write what vLLM reads of a model before it loads one."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def runner(name: str, **how: bool) -> Any:
    return pytest.param(how, id=name)


BOTH_RUNNERS = [
    runner("sync", is_async=False),
    runner("sync, second runner", is_async=False, is_second_runner=True),
    runner("async, second runner", is_async=True, is_second_runner=True),
]
"""With drafts: there, steps overlap on vLLM's second model runner alone, which a CPU does not have."""
ALL_RUNNERS = [*BOTH_RUNNERS, runner("async", is_async=True)]


class Clock:
    """Virtual seconds, of both of a machine's clocks."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(
    folder: Path,
    clock: Clock,
    *,
    plug_in: bool = True,
    is_async: bool = False,
    num_blocks: int = 10_000,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    prefix_caching: bool = False,
    num_drafts: int = 0,
    draft_method: str = "ngram",
    is_second_runner: bool = False,
    windows: Sequence[int] = (),
    more_groups: Sequence[Any] = (),
    options: dict[str, object] | None = None,
    **scheduling,
):
    """Return vLLM's scheduler, with our mixin before it or without.

    Parameters
    ----------
    num_drafts : most draft tokens of a step.
    draft_method : by which they are said to be made.
    is_second_runner : whether it works for vLLM's second model runner, which a CPU does not have.
    windows : of sliding attention, tokens; each is a group of layers beside those of full attention.
    more_groups : KV specifications of yet other groups.
    """
    model = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=4096,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            **scheduling,
        ),
        device_config=DeviceConfig("cpu"),
        speculative_config=None if not num_drafts else _drafts(model, num_drafts),
        additional_config={"onbeat": {"calibrate": "off", **(options or {})}},
    )
    config.scheduler_config.async_scheduling = is_async
    if num_drafts:
        config.speculative_config.method = draft_method
    if is_second_runner:
        config.__class__ = type("Second", (VllmConfig,), {"use_v2_model_runner": True})
    config.cache_config.num_gpu_blocks = num_blocks
    layer = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**layer),
        *(SlidingWindowSpec(**layer, sliding_window=each) for each in windows),
    ]
    groups = [KVCacheGroupSpec([f"layer{index}"], each) for index, each in enumerate((*specs, *more_groups))]
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    base = AsyncScheduler if is_async else Scheduler
    if plug_in:
        base = type(
            "Planned", (SLOSchedulerMixin, base), {"clock": staticmethod(clock), "wall": staticmethod(clock)}
        )
    return base(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=math.lcm(*(each.block_size for each in (*specs, *more_groups))),
        log_stats=True,
    )


def _drafts(model: ModelConfig, num_drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=3,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )


def make_request(
    name: str, num_prompt: int, num_output: int, arrival: float, *, prefix: str | None = None, **objectives
) -> Request:
    """Return a request of random tokens.

    Parameters
    ----------
    prefix : seeds the first half of the prompt, which those of the same prefix share.
    """
    rng = random.Random(name)
    tokens = [rng.randrange(3, 1000) for _ in range(num_prompt)]
    if prefix is not None:
        shared = random.Random(prefix)
        half = num_prompt // 2
        tokens[:half] = [shared.randrange(3, 1000) for _ in range(half)]
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=num_output, ignore_eos=True, extra_args=objectives),
        pooling_params=None,
        arrival_time=arrival,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class Workers:
    """Keep what the workers of vLLM's model runners keep of each request, and check what they are told.

    The first runner keeps a request that is preempted, and hears of all its blocks when it goes on. The
    second forgets it, and takes it in as a new one, with all its tokens.
    """

    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler
        self.blocks: dict[str, list[list[int]]] = {}

    def hear(self, output) -> None:
        is_second, blocks = self.scheduler.use_v2_model_runner, self.blocks
        preempted = set(output.preempted_req_ids or ()) if is_second else set()
        for name in preempted | output.finished_req_ids:
            blocks.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in blocks, "it was not forgotten"
            blocks[new.req_id] = [list(each) for each in new.block_ids]
            if is_second:
                assert new.prefill_token_ids == self.scheduler.requests[new.req_id]._all_token_ids
        cached = output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                assert not is_second, "it is to come as a new one"
                blocks[name] = [[] for _ in blocks[name]]
            for held, new in zip(blocks[name], more or (), strict=more is not None):
                held.extend(new)
        for name in output.num_scheduled_tokens:
            theirs = self.scheduler.kv_cache_manager.get_block_ids(name)
            for held, known in zip(blocks[name], theirs, strict=True):
                assert len(held) == len(known), name
                # Blocks out of a window become null ones (0), which workers are not told.
                assert all(block in (0, own) for own, block in zip(held, known, strict=True)), name


class Engine:
    """Steps a scheduler as vLLM's `EngineCore` does, with up to `depth` steps in flight.

    Parameters
    ----------
    seconds : from tokens of prompts, decodes and context to the seconds of a step.
    """

    def __init__(self, scheduler, clock: Clock, *, depth: int = 1, noise: float = 0.0) -> None:
        self.scheduler, self.clock, self.depth = scheduler, clock, depth
        self.workers = Workers(scheduler)
        self.rng = random.Random(7)
        self.noise = noise
        self.drafts_most = False
        """Whether each decode has as many drafts as it may have, as a model makes them."""
        self.arrivals: deque[Request] = deque()
        self.tokens: dict[str, list[tuple[float, int]]] = {}
        self.ended: dict[str, list[Any]] = {}
        self.flying: deque[Any] = deque()
        self.free_at = clock.now
        self.num_steps = self.num_cached = self.num_accepted = 0

    def add(self, *requests: Request) -> None:
        self.arrivals.extend(requests)

    def run(self, most_steps: int = 200_000) -> None:
        """Serve all that was added."""
        self.arrivals = deque(sorted(self.arrivals, key=lambda request: request.arrival_time))
        while self.arrivals or self.scheduler.has_requests() or self.flying:
            self._arrive()
            if not self.scheduler.has_requests() and not self.flying:
                self.clock.now = max(self.clock.now, self.arrivals[0].arrival_time)
                continue
            self.step()
            self.num_steps += 1
            assert self.num_steps < most_steps, "it stands still"

    def step(self) -> None:
        scheduler, clock = self.scheduler, self.clock
        if scheduler.has_requests():
            output = scheduler.schedule()
            self.workers.hear(output)
            self.num_cached += sum(each.num_computed_tokens for each in output.scheduled_new_reqs)
            begin = max(clock.now, self.free_at)
            self.free_at = begin + self._seconds(output)
            samples = [
                name
                for name in output.num_scheduled_tokens
                if scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens
            ]
            self.flying.append((output, samples, self.free_at))
            if len(self.flying) < self.depth and output.total_num_scheduled_tokens:
                return
        output, samples, end = self.flying.popleft()
        clock.now = max(clock.now, end)
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sample(output, name) if name in samples else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self._hear(scheduler.update_from_output(output, result))
        if scheduler.num_spec_tokens and self.depth == 1:
            most = scheduler.num_spec_tokens
            nums = [most if self.drafts_most else self.rng.randrange(most + 1) for _ in samples]
            drafts = [self._tokens(num) for num in nums]
            scheduler.update_draft_token_ids(DraftTokenIds(list(samples), drafts))

    def _sample(self, output, name: str) -> list[int]:
        """Return the tokens that a row samples; of its drafts, some are accepted."""
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        num_accepted = self.rng.randrange(len(drafts) + 1) if drafts else 0
        self.num_accepted += num_accepted
        return self._tokens(1 + num_accepted)

    def _tokens(self, num: int) -> list[int]:
        return [self.rng.randrange(3, 1000) for _ in range(num)]

    def _hear(self, outputs) -> None:
        for each in outputs.values():
            for output in each.outputs:
                got = self.tokens.setdefault(output.request_id, [])
                got += [(self.clock.now, token) for token in output.new_token_ids]
                if output.finish_reason is not None:
                    self.ended.setdefault(output.request_id, []).append(output)

    def _seconds(self, output) -> float:
        num = output.total_num_scheduled_tokens
        if not num:
            return 0.0
        decodes = sum(each == 1 for each in output.num_scheduled_tokens.values())
        seconds = 0.01 + 3e-4 * (num - decodes) + 2e-4 * decodes
        return float(seconds * self.rng.lognormvariate(0.0, self.noise))

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0].arrival_time <= self.clock.now:
            self.scheduler.add_request(self.arrivals.popleft())


def check_ended(engine: Engine, requests, refused=()) -> None:
    """Check that all ended once with all their tokens, and that no block is lost."""
    for request in requests:
        ends = engine.ended.get(request.request_id, [])
        assert len(ends) == 1, (request.request_id, ends)
        if request.request_id in refused:
            continue
        assert len(engine.tokens[request.request_id]) == request.max_tokens, request.request_id
    scheduler = engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.requests
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a block is lost"
