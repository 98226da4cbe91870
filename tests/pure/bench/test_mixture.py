from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from onbeat.bench.bench_load import every_nth


@given(st.integers(1, 400), st.integers(1, 40))
def test_any_first_requests_have_the_share(num_requests: int, n: int) -> None:
    flags = every_nth(num_requests, 1 / n)

    assert [flags[:k].sum() for k in range(num_requests + 1)] == [k // n for k in range(num_requests + 1)]


@given(st.integers(0, 300), st.floats(0, 1))
def test_any_share_is_met_to_within_one_request(num_requests: int, share: float) -> None:
    assert abs(int(every_nth(num_requests, share).sum()) - math.floor(num_requests * share)) <= 1
