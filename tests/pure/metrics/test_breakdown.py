"""Attainment and waits by decile of prompt length and by tenant."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, Fate
from onbeat.metrics.attainment import judge
from onbeat.metrics.breakdown import (
    GroupOutcome,
    by_prompt_decile,
    by_tenant,
    outcomes_of,
    worst_decile,
)
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import SummaryOptions, summarise
from onbeat.report.run import summary_values

PROMISE = SLO(ttft=1.0)


def record(
    num_prompt_tokens: int,
    ttft: float | None = 0.5,
    *,
    arrival: float = 0.0,
    end: float | None = None,
    slo: SLO | None = PROMISE,
    **fields: Any,
) -> RequestRecord:
    """A request with one delivery; without a TTFT, one that was ended in the queue at `end`."""
    times = [] if ttft is None else [arrival + ttft]
    return RequestRecord(
        **{
            "request_id": "r",
            "arrival": arrival,
            "num_prompt_tokens": num_prompt_tokens,
            "slo": slo,
            "delivery_times": array("d", times),
            "delivery_sizes": array("I", [1] * len(times)),
            "num_output_tokens": len(times),
            "end": times[-1] if end is None else end,
            "finish_reason": "expired" if ttft is None else "stop",
            **fields,
        }
    )


def deciles(records: list[RequestRecord]) -> tuple[GroupOutcome, ...]:
    return by_prompt_decile(outcomes_of(judge(records)))


def tenants(records: list[RequestRecord], **options: int) -> list[tuple[str | None, int, int]]:
    found = by_tenant(outcomes_of(judge(records)), [each.tenant for each in records], **options)
    return [(each.tenant, each.num_tenants, each.outcome.num_offered) for each in found]


def test_the_longest_prompts_are_found_to_pay() -> None:
    """Twenty requests in any order; of the two longest one is late and one never served."""
    short = [record(100 * size, size / 32, arrival=3.0) for size in range(1, 19)]
    longest = [record(1_900, 7.0, arrival=1.0), record(2_000, None, arrival=2.0, end=42.0)]
    found = deciles([*longest, *reversed(short)])
    assert len(found) == 10
    assert found[0] == GroupOutcome(
        min_prompt_tokens=100,
        max_prompt_tokens=200,
        num_offered=2,
        num_good=2,
        longest_wait=2 / 32,
        median_ttft=1.5 / 32,
    )
    assert found[9] == GroupOutcome(
        min_prompt_tokens=1_900,
        max_prompt_tokens=2_000,
        num_offered=2,
        num_good=0,
        longest_wait=40.0,  # of the one that never had a token, till it was given up
        median_ttft=7.0,  # of the one that was served
    )
    assert [own.attainment for own in found] == [1.0] * 9 + [0.0]
    assert worst_decile(found) == found[9]


def test_groups_differ_by_one_request_at_most() -> None:
    found = deciles([record(size) for size in range(1, 24)])
    assert [own.num_offered for own in found] == [2, 2, 2, 3, 2, 2, 3, 2, 2, 3]
    assert [own.min_prompt_tokens for own in found] == [1, 3, 5, 7, 10, 12, 14, 17, 19, 21]


@pytest.mark.parametrize(("count", "num_groups"), [(0, 0), (1, 0), (9, 0), (10, 10)])
def test_fewer_than_ten_requests_have_no_deciles(count: int, num_groups: int) -> None:
    found = deciles([record(size + 1) for size in range(count)])
    assert len(found) == num_groups
    assert (worst_decile(found) is None) == (num_groups == 0)


def test_equal_lengths_stay_in_their_order() -> None:
    """The tenth group begins among equal lengths: the last that came is in it."""
    records = [record(size) for size in range(1, 18)] + [record(50, 0.1), record(50, 0.2), record(50, 3.0)]
    found = deciles(records)
    assert [(own.min_prompt_tokens, own.max_prompt_tokens) for own in found[8:]] == [(17, 50), (50, 50)]
    assert (found[8].longest_wait, found[9].longest_wait) == (0.5, 3.0)


def test_groups_of_one_length_are_one() -> None:
    """Between these the order would tell early requests from late ones."""
    same = [record(64, 0.1 if place < 15 else 9.0) for place in range(30)]
    (only,) = deciles(same)
    assert (only.num_offered, only.attainment) == (30, 0.5)
    assert worst_decile([only]) is None
    mixed = deciles(same + [record(640) for _ in range(10)])
    assert [(own.num_offered, own.max_prompt_tokens) for own in mixed] == [(28, 64), (4, 640), (8, 640)]


def test_the_worst_of_equal_deciles_has_the_longest_wait_then_the_longest_prompts() -> None:
    late = [record(size, 2.0) for size in range(1, 11)]
    assert worst_decile(deciles(late)) == deciles(late)[9]
    late[3] = record(4, 2.5)
    assert worst_decile(deciles(late)) == deciles(late)[3]


def test_where_nothing_is_good_every_decile_says_so() -> None:
    found = deciles([record(size, None, end=0.0, fate=Fate.REJECTED) for size in range(1, 11)])
    assert [(own.attainment, own.longest_wait, own.median_ttft) for own in found] == [(0.0, 0.0, None)] * 10


def test_requests_without_objectives_belong_to_nobody() -> None:
    records = [record(size) for size in range(1, 11)]
    free = [record(10 * size, 99.0, slo=None, tenant="a") for size in range(1, 20)]
    assert deciles(free + records) == deciles(records)
    summary = summary_values(summarise(free, duration=1.0))
    assert (summary["attainment_by_prompt_decile"], summary["attainment_by_tenant"]) == ([], [])
    assert summary["worst_decile"] is None


def test_tenants_come_by_their_requests() -> None:
    names = ["b"] * 2 + ["a"] * 2 + ["c"] * 3 + [None] * 2
    assert tenants([record(5, tenant=name) for name in names]) == [
        ("c", 1, 3),
        ("a", 1, 2),
        ("b", 1, 2),
        (None, 1, 2),
    ]


def test_the_smallest_tenants_share_a_group() -> None:
    records = [record(5, tenant=name) for name in "aaabbbccde"]
    assert tenants(records, most=3) == [("a", 1, 3), ("b", 1, 3), ("c", 1, 2), (None, 2, 2)]
    # One that would be alone in it keeps its name.
    assert tenants(records, most=4)[-1] == ("e", 1, 1)


def test_nobody_is_told_apart_where_nobody_is_named() -> None:
    assert tenants([record(5) for _ in range(4)]) == []


def test_keys_of_a_result_are_in_milliseconds() -> None:
    records = [record(size, 2.0 if size == 7 else 0.25, tenant="ab"[size % 2]) for size in range(1, 11)]
    summary = summary_values(summarise(records, duration=1.0))
    assert summary["worst_decile"] == summary["attainment_by_prompt_decile"][6]
    assert summary["worst_decile"] == {
        "min_prompt_tokens": 7,
        "max_prompt_tokens": 7,
        "offered": 1,
        "good": 0,
        "attainment": 0.0,
        "longest_wait_ms": 2000.0,
        "median_ttft_ms": 2000.0,
    }
    assert [(own["tenant"], own["num_tenants"], own["good"]) for own in summary["attainment_by_tenant"]] == [
        ("a", 1, 5),
        ("b", 1, 4),
    ]


def test_objectives_of_the_run_count_where_requests_have_none() -> None:
    records = [record(size, 0.1 * size, slo=None) for size in range(1, 11)]
    summary = summary_values(
        summarise(records, duration=1.0, options=SummaryOptions(objectives={"ttft": 0.95}))
    )
    assert [own["good"] for own in summary["attainment_by_prompt_decile"]] == [1] * 9 + [0]
    assert summary["worst_decile"]["max_prompt_tokens"] == 10


@given(
    st.lists(
        st.tuples(
            st.integers(1, 30), st.one_of(st.none(), st.floats(0, 3)), st.sampled_from([None, *"abcd"])
        ),
        max_size=60,
    )
)
def test_groups_together_are_the_whole(made: list[tuple[int, float | None, str | None]]) -> None:
    records = [record(size, ttft, end=4.0, tenant=tenant) for size, ttft, tenant in made]
    judged = judge(records)
    outcomes = outcomes_of(judged)
    by_length = by_prompt_decile(outcomes)
    of_tenants = by_tenant(outcomes, [each.tenant for each in records], most=2)
    for groups in (by_length, [each.outcome for each in of_tenants]):
        if not groups:
            continue
        sizes = [own.num_offered for own in groups]
        assert sum(sizes) == len(records)
        assert max(own.longest_wait for own in groups) == outcomes["wait"].max()
        weighted = np.average([own.attainment for own in groups], weights=sizes)
        assert weighted == pytest.approx(judged.attainment(1.0).attainment)
    for shorter, longer in pairwise(by_length):
        assert shorter.max_prompt_tokens <= longer.min_prompt_tokens
    if by_length:
        assert min(own.num_offered for own in by_length) >= len(records) // 10
        assert by_length[-1].max_prompt_tokens == max(size for size, _, _ in made)
