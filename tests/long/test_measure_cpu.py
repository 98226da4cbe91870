from __future__ import annotations

from onbeat.perfmodel.device_spec import measure_cpu
from tests.waiting import patience


def test_cpu_limits_are_measured_quickly():
    with patience() as taken:
        limits = measure_cpu()
    assert taken.seconds < 10
    assert 1e8 < limits.memory_bandwidth < 1e13
    assert 1e8 < limits.peak("fp32") < 1e15
