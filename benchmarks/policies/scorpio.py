"""SCORPIO's two guards (Tang et al., arXiv 2505.23022), with the step-time model for their predictors.

- *TTFT guard*: prompts go by deadline. One that would be late behind those before it is dropped: it ends
  where it asks for that, else it is best effort.
- *TPOT guard*: beside the tightest TBT objective T, a stream with the objective t earns a credit of T / t a
  step, and decodes once it has a whole one. The credits of a step are its *virtual batch*, the decodes that
  it has in the mean. A prompt comes in while a step of so many, its own included, takes T at most.

It departs from the paper in these points: prompts come in chunks, as many tokens as T leaves; who has no TBT
objective decodes in each step; whoever can go on is never dropped, only who has not begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf

from benchmarks.policies.triaged import TriagedBudget, by_deadlines
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.view import PromptJob
from onbeat.scheduler.replica.step_plan import StepPlan

WHOLE = 1 - 1e-9
"""A credit that is enough: sums of shares are rounded."""


class Scorpio(TriagedBudget):
    """Drops prompts that would be late, admits by the virtual batch, and lets streams decode by credits."""

    def __init__(self, model: StepTimeModel) -> None:
        super().__init__(model, by_time=True, by_deadline=True)
        self._credits: dict[str, float] = {}

    def due(self, decodes: list[RequestState]) -> list[RequestState]:
        """Return the streams that have a whole credit; the tightest always do."""
        tightest = _tightest(decodes)
        return [state for state in decodes if self._earned(state, tightest) >= WHOLE]

    def split(
        self, plan: StepPlan, jobs: list[PromptJob], share: float
    ) -> tuple[list[PromptJob], list[PromptJob]]:
        """Return the prompts that both guards let in; who waits for room in the batch is in neither part."""
        end, kept, batch, is_full = plan.now, [], list(plan.running), False
        for job in jobs:
            state = job.state
            is_new = state.status is RequestStatus.WAITING
            if is_new and not state.is_protected and end + job.seconds / share > job.deadline:
                plan.infeasible.append(state)
                continue
            is_full = is_full or (is_new and not self._keeps([*batch, state]))
            if is_new and is_full:
                continue
            batch += [state] if is_new else []
            end += job.seconds / share
            kept.append(job)
        return kept, []

    def commit(self, plan: StepPlan) -> None:
        """Count the credits of a step, and take what the model has learnt."""
        super().commit(plan)
        tightest, decoded = _tightest(plan.decodes), {id(state) for state in plan.decodes}
        self._credits = {
            state.request_id: max(earned - 1, 0.0) if id(state) in decoded else min(earned, 1.0)
            for state in plan.running
            for earned in (self._earned(state, tightest),)
        }

    def _keeps(self, batch: list[RequestState]) -> bool:
        """Whether the virtual batch of these, with contexts as they are, keeps their tightest objective."""
        tightest, num = _tightest(batch), len(batch)
        num_virtual = ceil(sum([_share(state, tightest) for state in batch]))
        context = sum([state.num_tokens for state in batch]) * num_virtual // num
        return num == 1 or self.cost_model.of(BatchShape.of_decodes(num_virtual, context)) <= tightest

    def _earned(self, state: RequestState, tightest: float) -> float:
        return self._credits.get(state.request_id, 0.0) + _share(state, tightest)


def _tightest(states: Iterable[RequestState]) -> float:
    """Return the tightest TBT objective that can still be kept."""
    return min([state.slo.tbt_objective for state in states if not state.slo.is_best_effort], default=inf)


def _share(state: RequestState, tightest: float) -> float:
    """Return the credit that a stream earns in a step."""
    tbt = state.slo.tbt_objective
    return min(1.0, tightest / tbt) if tbt < inf else 1.0


SCORPIO = by_deadlines(Scorpio)
