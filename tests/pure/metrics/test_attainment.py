"""Good requests, attainment and goodput: cases worked by hand, and a slow version token by token."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, Fate
from onbeat.metrics.attainment import TOLERANCE, good_requests, judge
from onbeat.metrics.record import RequestRecord


def record(
    times: list[float],
    slo: SLO | None,
    *,
    sizes: list[int] | None = None,
    arrival: float = 0.0,
    finish_reason: str | None = "length",
    **options: object,
) -> RequestRecord:
    sizes = [1] * len(times) if sizes is None else sizes
    return RequestRecord(
        request_id="r",
        arrival=arrival,
        num_prompt_tokens=5,
        slo=slo,
        delivery_times=array("d", times),
        delivery_sizes=array("I", sizes),
        num_output_tokens=sum(sizes),
        end=times[-1] if times else arrival + 1.0,
        finish_reason=finish_reason,
        **options,  # type: ignore[arg-type]
    )


TTFT = SLO(ttft=1.0)
TBT = SLO(tbt=0.1)
BOTH = SLO(ttft=1.0, tbt=0.1)
STEADY = [0.5 + 0.1 * k for k in range(10)]


@pytest.mark.parametrize(
    ("request_", "stream", "gap"),
    [
        pytest.param(record([1.0], TTFT), True, True, id="first token just in time"),
        pytest.param(record([1.001], TTFT), False, False, id="first token late"),
        pytest.param(record([3.0], TTFT, arrival=2.0), True, True, id="counted from the arrival"),
        pytest.param(record(STEADY, BOTH), True, True, id="every gap just in time"),
        # The first token is 0.5 s ahead: deadlines 1.0, 1.1, 1.2 forgive a pause of 0.5 s.
        pytest.param(record([0.5, 1.0, 1.1], BOTH), True, False, id="slack pays for a pause"),
        pytest.param(record([0.5, 1.2, 1.2], BOTH), False, False, id="a pause longer than the slack"),
        # Without a TTFT objective the deadlines start at the first token.
        pytest.param(record([0.5, 0.7, 0.75], TBT), False, False, id="no slack without ttft"),
        pytest.param(record([0.5, 0.65, 0.7], SLO(tbt=0.1)), False, False, id="late once in three"),
        # Token 2 of the burst has its deadline at 0.8, tokens 0 and 1 at 0.5 and 0.6: a burst is early.
        pytest.param(record([0.5, 0.65], TBT, sizes=[3, 1]), True, False, id="a burst earns slack"),
        # All tokens of the second delivery come at 0.75: the first of them was due at 0.6, the next at 0.7.
        pytest.param(record([0.5, 0.75], TBT, sizes=[1, 4]), False, False, id="a late burst"),
        pytest.param(record([0.5, 2.0], SLO(e2e=2.0)), True, True, id="whole answer in time"),
        pytest.param(record([0.5, 2.1], SLO(e2e=2.0)), False, False, id="whole answer late"),
        pytest.param(record([0.5, 9.0], BOTH, is_streamed=False), True, True, id="nobody sees the gaps"),
        pytest.param(record([0.5], BOTH, finish_reason="abort"), False, False, id="aborted"),
        pytest.param(
            record([0.5], None, finish_reason="abort"), False, False, id="aborted, nothing promised"
        ),
        pytest.param(record([], BOTH, fate=Fate.REJECTED, finish_reason=None), False, False, id="rejected"),
        pytest.param(record([50.0], None), True, True, id="nothing promised"),
        pytest.param(record([50.0], SLO()), True, True, id="empty promise"),
        pytest.param(record([], BOTH), True, True, id="ended at once without a token"),
        pytest.param(record([], SLO(ttft=0.9)), False, False, id="ended late without a token"),
    ],
)
def test_hand_worked_requests(request_: RequestRecord, stream: bool, gap: bool) -> None:
    assert good_requests([request_], mode="stream").tolist() == [stream]
    assert good_requests([request_], mode="gap").tolist() == [gap]


def late_in_the_end(num_tokens: int, num_late: int) -> RequestRecord:
    times = [0.01 * k for k in range(num_tokens - num_late)]
    return record(times + [100.0] * num_late, TBT)


@pytest.mark.parametrize(
    ("num_tokens", "num_late", "good"), [(100, 1, True), (100, 2, False), (99, 1, False)]
)
def test_one_token_in_a_hundred_may_be_late(num_tokens: int, num_late: int, good: bool) -> None:
    assert good_requests([late_in_the_end(num_tokens, num_late)]).tolist() == [good]


def test_gap_mode_interpolates_its_percentile() -> None:
    # 51 gaps: the 99th percentile lies halfway between the longest two, 0.08 and 0.14.
    gaps = [0.05] * 49 + [0.08, 0.14]
    times = [1.0, *(1.0 + np.cumsum(gaps)).tolist()]

    assert good_requests([record(times, SLO(tbt=0.111))], mode="gap").tolist() == [True]
    assert good_requests([record(times, SLO(tbt=0.109))], mode="gap").tolist() == [False]


def test_attainment_counts_every_offered_request_that_was_promised_something() -> None:
    requests = [
        record([0.5], TTFT),
        record([1.5], TTFT),
        record([], TTFT, fate=Fate.REJECTED, finish_reason=None),
        record([0.5], TTFT, finish_reason="error"),
        record([9.0], None),
    ]

    measured = judge(requests).attainment(duration=2.0)

    assert (measured.num_offered, measured.num_good) == (4, 1)
    assert measured.attainment == 0.25
    assert measured.goodput == 0.5


def test_without_promises_there_is_no_attainment() -> None:
    measured = judge([record([1.0], None)]).attainment(duration=1.0)

    assert measured.attainment is None
    assert measured.goodput is None


def test_no_requests() -> None:
    assert good_requests([]).tolist() == []


def test_unknown_sizes_spread_tokens_evenly() -> None:
    spread = record([0.5, 0.75], TBT, sizes=[2, 3])
    unknown = record([0.5, 0.75], TBT, sizes=[2, 3])
    unknown.delivery_sizes = array("I")

    assert good_requests([unknown]).tolist() == good_requests([spread]).tolist() == [False]


# The definitions once more, one token after another.


def slow_stream(request: RequestRecord, slo: SLO) -> bool:
    ttft = math.inf if slo.ttft is None else slo.ttft
    first = request.delivery_times[0]
    base = first if slo.ttft is None else max(request.arrival + ttft, first)
    num_tokens = num_late = 0
    for time, size in zip(request.delivery_times, request.delivery_sizes, strict=True):
        for _ in range(size):
            deadline = math.inf if slo.tbt is None else base + num_tokens * slo.tbt
            num_late += time > deadline + TOLERANCE
            num_tokens += 1
    return first - request.arrival <= ttft + TOLERANCE and num_late / num_tokens <= 0.01


def slow_gap(request: RequestRecord, slo: SLO) -> bool:
    ttft = math.inf if slo.ttft is None else slo.ttft
    own = np.diff(request.delivery_times)
    keeps = slo.tbt is None or not own.size or np.percentile(own, 99) <= slo.tbt + TOLERANCE
    return bool(request.delivery_times[0] - request.arrival <= ttft + TOLERANCE and keeps)


# Times in whole 64ths of a second are exact, so that both versions see the same ties.
ticks = st.integers(0, 12)
objectives = st.one_of(st.none(), st.integers(1, 10))


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    gaps = draw(st.lists(ticks, min_size=0, max_size=130))
    first = draw(st.integers(0, 40))
    times = (np.cumsum([first, *gaps]) / 64).tolist()
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(times), max_size=len(times)))
    ttft, tbt = draw(objectives), draw(objectives)
    slo = SLO(ttft=None if ttft is None else ttft / 16, tbt=None if tbt is None else tbt / 64)
    return record(times, slo, sizes=sizes, arrival=0.0)


@given(st.lists(records(), min_size=1, max_size=8))
def test_equals_the_definition_token_by_token(requests: list[RequestRecord]) -> None:
    promises = [request.slo or SLO() for request in requests]

    assert good_requests(requests, mode="stream").tolist() == [
        slow_stream(request, slo) for request, slo in zip(requests, promises, strict=True)
    ]
    assert good_requests(requests, mode="gap").tolist() == [
        slow_gap(request, slo) for request, slo in zip(requests, promises, strict=True)
    ]
