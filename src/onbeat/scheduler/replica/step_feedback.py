"""What measured steps teach: the step-time model, and the costs and the slack that plans are made with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onbeat.core.step import BatchShape
from onbeat.core.step_time import RunLearner, StepTimeModel, observe_each
from onbeat.scheduler.replica.slo.rules import StepRules


class StepFeedback:
    """Tells whoever plans with step times how long steps took, in the order of their ends.

    Parameters
    ----------
    model : told of every step's time; None where nobody predicts.
    rules : their costs are taken anew from the model now and then, and they hear of steps that may have taken
        far longer than planned; None where nobody plans with them.
    run_side_by_side : whether steps of a pipeline do not wait for one another.

    Attributes
    ----------
    last_end : when the last step ended, seconds.
    """

    def __init__(
        self,
        model: StepTimeModel | None,
        rules: StepRules | None,
        *,
        run_side_by_side: bool,
    ) -> None:
        self.last_end = float("-inf")
        self._model = model
        self._rules = rules
        self._run_side_by_side = run_side_by_side
        self._observe_run = (
            model.observe_run
            if isinstance(model, RunLearner)
            else None
            if model is None
            else partial(observe_each, model)
        )
        self._last_known = float("-inf")
        """When the last run ended that is told of once more; the model knows it."""

    def observe(
        self,
        shape: BatchShape,
        planned_at: float,
        ends: Sequence[float],
        *,
        has_run: bool = True,
        is_told_again: bool = False,
    ) -> None:
        """Learn from the runs of a step.

        Parameters
        ----------
        shape : of the last run; each before read a token less of every row's context.
        planned_at : seconds.
        ends : when the runs ended, seconds.
        has_run : whether the step came to its end; else its time says nothing.
        is_told_again : whether all runs of the step are told of once more, when they are over.
        """
        last_end, self.last_end = self.last_end, ends[-1]
        observe_run, model = self._observe_run, self._model
        if observe_run is None or model is None or not has_run:
            return
        begun = planned_at
        if begun < last_end and not self._run_side_by_side:
            begun = last_end
        num_rows, new_ends = shape.num_lm_head_rows, ends
        if ends[0] <= self._last_known:
            new_ends = [end for end in ends if end > self._last_known]
        if is_told_again:
            self._last_known = ends[-1]
        shape.decode_context_tokens -= len(new_ends) * num_rows
        rules = self._rules
        if rules is not None:
            if new_ends and new_ends[-1] - begun > rules.longest_planned:  # hardly ever
                rules.note_stalls(begun, new_ends)
            taken_after = rules.work.count(len(new_ends))
            if taken_after:
                observe_run(shape, begun, new_ends[:taken_after])
                begun, new_ends = new_ends[taken_after - 1], new_ends[taken_after:]
                rules.work.take()
        if new_ends:
            observe_run(shape, begun, new_ends)
