from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from onbeat.cli import models
from onbeat.core.errors import ModelLoadError
from onbeat.hub.known import KNOWN_MODELS, models_dir
from tests.long.wheels import make_known_model


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    return models.run(parser.parse_args(arguments))


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_list(index: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    output = capsys.readouterr().out
    for model in KNOWN_MODELS.values():
        assert model.name in output
        assert model.license_url in output
    assert "135M" in output
    assert "98 MB" in output
    (sizes,) = (line for line in output.splitlines() if "Qwen/Qwen3.6-35B-A3B" in line)
    # ten layers keep KV of two heads of 256, and thirty a state of 32 matrices of 128 by 128 in float32
    for part in ("34.7B", "69.3 GB", "20.5 MB", "65.9 MB", "own engines"):
        assert part in sizes
    assert "yes" not in output  # the cache is empty
    assert str(models_dir()) in output


def test_fetch_then_path(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_known_model(index, [b"GGUF", b"rest"])
    monkeypatch.setitem(KNOWN_MODELS, model.name, model)
    with pytest.raises(ModelLoadError, match="fetch tiny-model"):
        run("path", model.name)
    assert run("fetch", model.name) == 0
    captured = capsys.readouterr()
    assert Path(captured.out.strip()).read_bytes() == b"GGUFrest"
    assert "fetching tiny-model" in captured.err
    assert run("path", model.name) == 0
    assert capsys.readouterr().out == captured.out
    run()
    assert "yes" in capsys.readouterr().out


def test_unknown_model() -> None:
    with pytest.raises(ModelLoadError, match="'nothing'"):
        run("fetch", "nothing")
