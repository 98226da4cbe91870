"""The page of vLLM's tests of its API says which of them ran on a server without flags."""

from __future__ import annotations

from benchmarks.check.vllm_api.__main__ import report
from benchmarks.check.vllm_api.serve import accepted


def test_flags_that_were_left_out_are_told_and_counted() -> None:
    kept, left_out = accepted(["--max-num-seqs", "8", "--uds", "/tmp/x.sock", "--enable-lora"])
    assert (kept, left_out) == (["--max-num-seqs", "8"], ["--uds", "--enable-lora"])
    results = [
        {"test": f"entrypoints/{file}.py::test_it", "outcome": outcome, "reason": "", "left_out": flags}
        for file, outcome, flags in (
            *(("plain", "passed", ""), ("lora", "passed", "--enable-lora"), ("lora", "skipped", "")),
            *(("test_uds", "failed", "--uds"), ("plain", "failed", "")),
        )
    ]
    page = list(report(results))
    assert page[0] == "2 of 4 passed; 1 more test no server."
    assert page[1].startswith("1 that passed ")
    assert "| `lora.py` | 1 | 0 | 1 | `--enable-lora` |" in page
    assert "| `plain.py` | 1 | 1 | 0 |  |" in page
    assert "- 1: no Unix sockets (`it`)" in page
