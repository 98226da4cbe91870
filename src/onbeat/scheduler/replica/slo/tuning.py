"""What the SLO policy may be varied by in a study; a server runs the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.slo import SLOMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOTuning:
    """One set of these for every load, model and machine: nothing here is to be tuned by hand."""

    quantile: float | None = 0.95
    """Of the step time, to plan with; None is the mean."""
    gap_quantile: float | None = 0.99
    """Likewise in `gap` mode: nothing earned makes up for a longer step there, and one
    in a hundred is what a request's P99 gap allows."""
    skips: bool = True
    """Whether streams with slack may sit out a step when prompts are in danger."""
    looks_ahead: bool = True
    """Whether a stream sits out only if the step after this one can still have its natural length."""
    paces: bool = True
    """Whether steps are kept short while prompts have time."""
    busy: float = 0.6
    """Utilisation from which steps are kept long, not short, whatever time prompts have: what is not done
    now will be missing soon."""
    pace_margin: float = 2.0
    """How much faster than needed prompts are run while they have time."""
    caution: float = 0.25
    """Share of a prompt's slack that shorter ones may use up by going first; 0 keeps to the deadlines."""
    triages: bool = True
    """Whether prompts are left behind for the sake of others."""
    best_effort_share: float = 0.02
    """Of the time, for best effort that has waited for `aging`, however little is left over."""
    aging: float = 30.0
    """Seconds after its arrival from which a prompt without a deadline is owed that share."""
    length_quantile: float | None = 0.9
    """Of the output lengths of late, to foresee memory with; None takes `max_tokens` for the length."""
    reach: float = 0.125
    """Share of the shortest TTFT objective of late that a step with more than an efficient chunk may take."""
    step_margin: float = 0.5
    """Steps by which prompts are planned to be early: one that is done within a step waits for its end."""

    def quantile_in(self, mode: SLOMode) -> float | None:
        """Return the quantile of the step time to plan with in a mode; None is the mean."""
        return self.gap_quantile if mode == "gap" else self.quantile
