"""The same number of drafts at every step."""

from __future__ import annotations

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.speculation.room import fit_blocks, most_drafts
from onbeat.scheduler.replica.step_plan import StepPlan


class FixedDrafts:
    """Plans as many drafts as there may be for every row, whatever the load (vLLM's way).

    Parameters
    ----------
    num_drafts : of each row.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def plan(self, plan: StepPlan) -> None:
        """Give each row its drafts, first come first."""
        for state in plan.decodes:
            most = max(0, min(most_drafts(state, self._num_drafts), plan.num_tokens_left))
            num = fit_blocks(plan, state, most)
            plan.num_tokens_left -= num
            plan.num_drafts.append(num)

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn nothing."""
