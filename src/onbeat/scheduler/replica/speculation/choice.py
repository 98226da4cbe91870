"""From a configuration to what decides on drafts."""

from __future__ import annotations

from onbeat.scheduler.config import SpeculationConfig
from onbeat.scheduler.replica.speculation.drafting import Drafting
from onbeat.scheduler.replica.speculation.fixed import FixedDrafts


def make_drafting(config: SpeculationConfig | None) -> Drafting | None:
    """Return what plans drafts; None where nothing is speculated."""
    if config is None:
        return None
    return FixedDrafts(config.num_speculative_tokens)
