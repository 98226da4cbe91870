"""`onbeat embed` against a real server: killed, interrupted, and run again."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import httpx
import numpy as np
import orjson

from tests.cpu.e2e.program import ServerProgram, command_line, run_program
from tests.waiting import wait_for

NUM_TEXTS = 80


def num_lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def test_each_line_is_done_once_after_kills(smollm2_server: ServerProgram, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out.jsonl"
    texts = [f"Text {number} tells of {'many ' * (number % 20)}things." for number in range(NUM_TEXTS)]
    corpus.write_bytes(
        b"\n".join(orjson.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts))
    )
    arguments = ("embed", corpus, "--url", smollm2_server.url, "--out", out, "--batch-size", "2")
    for number, enough in ((signal.SIGKILL, 4), (signal.SIGINT, 16)):
        with subprocess.Popen(command_line(*arguments), stderr=subprocess.PIPE, text=True) as process:
            wait_for(lambda: num_lines(out) >= enough or process.poll() is not None)  # noqa: B023
            process.send_signal(number)
            process.wait()
            assert process.stderr is not None
            told = process.stderr.read()
        before = num_lines(out)
        assert enough <= before < NUM_TEXTS
        with out.open("ab") as file:
            file.write(b'{"line": 79, "digest": "')  # as a kill may leave it
    assert process.returncode == 130
    assert f"{before} of 80 texts are in {out}; run the command again to go on" in told
    again = run_program(*arguments)
    assert again.returncode == 0, again.stderr
    assert f"80 of 80 texts are in {out}" in again.stderr
    lines = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert sorted(each["line"] for each in lines) == list(range(1, NUM_TEXTS + 1))
    one = next(each for each in lines if each["id"] == "d7")
    body = {"input": texts[7]}
    alone = httpx.post(f"{smollm2_server.url}/v1/embeddings", json=body, timeout=60).json()
    assert float(np.dot(one["embedding"], alone["data"][0]["embedding"])) > 0.999
