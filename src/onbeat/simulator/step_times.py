"""What a step costs in virtual time."""

from __future__ import annotations

from math import inf
from typing import NoReturn

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel


def predict(model: StepTimeModel, shape: BatchShape) -> float:
    """Return the predicted seconds of a step.

    Raises
    ------
    ConfigError : the prediction is not a finite time above 0.
    """
    seconds = model.step_time(shape)
    if not 0.0 < seconds < inf:
        refuse(seconds, shape)
    return seconds


def refuse(seconds: float, shape: BatchShape) -> NoReturn:
    """Raise ConfigError for a prediction with which virtual time would stand still or end."""
    raise ConfigError(
        f"the step-time model predicts {seconds} s for {shape}; a step must take a finite time above 0: "
        "check the profile or the model's parameters"
    )
