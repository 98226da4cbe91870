"""What a step gives a request, and whether that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onbeat.core.request import FinishReason, RequestOutput, TokenLogprobs
from onbeat.scheduler.replica.request_state import RequestState


def deliver(
    state: RequestState, sampled_ids: list[int], logprobs: list[TokenLogprobs] | None, num_drafts: int = 0
) -> RequestOutput:
    """Append sampled tokens to a request and see whether they end it; drafts are not counted here.

    Parameters
    ----------
    num_drafts : that the step was planned with.
    """
    num_before = state.num_tokens
    num_tokens = num_before + len(sampled_ids)
    finish_reason, stop_token_id = None, None
    if state.stop_token_ids or num_tokens > state.max_total_tokens:
        sampled_ids, stop_token_id = _cut_at_end(state, sampled_ids)
        num_tokens = num_before + len(sampled_ids)
    if stop_token_id is not None:
        finish_reason = FinishReason.STOP
    elif num_tokens >= state.max_total_tokens:
        finish_reason = FinishReason.LENGTH
    state.receive(sampled_ids, num_drafts)
    output = RequestOutput(
        state.request_id,
        sampled_ids,
        finish_reason,
        stop_token_id,
        state.num_cached_tokens,
        state.num_preemptions,
        state.scheduled_time,
    )
    output.num_previous_tokens = num_before - state.num_prompt_tokens
    if logprobs is not None:
        output.logprobs = logprobs[: len(sampled_ids)]
    return output


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


def _cut_at_end(state: RequestState, sampled_ids: list[int]) -> tuple[list[int], int | None]:
    """Return the tokens up to the one that ends the request, and that one if it is a stop token."""
    first_stop = state.request.sampling.min_tokens - state.num_output_tokens
    sampled_ids = sampled_ids[: state.max_total_tokens - state.num_tokens]
    for index, token_id in enumerate(sampled_ids):
        if index >= first_stop and token_id in state.stop_token_ids:
            return sampled_ids[: index + 1], token_id
    return sampled_ids, None
