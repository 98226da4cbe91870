from __future__ import annotations

import time

from onbeat.perfmodel.measure_cpu import measure_cpu


def test_cpu_limits_are_measured_quickly():
    start = time.perf_counter()
    limits = measure_cpu()
    assert time.perf_counter() - start < 10  # about 1 s; the rest is for a loaded machine
    assert 1e8 < limits.memory_bandwidth < 1e13
    assert 1e8 < limits.peak_flops < 1e15
