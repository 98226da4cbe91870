"""What transfers of KV get of the links between replicas."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.simulator.virtual_moves import Links
from tests.examples import examples

BANDWIDTH = 100.0


class Transfer(NamedTuple):
    when: float
    source: int
    destination: int
    num_bytes: float


def run(transfers: list[Transfer]) -> list[float]:
    """Return when each ends; hold the links to their rates all the while."""
    links: Links[int] = Links(BANDWIDTH)
    due = sorted(enumerate(transfers), key=lambda pair: pair[1].when)
    ends: dict[int, float] = {}
    while due or links.next_time < float("inf"):
        if due and due[0][1].when <= links.next_time:
            number, each = due.pop(0)
            links.begin(number, each.source, each.destination, each.num_bytes, each.when)
        else:
            now = links.next_time
            ends |= dict.fromkeys(links.end(now), now)
        flows = links._flows.values()
        rates = {port: sum(f.rate for f in flows if port in f.ports) for each in flows for port in each.ports}
        assert all(rate <= BANDWIDTH * (1 + 1e-9) for rate in rates.values())
        # Nobody could have more: each transfer uses a link that is full.
        full = {port for port, rate in rates.items() if rate >= BANDWIDTH * (1 - 1e-9)}
        assert all(set(flow.ports) & full for flow in flows)
    assert links.num_bytes_moved == pytest.approx(sum(each.num_bytes for each in transfers))
    return [ends[number] for number in range(len(transfers))]


def test_one_alone_has_all() -> None:
    assert run([Transfer(1.0, 0, 1, 300.0)]) == [4.0]


def test_two_out_of_one_replica_have_half_each_until_one_ends() -> None:
    assert run([Transfer(0.0, 0, 1, 100.0), Transfer(0.0, 0, 2, 300.0)]) == pytest.approx([2.0, 4.0])


def test_both_directions_are_apart() -> None:
    assert run([Transfer(0.0, 0, 1, 100.0), Transfer(0.0, 1, 0, 100.0)]) == pytest.approx([1.0, 1.0])


def test_what_one_cannot_use_the_other_gets() -> None:
    """Three come in at 3; the one that leaves 0 together with another gets a third, the other two thirds."""
    ends = run([Transfer(0.0, source, 3, 100.0) for source in range(3)] + [Transfer(0.0, 0, 4, 200.0)])
    assert ends == pytest.approx([3.0, 3.0, 3.0, 3.0])


def test_one_that_is_dropped_leaves_its_share_and_has_moved_what_it_has() -> None:
    links: Links[str] = Links(BANDWIDTH)
    links.begin("kept", 0, 1, 100.0, 0.0)
    links.begin("dropped", 0, 2, 100.0, 0.0)
    links.drop("dropped", 1.0)
    assert links.next_time == pytest.approx(1.5)
    assert links.end(links.next_time) == ["kept"]
    assert links.num_bytes_moved == pytest.approx(150.0)


@examples(200)
@given(
    transfers=st.lists(
        st.builds(
            Transfer,
            st.floats(0, 20),
            st.integers(0, 3),
            st.integers(0, 3),
            st.floats(1, 1000),
        ).filter(lambda each: each.source != each.destination),
        min_size=1,
        max_size=12,
    )
)
def test_bytes_are_conserved_and_no_link_exceeds_its_rate(transfers: list[Transfer]) -> None:
    ends = run(transfers)
    for each, end in zip(transfers, ends, strict=True):
        assert end >= each.when + each.num_bytes / BANDWIDTH * (1 - 1e-9)
