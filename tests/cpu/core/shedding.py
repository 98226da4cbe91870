"""An engine whose scheduler refuses and gives up requests by rules that a test can foresee."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onbeat.core.errors import SLOUnattainable
from onbeat.core.protocols import EngineInfo
from onbeat.core.request import FinishReason
from onbeat.core.slo import Fate, ShedMode
from onbeat.core.step_stats import SchedulerState
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.fake_runner import FakeRunner, fake_info


class SheddingScheduler(Scheduler):
    """Refuses requests whose TTFT objective is below 50 ms, and gives up those that wait for longer."""

    num_rejected = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.planner.state = self._how_it_stands  # type: ignore[method-assign]

    def add(self, request, now=None):
        assert now is not None
        if request.shed is ShedMode.REJECT and request.slo.ttft < 0.05:
            self.num_rejected += 1
            raise SLOUnattainable(
                f"the first token would come after 0.75 s, not {request.slo.ttft:g} s",
                predicted_ttft=0.75,
                retry_after=1.5,
            )
        super().add(request, now)

    def schedule(self, now):
        for state in list(self.waiting):
            request = state.request
            if request.shed is ShedMode.REJECT and now > request.arrival + request.slo.ttft:
                output = state.last_output(FinishReason.EXPIRED)
                output.fate, output.error = Fate.EXPIRED, "its TTFT objective passed in the queue"
                self.planner.expired.append(output)
                self.table.drop(state)
        return super().schedule(now)

    def _how_it_stands(self) -> SchedulerState:
        return SchedulerState(num_rejected={"slo_unattainable": self.num_rejected}, decode_slacks=[0.5])


def shedding_core(
    config: SchedulerConfig, *, step_seconds: float = 0.0, depth: int = 1, **options
) -> EngineCore:
    executor = ThreadExecutor(FakeRunner(step_seconds))
    return EngineCore(SheddingScheduler(config), executor, max_in_flight_steps=depth, **options)


def build_shedding_engine(
    on_progress: Callable[[str], None], *, step_seconds: float = 0.0, depth: int = 1, **changes
) -> tuple[EngineCore, EngineInfo]:
    values = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "policy": "sarathi", **changes}
    config = SchedulerConfig(**({"num_blocks": 256, "max_model_len": 1024} | values))
    return shedding_core(config, step_seconds=step_seconds, depth=depth), fake_info(config)
