"""What a step gives a request, and whether that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onbeat.core.request import FinishReason, RequestOutput
from onbeat.scheduler.replica.request_state import RequestState


def note_deliveries(
    delivered: Iterable[tuple[RequestState, RequestOutput]], now: float, run: Sequence[float] | None
) -> None:
    """Hold deliveries against their deadlines; see `SLOTracker.on_deliveries`."""
    for state, _ in delivered:
        if run is None:
            state.slo.note_delivery(now)
        else:
            state.slo.note_run(run)


def last_output(state: RequestState, finish_reason: FinishReason) -> RequestOutput:
    """Return the output that ends a request without another token."""
    return RequestOutput(
        state.request_id,
        [],
        finish_reason,
        None,
        state.num_cached_tokens,
        state.num_preemptions,
        state.scheduled_time,
        num_drafted_tokens=state.draft.num_drafted,
        num_accepted_tokens=state.draft.num_accepted,
        num_previous_tokens=state.num_output_tokens,
    )
