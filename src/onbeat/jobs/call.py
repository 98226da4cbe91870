"""What a caller says of a call's job, what the call gets of it, and how a job ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE, SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCall:
    """What a call says of the job that it is part of. Times are seconds of the request's clock."""

    job_id: str
    tenant: str | None = None
    """Whose job it is: nobody joins another's."""
    deadline: float | None = None
    """When the last call is to have ended; None if the call does not say."""
    e2e: float | None = None
    """The same, seconds from the arrival of the job's first call."""
    calls_left: int | None = None
    """Calls that follow this one, one after another; those made at once count as one. None: not known."""
    kind: str = ""
    """Jobs of a kind are expected to be alike."""


def call_seconds(left: float, own_work: float, later_work: float, pace: float) -> float:
    """Return what a call may take: all that the calls behind it do not usually need, else its share by work.

    A call that misses its share is served behind all others, and its job is lost with it. So slack is given
    to the call that is there: what it does not need, the next one has.

    Parameters
    ----------
    left : seconds until the job's deadline, without the time that it is expected to spend between calls.
    own_work, later_work : of the call, and of those behind it together.
    pace : seconds that a unit of work has taken of late; 0 where nothing is known.
    """
    rest = left - later_work * pace
    if pace and rest >= own_work * pace:
        return rest
    return left * own_work / (own_work + later_work)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShare:
    """What a call gets of the time that its job has left."""

    e2e: float | None
    """Seconds from the call's arrival; None: the job's deadline has passed, and the call is best effort."""
    predicted_job: float | None
    """Seconds from now until the job is expected to end; None where nothing is known of such calls."""
    kept_for: float = 0.0
    """Seconds for which its KV is worth keeping behind its end: another call is expected."""

    def objectives(self, own: SLO | None) -> SLO | None:
        """Return what the call is held to: the tighter of its own objectives and of its share."""
        if self.e2e is None:
            return None
        own = own or SLO()
        share = min(max(self.e2e, SHORTEST_OBJECTIVE), LONGEST_OBJECTIVE)
        return replace(own, e2e=share if own.e2e is None else min(share, own.e2e))


class JobEnd(StrEnum):
    """How a job ended. The values are names in metrics."""

    KEPT = "kept"
    """Its last call ended by its deadline."""
    LATE = "late"
    """Its deadline passed before its last call had ended."""
    REFUSED = "refused"
    """A call of it was refused."""
    ABANDONED = "abandoned"
    """A call failed or its caller left, or calls that were announced never came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """How a job stands after a call."""

    job_id: str = ""
    num_calls: int = 0
    """That have ended."""
    elapsed: float = 0.0
    """Seconds since its first call arrived."""
    remaining: float = float("inf")
    """Seconds until its deadline; negative once that has passed."""
    share: float | None = None
    """Seconds that the call had; None where it was best effort."""
    in_calls: float = 0.0
    """Seconds in which at least one call was open."""
    replica: str | None = None
    """That served the call; None where nobody says."""
    moved: str | None = None
    """Why that is another than served the call before it: `Placement.why`. None if it is the same."""
    end: JobEnd | None = None
    """None while calls are to follow, or nobody said that none do."""
