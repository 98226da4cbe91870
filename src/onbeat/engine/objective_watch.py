"""Whether this machine can meet the objectives of classes: said at start, corrected by the steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from onbeat.core.slo import SLO
from onbeat.core.step import StepStats
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.idle_check import IdleCheck

logger = logging.getLogger("onbeat.engine")

_SETTLED_SECONDS = 10.0
"""How long another verdict must last before it is said: a machine that other work disturbs comes and goes."""
_SETTLED_STEPS = 64
"""And how many steps the step-time model must have been told of meanwhile."""
_CLOSE = 1.1
"""Within this factor of the objective a verdict stays what it was."""


class ObjectiveWatch:
    """Holds every class against an idle machine, as the step-time model knows it by now.

    Parameters
    ----------
    check : what a request does on an idle machine.
    model : learns from steps.
    classes : objectives by name.
    """

    def __init__(self, check: IdleCheck, model: StepTimeModel, classes: Mapping[str, SLO]) -> None:
        self._check = check
        self._model = model
        self._classes = classes
        self._is_missed = {name: check.is_missed(model, slo) for name, slo in classes.items()}
        self._changed: dict[str, tuple[float, int]] = {}
        """Class with another verdict than the last one -> end of the first step that gave it, steps since."""

    def misses(self) -> list[str]:
        """Return a sentence for each objective that is missed, as the model knows the machine now."""
        return self._check.misses(self._model, self._classes)

    def judge(self, stats: StepStats) -> None:
        """Look again after a step, of which the model has been told; say in the log what has changed."""
        for name, slo in self._classes.items():
            was_missed = self._is_missed[name]
            margin = 1 / _CLOSE if was_missed else _CLOSE
            if self._check.is_missed(self._model, slo, margin) == was_missed:
                self._changed.pop(name, None)
                continue
            since, num_steps = self._changed.get(name, (stats.end, 0))
            self._changed[name] = since, num_steps + 1
            if stats.end - since >= _SETTLED_SECONDS and num_steps >= _SETTLED_STEPS:
                del self._changed[name]
                self._is_missed[name] = not was_missed
                self._say(name, slo)

    def _say(self, name: str, slo: SLO) -> None:
        if not self._is_missed[name]:
            speed = self._check.speed(self._model, slo)
            logger.info("class %s is feasible after all: %s", name, speed)
            return
        for miss in self._check.misses(self._model, {name: slo}):
            logger.warning("%s", miss)
