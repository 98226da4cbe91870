"""What a server does for a request beside its steps: first tokens come later, and gaps stay."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.simulator.result import IdleReplica
from onbeat.simulator.simulate import simulate
from tests.pure.simulator.loads import linear_time, make_config, make_load, random_load


def test_first_tokens_come_later_and_gaps_stay() -> None:
    load = random_load(40, rate=20, seed=1)
    plain, slow = (
        simulate(load, make_config(request_overhead=seconds), linear_time()).records
        for seconds in (0.0, 0.25)
    )
    for before, after in zip(plain, slow, strict=True):
        assert after.arrival == pytest.approx(before.arrival)
        moved = [when - 0.25 for when in after.delivery_times]
        assert moved == pytest.approx(list(before.delivery_times))


def test_a_closed_loop_waits_for_each_answer() -> None:
    """One client sends its next request when the last one ends, not when the server is done reading it."""
    load = make_load([10, 10, 10], [3, 3, 3])
    config = make_config(request_overhead=0.25, max_concurrency=1)
    records = simulate(load, config, linear_time()).records
    assert [each.arrival for each in records] == pytest.approx([0.0, records[0].end, records[1].end])
    assert all(each.delivery_times[0] - each.arrival > 0.25 for each in records)


def test_two_clients_wait_for_their_own_answers() -> None:
    load = make_load([10] * 6, [2, 30, 2, 2, 2, 2])
    config = make_config(request_overhead=0.05, max_concurrency=2)
    records = simulate(load, config, linear_time()).records
    ends = sorted(each.end for each in records)
    assert [each.arrival for each in records[2:]] == pytest.approx(ends[:4])


def test_an_idle_replica_needs_it_too() -> None:
    slo = SLO(ttft=0.2)
    assert not IdleReplica(linear_time(), make_config()).is_infeasible(slo, 100)
    assert IdleReplica(linear_time(), make_config(request_overhead=0.2)).is_infeasible(slo, 100)


def test_it_is_a_time() -> None:
    with pytest.raises(ConfigError, match=r"request_overhead.*-1.*0"):
        make_config(request_overhead=-1.0)
