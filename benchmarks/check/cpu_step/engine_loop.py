"""The engine's own step loop in this process: how much of its time lies outside the forward pass."""

from __future__ import annotations

import numpy as np

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import StepStats
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.load import LoadedModel
from onbeat.engine.step_time_source import choose_step_time
from onbeat.scheduler.replica.scheduler import Scheduler

from .driver import ForwardClock, no_collection
from .host import HostShare, host_share

PROMPT_TOKENS, OUTPUT_TOKENS = 192, 384


class EngineLoop:
    """Scheduler, executor and step loop around a loaded model, as in the engine process.

    Parameters
    ----------
    max_in_flight_steps : 2 plans a step while the one before runs.
    """

    def __init__(self, loaded: LoadedModel, *, max_in_flight_steps: int) -> None:
        step_time = choose_step_time("roofline", loaded, lambda _: None)
        self._clock = ForwardClock(loaded.runner.forward)
        self._vocab_size = loaded.config.vocab_size
        self._core = EngineCore(
            Scheduler(loaded.limits, step_time.model),
            ThreadExecutor(loaded.runner),
            max_in_flight_steps=max_in_flight_steps,
            judges=[step_time.watch] if step_time.watch else [],
        )

    def close(self) -> None:
        self._core.shutdown()
        self._clock.stop()

    def measure(self, batch: int, seed: int) -> HostShare:
        """Serve `batch` requests from the first token to the last, and look at their decodes."""
        rng = np.random.default_rng(seed)
        for index in range(batch):
            self._core.add(
                Request(
                    request_id=f"{seed}-{index}",
                    prompt_token_ids=tuple(rng.integers(0, self._vocab_size, PROMPT_TOKENS).tolist()),
                    sampling=SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS),
                )
            )
        self._clock.seconds.clear()
        with no_collection():
            steps = self._run()
        return host_share(steps, self._clock.seconds, batch)

    def _run(self) -> list[StepStats]:
        steps = []
        while self._core.has_work:
            message = self._core.step()
            if message is not None and message.stats is not None:
                steps.append(message.stats)
        return steps
