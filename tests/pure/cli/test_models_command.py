"""`onbeat models`: what it lists, and which engines it says run a model."""

from __future__ import annotations

import pytest

from onbeat.cli.main import main
from onbeat.perfmodel.model_spec import packaged_configs


def test_models_are_listed_with_sizes_memory_and_engines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    rows = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()
    }
    assert rows.keys() >= {config["hub_ids"][0] for config in packaged_configs().values()}
    assert rows["openai/gpt-oss-20b"][:4] == ["20.9B", "4.19B", "41.8", "GB"]
    assert rows["openai/gpt-oss-20b"][-2:] == ["own", "engines"]
    assert rows["deepseek-ai/DeepSeek-V3"][-1] == "vLLM"
