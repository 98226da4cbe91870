"""`onbeat simulate` in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onbeat.cli.main import main

DATA = Path(__file__).parents[2] / "data"


MODEL = ["--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm"]


LOAD = ["--num-prompts", "12", "--input-len", "300", "--output-len", "20", "--request-rate", "10"]


CAPACITY = ["--num-prompts", "40", "--input-len", "300", "--slo-tbt-ms", "200", "--repeats", "1"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def simulate(*flags: str) -> int:
    """Run the command; a flag of `MODEL` or `LOAD` that is given again wins."""
    return main(["simulate", *MODEL, *LOAD, "--disable-tqdm", *flags])


def replay_trace(path: Path, *flags: str) -> int:
    return main(["simulate", *MODEL, "--trace", str(path), *flags])


def summary_of(tmp_path: Path, *flags: str) -> dict[str, Any]:
    path = tmp_path / "summary.json"
    assert simulate("--json", str(path), *flags) == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says what is wrong; what came before it is not an error."""
    lines = capsys.readouterr().err.splitlines()
    assert "error: " in lines[-1]
    assert not any("Traceback" in line for line in lines)
    return lines[-1]
