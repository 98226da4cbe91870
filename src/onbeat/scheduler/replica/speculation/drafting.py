"""The seam between the scheduler and what decides on drafts."""

from __future__ import annotations

from itertools import compress
from typing import Protocol

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.speculation.acceptance import AcceptanceRates
from onbeat.scheduler.replica.speculation.draft_limits import fit_blocks, most_drafts
from onbeat.scheduler.replica.speculation.goodput import GoodputDrafts, set_drafts
from onbeat.scheduler.replica.speculation.reading import DraftReading
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.scheduler_config import SpeculationConfig


class FixedDrafts:
    """Plans as many drafts as there may be for every row, whatever the load (vLLM's way).

    Parameters
    ----------
    config : drafts of each row, and whether a model makes them.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._acceptance = AcceptanceRates(config.initial_acceptance)
        self._reading = DraftReading(config.max_catch_up_tokens)

    def plan(self, plan: StepPlan) -> None:
        """Give each row its drafts, first come first."""
        num_drafts = []
        for state in plan.decodes:
            most = max(0, min(most_drafts(state, self._config.num_speculative_tokens), plan.num_tokens_left))
            num_drafts.append(fit_blocks(plan, state, most))
            plan.num_tokens_left -= num_drafts[-1]
        set_drafts(plan, num_drafts, self._acceptance, runs_model=self._config.runs_model)
        plan.catch_ups = self._reading.catch_ups(compress(plan.decodes, num_drafts), plan.block_size)

    def commit(self, plan: StepPlan) -> None:
        """Count a step, and what is read for it."""
        self._acceptance.begin_step()
        self._reading.count(plan)

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn how many tokens to expect; the plan does not depend on it."""
        self._acceptance.observe(
            state, num_drafted=num_drafted, num_accepted=num_accepted, num_available=num_available
        )

    def finish(self, state: RequestState) -> None:
        """Need nothing: answers get their drafts however long they are."""


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
