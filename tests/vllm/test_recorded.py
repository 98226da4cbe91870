"""A run on vLLM's workers is replayed by the same scheduler, and their steps are measured as others' are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.recording.reader import Recording
from onbeat.simulator.replay.decisions import Replay
from onbeat.simulator.replay.model import learning_model

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe", "Llama-awq", "adapters"])
def test_every_step_of_a_run_is_planned_again_by_its_record_alone(kind: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.vllm.recorded_program", kind, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    recording = Recording(tmp_path / "record")
    header = recording.header
    assert (header.engine["backend"], header.engine["model_runner"]) == ("vllm", "first")
    assert header.step_time is not None
    assert header.step_time["fitted"]["shape_range"]["num_sequences"] == 6, "measured at the start"
    result = Replay(recording, learning_model(header)).run()
    assert result.is_identical, result.difference
    assert (result.num_requests, result.num_expired, result.num_failed) == (16, 0, 0)
    assert result.num_steps > 16
    assert result.num_prefix_hits > 0
    assert result.num_predictions > 0
