"""Command lines of `onbeat embed` that are refused before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "out.jsonl"], "corpus.jsonl:2: no field 'text'; the line has 'title'"),
        (["--out", "corpus.jsonl"], "--out is the corpus itself"),
        (["--out", "o", "--url", "http://:80"], "'http://:80' is no address of a server"),
        (["--out", "o", "--patience-sec", "nan"], "--patience-sec must be finite and above 0"),
        (["--out", "o", "--batch-size", "0"], "must be at least 1"),
    ],
)
def test_bad_command_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text('"fine"\n{"title": "x"}\n')
    assert main(["embed", "corpus.jsonl", *arguments]) == 2
    assert words in capsys.readouterr().err
