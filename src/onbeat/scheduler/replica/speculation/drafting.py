"""The seam between the scheduler and what decides on drafts."""

from __future__ import annotations

from typing import Protocol

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SpeculationConfig
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.speculation.fixed import FixedDrafts
from onbeat.scheduler.replica.speculation.goodput import GoodputDrafts
from onbeat.scheduler.replica.step_plan import StepPlan


class Drafting(Protocol):
    """Decides how many draft tokens each decode row of a step verifies."""

    def plan(self, plan: StepPlan) -> None:
        """Set `plan.num_drafts`, one number for each of `plan.decodes`, and `plan.expected_tokens`.

        It comes last: rows, chunks and admissions are settled. Drafts take what they leave: tokens
        (`num_tokens_left`), KV blocks (`take_block`), and time (`budget`). Nothing but the plan changes.
        """
        ...

    def commit(self, plan: StepPlan) -> None:
        """Hear that a step with decodes is carried out as planned."""
        ...

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn what became of a row that delivered tokens.

        Parameters
        ----------
        num_drafted : drafts that were verified; 0 where none were asked for, or none could be proposed.
        num_accepted : of these.
        num_available : drafts that are ready for the request's next step; None where any number can be made.
        """
        ...

    def finish(self, state: RequestState) -> None:
        """Learn how long an answer was: of a request that has all its tokens."""
        ...


def make_drafting(
    config: SpeculationConfig, model: StepTimeModel | None, *, quantile: float | None = None
) -> Drafting:
    """Return what plans drafts.

    Parameters
    ----------
    model : predicts step times; None without predictions.
    quantile : of a step's time that the policy plans with; None is the mean.

    Raises
    ------
    ConfigError : adaptive lengths without a step-time model.
    """
    if config.draft_length == "fixed":
        return FixedDrafts(config)
    if model is None:
        raise ConfigError(
            "draft_length 'adaptive' weighs drafts against predicted step times, but nothing predicts them; "
            "give a step-time model, or set draft_length to 'fixed'"
        )
    return GoodputDrafts(config, model, quantile=quantile)
