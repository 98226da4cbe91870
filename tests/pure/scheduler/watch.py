"""A scheduler under `slo` that is watched while time passes."""

from __future__ import annotations

from typing import Any

from onbeat.core.request import FinishReason, RequestOutput
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request

ROOMY = {"num_blocks": 4096, "max_num_seqs": 64}


INFEASIBLE = SLO(ttft=2e-3, tbt=0.1)
"""Shorter than the prompts here take on an idle machine."""


class Watch(TimedDriver):
    """Remembers what was predicted of whom."""

    def __init__(self, model: FakeStepTime | None = None, **changes) -> None:
        super().__init__(make_config(**(ROOMY | changes)), model or FakeStepTime())
        self.predicted: dict[str, float] = {}
        self.expired: list[RequestOutput] = []

    def receive(self, outputs) -> None:
        for output in outputs:
            if output.predicted_ttft is not None:
                assert output.request_id not in self.predicted, "told once"
                self.predicted[output.request_id] = output.predicted_ttft
            if output.finish_reason is FinishReason.EXPIRED:
                self.expired.append(output)
        super().receive(outputs)

    def ttft(self, request_id: str) -> float:
        return self.times[request_id][0] - self.requests[request_id].arrival

    def ask(self, request_id: str, num_prompt: int, *, max_tokens: int = 4, **changes):
        """Let a request come now that would rather be refused than late; return the refusal, if any."""
        values: dict[str, Any] = {"arrival": self.now, "shed": ShedMode.REJECT} | changes
        self.rejected.pop(request_id, None)
        self.add(make_request(request_id, num_prompt, max_tokens, **values))
        return self.rejected.get(request_id)

    def crowd(self, count: int, num_prompt: int = 900, **changes) -> None:
        """Prompts that nobody may judge, due before all others."""
        for _ in range(count):
            values: dict[str, Any] = {
                "slo": SLO(ttft=0.05),
                "shed": ShedMode.OFF,
                "arrival": self.now,
            } | changes
            self.add(make_request(f"crowd-{len(self.requests)}", num_prompt, 2, **values))


class SlowedModel(FakeStepTime):
    """Steps take `factor` times as long, and the model knows it."""

    factor = 1.0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return self.factor * super().step_time(shape, q)


class LearningModel(FakeStepTime):
    """Believes that steps take `factor` times as long until it has seen one."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return self._factor * super().step_time(shape, q)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self._factor = 1.0
