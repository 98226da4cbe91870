"""Which cores each replica of a machine gets."""

from __future__ import annotations

import pytest

from onbeat.cluster import local_launcher
from onbeat.cluster.local_launcher import share_cores


@pytest.mark.parametrize(
    ("num_replicas", "threads", "shares"),
    [
        (1, None, []),
        (2, None, [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (4, None, [(0, 2), (4, 6), (1, 3), (5, 7)]),
        (4, 2, [(0, 2), (4, 6), (1, 3), (5, 7)]),
        (4, 3, []),
        (16, None, [(core,) for core in (0, 2, 4, 6, 1, 3, 5, 7)] * 2),
    ],
)
def test_a_share_lies_on_one_memory_node(monkeypatch, num_replicas, threads, shares):
    """Two nodes, whose cores the system numbers in turns."""
    nodes = [frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})]
    monkeypatch.setattr(local_launcher, "node_cores", lambda _cores: nodes)
    assert share_cores(num_replicas, threads) == shares
