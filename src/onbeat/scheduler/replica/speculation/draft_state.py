"""What drafting remembers of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftState:
    """The drafts of one request, as `RequestState.draft`."""

    num_drafted: int = 0
    """Drafts verified so far."""
    num_accepted: int = 0
    """Of these, tokens that became output."""
    num_ready: int | None = None
    """Drafts that the proposer has for its next step; None where it makes any number or none are known."""
    num_read: int = 0
    """Its tokens that a model which makes drafts has read once all planned steps have run."""
    read_life: int = 0
    """How often it had been preempted when they were counted: a preemption makes that model forget it."""

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of a delivery."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
