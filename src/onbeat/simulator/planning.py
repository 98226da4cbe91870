"""The scheduler of a virtual replica, and how it is asked for steps."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from onbeat.core.errors import ConfigError
from onbeat.core.step import SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.replica.scheduler import Scheduler


@runtime_checkable
class Learner(Protocol):
    """A step-time model that each replica can have for itself, to learn from its own steps."""

    def with_learning(self) -> StepTimeModel:
        """Return the same model as it was before any step."""
        ...


def make_scheduler(config: SchedulerConfig, step_time: StepTimeModel, *, predicts: bool = False) -> Scheduler:
    """Return the scheduler of one replica.

    A policy that plans by predicted times, or weighs drafts by them, gets a model of its own, which it
    corrects by the steps that it sees, as a live engine does; what the device does is not its to see.

    Parameters
    ----------
    step_time : what the device is simulated by.
    predicts : whether somebody reads predictions of its load, as of a live engine's under any policy; then
        it has a model wherever there is one that can be handed to it.

    Raises
    ------
    ConfigError : a policy that needs predictions, and a model that cannot be handed to it.
    """
    speculation = config.speculation
    weighs_drafts = speculation is not None and speculation.draft_length == "adaptive"
    needs_model = composition(config.policy).needs_step_time or weighs_drafts
    if not (needs_model or (predicts and isinstance(step_time, Learner))):
        return Scheduler(config)
    if not isinstance(step_time, Learner):
        raise ConfigError(
            f"{'adaptive drafting' if weighs_drafts else f'policy {config.policy!r}'} predicts the times of "
            f"steps, but {type(step_time).__name__} "
            "cannot learn from them (it has no with_learning); use a perfmodel.Predictor"
        )
    return Scheduler(config, step_time.with_learning())


def plan_step(scheduler: Scheduler, now: float) -> SchedulerOutput | None:
    """Plan a step; None where nothing can run before something else happens.

    A scheduler may also plan nothing because it only preempted requests or ended some: the next plan, at the
    same time, is another.
    """
    num_unfinished = scheduler.num_unfinished
    while num_unfinished:
        num_preemptions, num_before = scheduler.num_preemptions, num_unfinished
        scheduled = scheduler.schedule(now)
        if scheduled is not None:
            return scheduled
        num_unfinished = scheduler.num_unfinished
        if (scheduler.num_preemptions, num_unfinished) == (num_preemptions, num_before):
            return None
    return None
