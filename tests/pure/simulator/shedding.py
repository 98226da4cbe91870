"""A scheduler that refuses, gives up and relegates requests by rules that a test can foresee."""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.errors import SLOUnattainable
from onbeat.core.request import FinishReason, Request
from onbeat.core.slo import Fate, ShedMode
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.step_plan import Composer, StepPlan

PATIENCE = 3


class ByTheClock(Composer):
    """A composer that does not say how long its plans stay the same."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer

    def compose(self, plan: StepPlan) -> None:
        self._composer.compose(plan)


class SheddingScheduler(Scheduler):
    """Refuses what finds `PATIENCE` requests waiting, gives up what waits past its TTFT, relegates the rest.

    A policy with deadlines does the same with better judgement.
    """

    def __init__(self, config, step_time_model=None) -> None:
        super().__init__(config, step_time_model)
        self.policy = replace(self.policy, composer=ByTheClock(self.policy.composer))

    def add(self, request: Request, now: float | None = None) -> None:
        assert now is not None
        if request.shed is ShedMode.REJECT and len(self.waiting) >= PATIENCE:
            raise SLOUnattainable("too many wait", predicted_ttft=float(len(self.waiting)))
        super().add(request, now)

    def schedule(self, now):
        late = [
            state
            for state in self.waiting
            if state.request.shed is ShedMode.REJECT
            and not state.num_preemptions
            and now > state.request.arrival + state.request.slo.ttft
        ]
        for state in late:
            output = state.last_output(FinishReason.EXPIRED)
            output.fate, output.predicted_ttft = Fate.EXPIRED, 0.25
            self.planner.expired.append(output)
            self.table.drop(state)
        return super().schedule(now)

    def update(self, scheduled, result, now):
        outputs = super().update(scheduled, result, now)
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is not None and state.num_output_tokens == 1:
                output.predicted_ttft = 0.125
            if int(output.request_id) % 2 == 1:
                output.fate = Fate.RELEGATED
        return outputs
