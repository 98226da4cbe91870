"""The models against published measurements; `benchmarks.check.step_time_accuracy` prints the tables."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from benchmarks.check import step_time_accuracy as accuracy

SHARED = os.environ.get("ONBEAT_SHARED")

pytestmark = pytest.mark.skipif(
    SHARED is None, reason="ONBEAT_SHARED does not say where the published measurements are"
)


@pytest.fixture(scope="module")
def profiles() -> Path:
    return Path(str(SHARED)) / "data" / "profiles"


def test_the_calibrated_roofline_on_nineteen_deployments(profiles: Path) -> None:
    uncalibrated, calibrated = accuracy.grid_lines(profiles)
    assert len(calibrated) == 19
    assert statistics.median(line.errors.p50 for line in uncalibrated) <= 0.15
    assert statistics.median(line.errors.p50 for line in calibrated) <= 0.03
    assert statistics.median(line.errors.p90 for line in calibrated) <= 0.09


def test_a_hybrid_batch_costs_what_its_prompt_tokens_cost(profiles: Path) -> None:
    batches = accuracy.sarathi_batches(profiles)
    by_decodes = {int(batch.label.split()[3]): batch for batch in batches}
    assert sorted(by_decodes) == [0, 3, 4]
    assert all(abs(batch.calibrated / batch.measured - 1) <= 0.08 for batch in batches)
    for kind in ("uncalibrated", "calibrated"):
        assert 0.97 <= getattr(by_decodes[3], kind) / getattr(by_decodes[0], kind) <= 1.05
