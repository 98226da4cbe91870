"""An engine without a model: tokens are a function of position, steps take a given time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from onbeat.core.errors import ConfigError, EngineDead
from onbeat.core.protocols import EngineInfo
from onbeat.core.request import Adapter, Request, TokenLogprobs
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import PendingStep, ThreadExecutor, done_step
from onbeat.engine.kv_access import BlockMemory, KVLayout, KVRegion
from onbeat.engine.progress import Detail
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.fake_step_time import LinearStepTime
from tests.fakes_engine import LOGPROB, VOCAB_SIZE


class FakeRunner:
    """Token at position p is p % 97, and its alternatives are the tokens after it.

    A request named `bad...` fails, one named `boom...` its whole step, one named `dead...` the engine.

    Parameters
    ----------
    step_seconds : how long a step takes.
    burns : whether a step takes that much time of a processor, and not of the clock.
    """

    def __init__(self, step_seconds: float = 0.0, *, burns: bool = False) -> None:
        self.step_seconds = step_seconds
        self._burns = burns
        self._num_logprobs: dict[str, int | None] = {}
        self._scored: dict[str, Request] = {}

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        return done_step(self.execute(scheduled))

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        end = time.thread_time() + self.step_seconds
        while self._burns and time.thread_time() < end:
            pass
        if not self._burns:
            time.sleep(self.step_seconds)
        if any(row.request_id.startswith("boom") for row in scheduled.rows):
            raise RuntimeError("boom")
        if any(row.request_id.startswith("dead") for row in scheduled.rows):
            raise EngineDead("rank 1 has ended")
        failed = {row.request_id: "bad logits" for row in scheduled.rows if row.request_id.startswith("bad")}
        sampled = [
            [] if row.request_id in failed else [(row.num_computed_tokens + row.num_new_tokens) % 97]
            for row in scheduled.rows
            if row.samples
        ]
        scores = self._prompt_logprobs(scheduled)
        logprobs = self._logprobs(scheduled, sampled)
        return ModelRunnerOutput(sampled, logprobs, failed=failed or None, prompt_logprobs=scores)

    def _prompt_logprobs(self, scheduled: SchedulerOutput) -> dict[str, list[TokenLogprobs]] | None:
        """Return those of the prompts that end with a step, each token's with its place in the prompt."""
        for admitted in scheduled.admitted:
            if admitted.request.num_prompt_logprobs is not None and not admitted.output_token_ids:
                self._scored[admitted.request.request_id] = admitted.request
        ended = [self._scored.pop(row.request_id, None) for row in scheduled.rows if row.samples]
        return {
            request.request_id: [
                replace(_token_logprobs(place % 97, request.num_prompt_logprobs or 0), rank=place)
                for place in range(1, len(request.prompt_token_ids))
            ]
            for request in ended
            if request is not None
        } or None

    def _logprobs(
        self, scheduled: SchedulerOutput, sampled: list[list[int]]
    ) -> list[list[TokenLogprobs] | None] | None:
        for admitted in scheduled.admitted:
            self._num_logprobs[admitted.request.request_id] = admitted.request.sampling.num_logprobs
        numbers = [self._num_logprobs.get(row.request_id) for row in scheduled.rows if row.samples]
        if all(number is None for number in numbers):
            return None
        return [
            None if number is None else [_token_logprobs(token_id, number) for token_id in token_ids]
            for token_ids, number in zip(sampled, numbers, strict=True)
        ]


def _token_logprobs(token_id: int, num_alternatives: int) -> TokenLogprobs:
    others = tuple((token_id + k) % 97 for k in range(num_alternatives))
    return TokenLogprobs(token_id, LOGPROB, others, tuple(LOGPROB - k for k in range(num_alternatives)))


