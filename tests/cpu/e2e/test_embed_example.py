"""examples/embed_corpus.py against a real server: killed, and run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np

from tests.cpu.e2e.program import ServerProgram
from tests.waiting import wait_for

NUM_TEXTS = 48
EXAMPLE = Path(__file__).parents[3] / "examples/embed_corpus.py"


def num_lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def test_each_line_is_done_once_after_kills(smollm2_server: ServerProgram, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out.jsonl"
    texts = [f"Text {number} tells of {'many ' * (number % 20)}things." for number in range(NUM_TEXTS)]
    corpus.write_text("\n".join(json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)))
    command = [sys.executable, str(EXAMPLE), str(corpus), str(out)]
    env = {**os.environ, "OPENAI_BASE_URL": f"{smollm2_server.url}/v1", "OPENAI_API_KEY": "unused"}
    with subprocess.Popen(command, env=env) as process:
        wait_for(lambda: num_lines(out) >= 16 or process.poll() is not None)
        process.kill()
    before = num_lines(out)
    assert 16 <= before < NUM_TEXTS
    with out.open("ab") as file:
        file.write(b'{"line": 39, "digest": "')  # as a kill may leave it

    again = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=120)
    assert again.stdout.startswith(f"{NUM_TEXTS} of {NUM_TEXTS} ")
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert sorted(each["line"] for each in lines) == list(range(1, NUM_TEXTS + 1))
    one = next(each for each in lines if each["id"] == "d7")
    alone = httpx.post(f"{smollm2_server.url}/v1/embeddings", json={"input": texts[7]}, timeout=60).json()
    assert float(np.dot(one["embedding"], alone["data"][0]["embedding"])) > 0.999

    corpus.write_text(corpus.read_text().replace("Text 7 ", "Text seven "))
    changed = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)
    assert (changed.returncode, "line 8 " in changed.stderr) == (1, True)
