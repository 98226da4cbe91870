"""LoRA adapters on vLLM's executor: tokens equal transformers' with the adapter merged into the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_each_request_is_computed_with_its_adapter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.adapters_program", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    line = next((each for each in done.stdout.splitlines() if each.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-3000:]
    found = json.loads(line.removeprefix("RESULT "))
    assert found["num_distinct"] == 3, "an adapter that changes no token shows nothing"
    assert (found["together"], found["tight"]) == (found["num_asked"],) * 2
    assert found["prefix_hits"] > 0
    assert found["preemptions"] > 0
    assert found["choices"] == 2
    assert found["shared"] > 0
    assert found["replaced"] == found["afterwards"] == found["num_asked"] // 3
    large, missing = found["refused"]
    assert "'large'" in large
    assert "32" in large
    assert "missing' (" in missing
    assert "adapter_config.json" in missing
