"""Rows that fail: their requests end with an error, and the others of the step go on."""

from __future__ import annotations

from collections.abc import Mapping

from onbeat.core.request import FinishReason, RequestOutput
from onbeat.core.step import SchedulerOutput
from onbeat.scheduler.replica.delivery import last_output
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.request_table import RequestTable

ENDED = (RequestStatus.FINISHED, RequestStatus.PADDING)
"""Of requests that get no more tokens."""
_SHARED_KV = "the request shares KV with one that has failed in this step; send it again"


def fail(state: RequestState, message: str, table: RequestTable) -> RequestOutput:
    """End one request with an error; the others of its step go on, and nobody reuses its KV."""
    table.kv.pool.unregister(state.block_ids)
    output = last_output(state, FinishReason.ERROR)
    output.error = message
    table.drop(state)
    return output


def let_go_of_sharers(
    states: list[RequestState], scheduled: SchedulerOutput, failed: Mapping[str, str], table: RequestTable
) -> list[RequestOutput]:
    """Preempt those who share KV with a request that has failed, or end them and return their outputs.

    What was not finite in it is so by now, and nobody else would fail by it: neither who joined after the
    step was planned, nor who had no token of it. Blocks by which another had one are sound.

    Parameters
    ----------
    states : of the step's rows, in their order.
    failed : ids of the requests whose rows failed, and why.
    """
    unsound: set[int] = set()
    sound: set[int] = set()
    lost: set[str] = set()
    for state, row in zip(states, scheduled.rows, strict=True):
        if state.status is not RequestStatus.RUNNING or state.admitted_step_id > scheduled.step_id:
            continue  # it has other blocks than the row had, or none
        if state.request_id in failed:
            lost.add(state.request_id)
            unsound.update(state.block_ids)
        elif row.samples:
            sound.update(state.block_ids)
    unsound -= sound
    outputs = []
    for state in list(table.running):
        is_lost = state.status is not RequestStatus.RUNNING or state.request_id in lost
        if is_lost or unsound.isdisjoint(state.block_ids):
            continue
        if state.num_in_flight_tokens:  # they would be delivered
            outputs.append(fail(state, _SHARED_KV, table))
        else:
            table.kv.pool.unregister(state.block_ids)
            table.preempt(state)
    return outputs


def has_run(states: list[RequestState], failed: Mapping[str, str]) -> bool:
    """Whether a step came to its end: one that raises fails all of its requests.

    Of those that had ended before nobody hears, and a replay does not know that they failed too.
    """
    left = [state.request_id for state in states if state.status not in ENDED]
    return not left or any(request_id not in failed for request_id in left)
