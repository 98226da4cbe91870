"""From a configuration to what decides on drafts."""

from __future__ import annotations

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SpeculationConfig
from onbeat.scheduler.replica.speculation.adaptive import AdaptiveDrafts
from onbeat.scheduler.replica.speculation.drafting import Drafting
from onbeat.scheduler.replica.speculation.fixed import FixedDrafts


def make_drafting(
    config: SpeculationConfig | None, model: StepTimeModel | None, *, quantile: float | None = None
) -> Drafting | None:
    """Return what plans drafts; None where nothing is speculated.

    Parameters
    ----------
    model : predicts step times; None where nobody does.
    quantile : of a step's time that the policy plans with; None is the mean.

    Raises
    ------
    ConfigError : adaptive lengths without a step-time model.
    """
    if config is None:
        return None
    if config.draft_length == "fixed":
        return FixedDrafts(config)
    if model is None:
        raise ConfigError(
            "draft_length 'adaptive' weighs drafts against predicted step times, but nothing predicts them; "
            "give a step-time model, or set draft_length to 'fixed'"
        )
    return AdaptiveDrafts(config, model, quantile=quantile)
