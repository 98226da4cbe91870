"""How often drafts were right in a recorded run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.recording.reader import Recording
from onbeat.simulator.draft_acceptance import Acceptance
from onbeat.simulator.replay.history import RecordedRequest, read_history


def read_acceptance(path: Path) -> Acceptance:
    """Return the rates that a record of `onbeat serve --record FILE` shows, over all and by class.

    Raises
    ------
    ConfigError : no readable record, or no draft was verified in it.
    """
    requests = read_history(Recording(path)).requests
    if not any(request.drafts.is_right for request in requests):
        raise ConfigError(
            f"{path} records no verified draft; record a run with --speculative-config, or give rates"
        )
    return measured_acceptance(requests)


def measured_acceptance(requests: Sequence[RecordedRequest]) -> Acceptance:
    """Return the rates of recorded requests; the usual one where no draft was verified.

    A rate is the share of accepted drafts among those whose predecessors in the row were all accepted: of a
    row, the accepted ones and the first that was rejected. It does not depend on how many were planned.
    """
    rate = _mean(requests)
    classes = {request.record.request_class for request in requests} - {None}
    rates = {
        str(name): _mean(each for each in requests if each.record.request_class == name) for name in classes
    }
    found = [num > 0 for request in requests for num in request.drafts.num_available.values()]
    return Acceptance(
        rate=Acceptance().rate if rate is None else rate,
        rates=tuple(sorted((name, own) for name, own in rates.items() if own is not None)),
        hit_rate=sum(found) / len(found) if found else None,
    )


def _mean(requests: Iterable[RecordedRequest]) -> float | None:
    """Return the share of right drafts; None where none was verified."""
    outcomes = [is_right for request in requests for is_right in request.drafts.is_right.values()]
    return sum(outcomes) / len(outcomes) if outcomes else None