class AdapterRunner(FakeRunner):
    """Has adapters: a token of a request with one is one more. One whose path has `bad` cannot be loaded."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        super().__init__(step_seconds)
        self.adapters: set[int] = set()
        self._needs: dict[str, Adapter | None] = {}

    def load_adapter(self, adapter: Adapter, others: Collection[int]) -> None:
        self.adapters.intersection_update(others)
        if "bad" in adapter.path:
            raise ConfigError(f"the LoRA adapter {adapter.name!r} ({adapter.path}) cannot be loaded")
        self.adapters.add(adapter.number)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(scheduled)
        self._needs |= {each.request.request_id: each.request.adapter for each in scheduled.admitted}
        sampling = iter(result.sampled_token_ids)
        for row in scheduled.rows:
            adapter = self._needs[row.request_id]
            assert adapter is None or adapter.number in self.adapters
            if row.samples and adapter is not None:
                tokens = next(sampling)
                tokens[0] = (tokens[0] + 1) % 97
            elif row.samples:
                next(sampling)
        return result


class KeepingRunner(FakeRunner):
    """Keeps KV: a number for each position. A token whose request lacks any is another than it should be."""

    def __init__(self, config: SchedulerConfig, step_seconds: float = 0.0, *, backend: str = "fake") -> None:
        super().__init__(step_seconds)
        self._backend = backend
        self.entries = np.zeros((config.num_blocks, config.block_size), np.int64)
        self._tables: dict[str, list[int]] = {}

    def kv_regions(self) -> list[KVRegion]:
        return [KVRegion(self.entries.ctypes.data, self.entries[0].nbytes)]

    def kv_memory(self) -> BlockMemory:
        num_blocks, block_size = self.entries.shape
        layout = KVLayout(
            model="fake",
            weights="none",
            dtype="int64",
            block_size=block_size,
            block_bytes=self.entries[0].nbytes,
            backend=self._backend,
        )
        return BlockMemory(self, layout, num_blocks=num_blocks)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(scheduled)
        for admitted in scheduled.admitted:
            self._tables[admitted.request.request_id] = list(admitted.block_ids)
        sampling = iter(result.sampled_token_ids)
        for row in scheduled.rows:
            table = self._tables[row.request_id]
            table += row.new_block_ids
            end = row.num_computed_tokens + row.num_new_tokens
            places = np.arange(end)
            held = np.array(table)[places // self.entries.shape[1]], places % self.entries.shape[1]
            new = slice(row.num_computed_tokens, end)
            self.entries[held[0][new], held[1][new]] = places[new] + 1
            if row.samples and (tokens := next(sampling)):
                tokens[0] += 1000 * bool((self.entries[held] != places + 1).any())
        return result


def fake_info(config: SchedulerConfig, *, moves_streams: bool = False) -> EngineInfo:
    return EngineInfo(
        model_name="fake",
        architecture="Fake",
        vocab_size=VOCAB_SIZE,
        limits=config.replica_limits(device="none", moves_streams=moves_streams),
        policy=config.policy,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype="none",
        priority_scheduling=config.scheduling_policy == "priority",
    )


def build_fake_engine(
    on_progress: Callable[[str], None],
    *,
    step_seconds: float = 0.0,
    burns: bool = False,
    niceness: int = 0,
    max_in_flight_steps: int = 1,
    reports_load: bool = False,
    keeps_kv: bool = False,
    max_loras: int = 0,
    kv_backend: str = "fake",
    weights: str = "",
    **changes,
) -> tuple[EngineCore, EngineInfo]:
    on_progress("building a fake engine")
    on_progress(Detail("by hand"))
    os.nice(niceness)  # before its threads start, which inherit it
    values = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "policy": "sarathi", **changes}
    config = SchedulerConfig(**({"num_blocks": 256, "max_model_len": 1024} | values))
    keeping = KeepingRunner(config, step_seconds, backend=kv_backend) if keeps_kv else None
    runner = keeping or (AdapterRunner(step_seconds) if max_loras else FakeRunner(step_seconds, burns=burns))
    core = EngineCore(
        Scheduler(config, LinearStepTime()),
        ThreadExecutor(runner),
        max_in_flight_steps=max_in_flight_steps,
        reports_load=reports_load,
        kv_memory=None if keeping is None else keeping.kv_memory,
    )
    info = fake_info(config, moves_streams=keeps_kv)
    return core, replace(info, max_loras=max_loras, file_digests={"weights": weights})
