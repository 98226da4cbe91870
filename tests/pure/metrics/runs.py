"""Steps and requests to feed to a tracker."""

from __future__ import annotations

from typing import Any

from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.step import BatchShape
from onbeat.core.step_stats import StepStats
from onbeat.metrics.tracker import RequestTracker


def request(request_id: str, *, arrival: float, num_prompt_tokens: int = 10, **fields: Any) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=(1,) * num_prompt_tokens, arrival=arrival, **fields
    )


def output(request_id: str, num_tokens: int = 1, **fields: Any) -> RequestOutput:
    return RequestOutput(request_id, [7] * num_tokens, **fields)


def stats(start: float, end: float, **fields: Any) -> StepStats:
    shape = BatchShape()
    for num_computed, num_new in fields.pop("rows", [(10, 1)]):
        shape.add(num_computed, num_new, samples=True)
    values: dict[str, Any] = {
        "step_id": 0,
        "num_running": 1,
        "num_waiting": 0,
        "num_blocks": 100,
        "num_used_blocks": 2,
        "num_preemptions": 0,
        "num_prefix_queries": 0,
        "num_prefix_hits": 0,
        "schedule_seconds": 0.0001,
        "update_seconds": 0.0002,
        **fields,
    }
    return StepStats(start=start, end=end, shape=shape, **values)


def step(tracker: RequestTracker, message: StepOutputs) -> None:
    """Feed a tracker one message of the engine, as the engine's client and the writers of answers do."""
    tracker.on_step(message)
    for each in message.outputs:
        tracker.deliver(each, message.now, len(each.new_token_ids), made=message.now)
        if each.finish_reason is not None:
            tracker.close(each.request_id, each.finish_reason, message.now)


def run_one(tracker: RequestTracker, request_id: str = "r", *, arrival: float = 10.0) -> None:
    """Prefill at +1 to +2 s, deliveries at +2, +2.5 (two tokens) and +3.5 s, the last after a preemption."""
    tracker.open(request(request_id, arrival=arrival))
    begin: dict[str, Any] = {"scheduled_time": arrival + 1, "num_cached_tokens": 4}
    first = stats(arrival + 1, arrival + 2, rows=[(4, 6)], chunk_request_ids=[request_id], step_id=1)
    step(tracker, StepOutputs(arrival + 2, [output(request_id, **begin)], first))
    second = stats(arrival + 2, arrival + 2.5, step_id=2)
    step(tracker, StepOutputs(arrival + 2.5, [output(request_id, 2, **begin)], second))
    last = output(request_id, finish_reason=FinishReason.LENGTH, num_preemptions=1, **begin)
    third = stats(arrival + 3, arrival + 3.5, step_id=3, num_preemptions=1)
    step(tracker, StepOutputs(arrival + 3.5, [last], third))
