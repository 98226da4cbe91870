"""The plug-in's metrics are those of a process: each test begins with none."""

from __future__ import annotations

import pytest

from onbeat.vllm import verdicts


@pytest.fixture(autouse=True)
def _fresh_metrics():
    verdicts.REJECTED.clear()
    verdicts.STEP_TIME_RATIO.clear()
