"""What measured steps teach: the step-time model, the costs that plans are made with, and the stalls."""

from __future__ import annotations

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.queues import RunningList
from onbeat.scheduler.replica.slo.composer import SLOComposer


class StepFeedback:
    """Tells whoever plans with step times how long steps took, in the order of their ends.

    Parameters
    ----------
    model : told of every step's time; None where nobody predicts.
    slo : its costs are taken anew from the model now and then, and its stalls see long steps; None where the
        policy keeps no deadlines.
    running : whose shares of a step depend on the costs.
    run_side_by_side : whether steps of a pipeline do not wait for one another.

    Attributes
    ----------
    last_end : when the last step ended, seconds.
    """

    def __init__(
        self,
        model: StepTimeModel | None,
        slo: SLOComposer | None,
        running: RunningList,
        *,
        run_side_by_side: bool,
    ) -> None:
        self.last_end = float("-inf")
        self.model, self.slo = model, slo
        self._work = None if slo is None else slo.work
        self._stalls = None if slo is None else slo.stalls
        self._running = running
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
        model, slo, stalls = self.model, self.slo, self._stalls
        if model is None or not has_run or now <= begun:
            return
        # Hardly any step takes as long, and to ask would be a call a step.
        if stalls is not None and now - begun > stalls.shortest:
            stalls.note(begun, now, model.step_time(shape))
        model.observe(shape, now - begun)
        if slo is not None and self._work is not None and self._work.count(1):
            slo.refresh(self._running, now)
