"""Forward-pass metrics that vLLM sent from a GPU: messages of version 1, fitted as they came."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.fitted import FitTarget, fit_stream
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.step_log import read_step_log, step_times
from tests.pure.perfmodel.recorded import fpm, write_lines

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "data" / "vllm_forward_passes.csv"


def messages() -> list[dict[str, Any]]:
    with PUBLISHED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        fpm(
            counter=int(row["counter_id"]),
            wall=float(row["wall_ms"]) / 1e3,
            prompts=int(row["num_prefill_requests"]),
            tokens=int(row["sum_prefill_tokens"]),
            cached=int(row["sum_prefill_kv_tokens"]),
            decodes=int(row["num_decode_requests"]),
            context=int(row["sum_decode_kv_tokens"]),
        )
        for row in rows
    ]


def test_steps_of_a_gpu_are_met_within_five_percent(tmp_path: Path) -> None:
    """Qwen3-32B on B300: steps from 13 to 411 ms, two of them with each other's time in them."""
    stream = read_step_log(write_lines(tmp_path, *({"fpm": each} for each in messages())))
    target = FitTarget(model=find_model_spec("Qwen3-32B"), device=find_device("b200"), precision=Precision())
    found = fit_stream(target, step_times(stream.steps).steps)
    assert found.num_exceptions >= 1
    errors = {each.kind: each for each in found.errors}
    assert set(errors) == {"decode", "prompt", "mixed", "all"}
    assert found.fitted.errors.p50 < 0.05
    assert errors["decode"].p50 < 0.05
    assert abs(errors["all"].bias) < 0.05
    assert found.fitted.errors.num_points == pytest.approx(20, abs=4)
