"""Virtual token counters: the bound of the paper, and what becomes of tenants that come and go."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica import tracker
from onbeat.scheduler.replica.tracker import OUTPUT_WEIGHT, TenantCounters
from tests.examples import examples

Length = tuple[int, int]  # prompt tokens, output tokens

MEMORY = 120
LONGEST_PROMPT = 30

lengths = st.lists(
    st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, MEMORY - LONGEST_PROMPT)),
    min_size=1,
    max_size=8,
)


def serve_least_first(
    counters: TenantCounters, queues: dict[str, deque[Length]], memory: int
) -> list[dict[str, float]]:
    """Continuous batching that admits the tenant with the least counter (algorithm 2 of the paper).

    Returns
    -------
    The service that each tenant has had after every step, until one of them has nothing waiting any more.
    """
    service = dict.fromkeys(queues, 0.0)
    running: list[tuple[str, int, int]] = []  # tenant, tokens reserved, output tokens left
    history = [dict(service)]
    for tenant, queue in queues.items():
        for _ in queue:
            counters.on_arrival(tenant)
    while True:
        while all(queues.values()):
            tenant = min(queues, key=counters.counter)
            num_prompt, num_output = queues[tenant][0]
            if sum(reserved for _, reserved, _ in running) + num_prompt + num_output > memory:
                break
            queues[tenant].popleft()
            counters.charge(tenant, num_prompt)
            counters.on_leave(tenant)
            service[tenant] += num_prompt
            running.append((tenant, num_prompt + num_output, num_output))
        if not all(queues.values()):
            return history
        for tenant, _, _ in running:
            counters.charge(tenant, OUTPUT_WEIGHT)
            service[tenant] += 2
        running = [(tenant, reserved, left - 1) for tenant, reserved, left in running if left > 1]
        history.append(dict(service))


@examples(50)
@given(first=lengths, second=lengths)
def test_service_of_two_backlogged_tenants_differs_by_at_most_the_bound(
    first: list[Length], second: list[Length]
) -> None:
    queues = {"a": deque(first * 20), "b": deque(second * 20)}
    history = serve_least_first(TenantCounters(), queues, MEMORY)
    differences = [each["a"] - each["b"] for each in history]
    bound = max(1.0 * LONGEST_PROMPT, 2.0 * MEMORY)
    assert max(map(abs, differences)) <= bound
    assert max(differences) - min(differences) <= 2 * bound, "over some interval"


def test_the_bound_is_no_accident() -> None:
    """Serving in turns gives the tenant with long answers far more than the bound allows."""
    counters = TenantCounters()
    for _ in range(100):
        for tenant, num_output in (("short", 1), ("long", 90)):
            counters.charge(tenant, 10)
            counters.charge(tenant, OUTPUT_WEIGHT * num_output)
    assert counters.counter("long") - counters.counter("short") > 2 * 2.0 * MEMORY


def test_counts_input_and_output_by_their_weights() -> None:
    counters = TenantCounters()
    counters.charge("a", 10)
    counters.charge("a", OUTPUT_WEIGHT * 5)
    assert counters.counter("a") == 20.0
    assert counters.counter("never seen") == 0.0


def test_who_comes_back_has_saved_up_nothing() -> None:
    counters = TenantCounters()
    for tenant in ("a", "b"):
        counters.on_arrival(tenant)
    counters.on_leave("b")
    counters.charge("a", 1000)
    counters.on_arrival("b")
    assert counters.counter("b") == counters.counter("a") == 1000
    counters.charge("a", 1)
    assert min(["a", "b"], key=counters.counter) == "b"
    counters.charge("b", 500)
    counters.on_arrival("c")
    assert counters.counter("c") == 1001, "the least of those that wait"


def test_who_comes_back_keeps_its_debt() -> None:
    counters = TenantCounters()
    for tenant in ("a", "b"):
        counters.on_arrival(tenant)
    counters.charge("b", 1000)
    counters.on_leave("b")
    counters.on_arrival("b")
    assert counters.counter("b") == 1000


def test_after_a_pause_of_all_a_new_tenant_starts_where_the_last_to_leave_stands() -> None:
    counters = TenantCounters()
    counters.on_arrival("a")
    counters.on_leave("a")
    counters.charge("a", OUTPUT_WEIGHT * 50)  # its request goes on running
    counters.on_arrival("b")
    assert counters.counter("b") == 100


def test_further_requests_of_a_backlogged_tenant_change_nothing() -> None:
    counters = TenantCounters()
    counters.on_arrival("a")
    counters.on_arrival("b")
    counters.charge("b", 100)
    counters.on_arrival("a")
    counters.on_leave("a")
    counters.on_arrival("a")
    assert (counters.counter("a"), counters.counter("b")) == (0, 100)


def test_share_is_the_excess_over_the_mean_of_those_that_wait(monkeypatch) -> None:
    monkeypatch.setattr(tracker, "FULL_EXCESS", 100.0)
    counters = TenantCounters()
    assert counters.share("a") == 0
    counters.on_arrival("a")
    counters.charge("a", 1000)
    assert counters.share("a") == 0, "nobody to share with"
    counters.on_arrival("b")
    assert counters.share("a") == counters.share("b") == 0
    counters.charge("b", 50)
    assert counters.share("a") == pytest.approx(-0.25)
    assert counters.share("b") == pytest.approx(0.25)
    counters.charge("b", 10_000)
    assert (counters.share("a"), counters.share("b")) == (-1, 1)


def test_ties_go_to_the_first_named() -> None:
    counters = TenantCounters()
    assert min(["b", "a", None], key=counters.counter) == "b"


calls = st.lists(
    st.tuples(st.sampled_from(["arrive", "leave", "prefill", "output"]), st.integers(0, 7)), max_size=120
)


@examples(200)
@given(calls=calls)
def test_no_counter_falls_and_nobody_who_waits_lies_below_a_new_tenant(calls: list[tuple[str, int]]) -> None:
    counters = TenantCounters()
    waiting = [0] * 8
    before = {str(index): 0.0 for index in range(8)}
    for call, index in calls:
        tenant = str(index)
        if call == "arrive":
            least = min((before[str(each)] for each in range(8) if waiting[each]), default=0.0)
            counters.on_arrival(tenant)
            assert counters.counter(tenant) >= least
            waiting[index] += 1
        elif call == "leave" and waiting[index]:
            counters.on_leave(tenant)
            waiting[index] -= 1
        elif call == "prefill":
            counters.charge(tenant, 7)
        elif call == "output":
            counters.charge(tenant, OUTPUT_WEIGHT)
        after = {name: counters.counter(name) for name in before}
        assert all(after[name] >= before[name] for name in before)
        before = after
        backlogged = [str(each) for each in range(8) if waiting[each]]
        if len(backlogged) > 1:
            mean = sum(after[name] for name in backlogged) / len(backlogged)
            for name in backlogged:
                assert counters.share(name) == pytest.approx((after[name] - mean) / 8192)
                assert after[name] >= counters.counter("new")


def test_remembers_few_of_those_that_are_away(monkeypatch) -> None:
    """And those who wait for as long as they do."""
    monkeypatch.setattr(tracker, "MOST_IDLE_TENANTS", 10)
    counters = TenantCounters()
    counters.on_arrival("waits")
    counters.charge("waits", 100)
    for index in range(1000):
        counters.on_arrival(f"t{index}")
        counters.charge(f"t{index}", index)
        counters.on_leave(f"t{index}")
        counters.on_arrival("waits")
    assert len(counters._counters) <= 12
    assert counters.counter("t1") == counters.counter("new") == counters.counter("waits") == 100


def test_forgetting_who_is_owed_nothing_changes_nothing(monkeypatch) -> None:
    found = []
    for most in (4, 1000):
        monkeypatch.setattr(tracker, "MOST_IDLE_TENANTS", most)
        counters = TenantCounters()
        counters.on_arrival("heavy")
        for index in range(100):
            counters.charge("heavy", 50)
            counters.on_arrival(f"light{index}")
            counters.on_leave(f"light{index}")
        counters.charge("heavy", 1)
        counters.on_arrival("light3")
        found.append((counters.counter("light3"), len(counters._counters)))
    (small, few), (large, many) = found
    assert small == large == 5001
    assert few < many
