"""Capacities of the study: of attainment alone, and of loads that last."""

from __future__ import annotations

from benchmarks.harness.criteria import CRITERIA, Curve, Score, rate_at


def test_a_queue_that_grows_ends_the_capacity_of_loads_that_last_alone():
    """Good and left over: 97 % and nothing, 96 % and a twentieth, 80 % and a tenth."""
    found = {0: (0.97, 0.0), 2: (0.96, 0.05), 4: (0.8, 0.1)}
    curve = Curve(
        {i: Score(num=1, num_hopeless=0, good=good, growth=left) for i, (good, left) in found.items()}
    )
    lasting, any_queue = (curve.capacity(CRITERIA[name]) for name in ("90 %", "90 %, any queue"))
    assert lasting is not None
    assert any_queue is not None
    assert rate_at(0) < lasting < rate_at(2) < any_queue < rate_at(4)
