"""The scheduler keeps the deadlines by which metrics judge, however many tokens come at once."""

from __future__ import annotations

from array import array
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.replica.request_state import LATE_TOKENS_IN, SLOState

TICK = 1 / 64
"""Times are whole ticks, so that sums are exact."""
ARRIVAL = 100.0
MAX_TOKENS = 10_000

Deliveries = list[tuple[int, int]]
"""(ticks since the delivery before or the arrival, tokens)."""

deliveries = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=60)


def times_of(run: Deliveries) -> list[float]:
    return [ARRIVAL + ticks * TICK for ticks in accumulate(ticks for ticks, _ in run)]


def late_tokens(run: Deliveries, slo: SLO) -> int:
    """Count, token by token, those that came after max(arrival + ttft, first delivery) + k tbt."""
    assert slo.tbt is not None
    times = times_of(run)
    due = times[0] if slo.ttft is None else max(ARRIVAL + slo.ttft, times[0])
    arrived = [time for time, (_, size) in zip(times, run, strict=True) for _ in range(size)]
    return sum(time > due + k * slo.tbt for k, time in enumerate(arrived))


def scheduled(run: Deliveries, slo: SLO, max_output_tokens: int = MAX_TOKENS) -> SLOState:
    """Return what the scheduler remembers after the deliveries."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    request = Request(request_id="r", prompt_token_ids=(1,), sampling=sampling, arrival=ARRIVAL, slo=slo)
    state = SLOState()
    state.begin(request, "stream", now=request.arrival, max_output_tokens=max_output_tokens)
    for time, (_, size) in zip(times_of(run), run, strict=True):
        state.note_delivery(time, size)
    return state


def record(run: Deliveries, slo: SLO) -> RequestRecord:
    times = times_of(run)
    return RequestRecord(
        request_id="r",
        arrival=ARRIVAL,
        num_prompt_tokens=1,
        slo=slo,
        delivery_times=array("d", times),
        delivery_sizes=array("I", [size for _, size in run]),
        num_output_tokens=sum(size for _, size in run),
        finish_reason="length",
        end=times[-1],
    )


@given(deliveries, st.integers(1, 12), st.one_of(st.none(), st.integers(1, 80)))
def test_metrics_and_scheduler_count_the_same_late_tokens(
    run: Deliveries, tbt: int, ttft: int | None
) -> None:
    slo = SLO(ttft=None if ttft is None else ttft * TICK, tbt=tbt * TICK)
    num_late = late_tokens(run, slo)
    is_first_late = ttft is not None and run[0][0] > ttft
    # As many as are late may be, and then the objective still holds; one less, and it is missed.
    assert scheduled(run, slo, num_late * LATE_TOKENS_IN).is_best_effort == is_first_late
    if num_late:
        assert scheduled(run, slo, num_late * LATE_TOKENS_IN - 1).is_best_effort
    num_tokens = sum(size for _, size in run)
    assert good_requests([record(run, slo)])[0] == (not is_first_late and 100 * num_late <= num_tokens)


@given(deliveries, st.integers(1, 12))
def test_a_stream_that_delivers_several_tokens_at_once_earns_the_slack_of_all(
    run: Deliveries, tbt: int
) -> None:
    slo = SLO(tbt=tbt * TICK)
    state = scheduled(run, slo)
    if not state.is_best_effort:
        num_tokens = sum(size for _, size in run)
        assert state.next_deadline == times_of(run)[0] + num_tokens * tbt * TICK
