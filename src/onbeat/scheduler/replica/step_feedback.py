"""What measured steps teach: the step-time model, and the costs and the slack that plans are made with."""

from __future__ import annotations

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.slo.rules import StepRules


class StepFeedback:
    """Tells whoever plans with step times how long steps took, in the order of their ends.

    Parameters
    ----------
    model : told of every step's time; None where nobody predicts.
    rules : their costs are taken anew from the model now and then, and they hear of steps that took far
        longer than planned; None where nobody plans with them.
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
        self.model, self.rules = model, rules
        self._run_side_by_side = run_side_by_side

    def observe(self, shape: BatchShape, planned_at: float, now: float, *, has_run: bool = True) -> None:
        """Learn from a step; one that took no time, or was told of before, teaches nothing.

        Parameters
        ----------
        planned_at, now : when it was planned, and when it ended; seconds.
        has_run : whether it came to its end; else its time says nothing.
        """
        begun, last_end = planned_at, self.last_end
        if begun < last_end and not self._run_side_by_side:
            begun = last_end
        self.last_end = now
        if self.model is None or not has_run or now <= begun:
            return
        self.model.observe(shape, now - begun)
        if self.rules is not None:
            self.rules.note_steps(begun, (now,))
