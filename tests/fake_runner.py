"""An engine without a model: tokens are a function of position, steps take a given time."""

from __future__ import annotations

import time
from collections.abc import Callable

from onbeat.core.errors import EngineDead
from onbeat.core.protocols import EngineInfo
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.scheduler import Scheduler
from tests.fake_step_time import LinearStepTime


class FakeRunner:
    """Token at position p is p % 97.

    A request named `bad...` fails, one named `boom...` its whole step, one named `dead...` the engine.

    Parameters
    ----------
    step_seconds : how long a step takes.
    idle_checks : `check_alive` finds the engine dead once it has been called as often; None is never.
    """

    def __init__(self, step_seconds: float = 0.0, *, idle_checks: int | None = None) -> None:
        self.step_seconds = step_seconds
        self._idle_checks = idle_checks

    def check_alive(self) -> None:
        if self._idle_checks is not None:
            self._idle_checks -= 1
            if self._idle_checks <= 0:
                raise EngineDead("it ended while nothing ran")

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
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
        return ModelRunnerOutput(sampled, failed=failed or None)


def fake_info(config: SchedulerConfig) -> EngineInfo:
    return EngineInfo(
        model_name="fake",
        architecture="Fake",
        vocab_size=97,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        policy=config.policy,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        device="none",
        dtype="none",
        priority_scheduling=config.scheduling_policy == "priority",
    )


def build_fake_engine(
    on_progress: Callable[[str], None],
    *,
    step_seconds: float = 0.0,
    max_in_flight_steps: int = 1,
    idle_checks: int | None = None,
    **changes,
) -> tuple[EngineCore, EngineInfo]:
    on_progress("building a fake engine")
    values = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "policy": "sarathi", **changes}
    config = SchedulerConfig(**({"num_blocks": 256, "max_model_len": 1024} | values))
    runner = FakeRunner(step_seconds, idle_checks=idle_checks)
    executor = ThreadExecutor(runner, check_alive=runner.check_alive)
    return EngineCore(
        Scheduler(config, LinearStepTime()), executor, max_in_flight_steps=max_in_flight_steps
    ), fake_info(config)
