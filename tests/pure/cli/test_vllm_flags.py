"""Command lines from vLLM's guides: what is taken with a line, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from onbeat.cli.args import parse
from onbeat.cli.main import build_parser


def serve(*arguments: str) -> argparse.Namespace:
    return parse(build_parser(), ["serve", *arguments])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--enforce-eager", "ignored: --enforce-eager (no CUDA graphs here)"),
        ("--trust-remote-code", "no code of a model"),
        ("--gpu-memory-utilization 0.9", "--kv-cache-memory-bytes"),
        ("--gpu_memory_utilization=0.9", "ignored: --gpu-memory-utilization ("),
        ("--enable-chunked-prefill", "the policy decides"),
        ("--swap-space 4", "nothing is swapped"),
        ("--dtype half", "ignored: --dtype half (float16 is not computed here"),
        ("--dtype=float16", "auto takes bfloat16 or float32"),
        ("--load-format safetensors", "auto sees"),
        ("--generation-config vllm", "no sampling defaults"),
        ("--uvicorn-log-level debug", "--log-level"),
        ("--task generate", "ignored: --task (there is no other)"),
        ("--enable-prompt-tokens-details", "usage always has them"),
        ("--max-model-len auto", "that is the default"),
        ("--download-dir /models", "HF_HOME"),
        ("--hf-token hf_secret", "$HF_TOKEN"),
        ("--hf-token", "$HF_TOKEN"),
        ("-pp 1", "ignored: -pp (there is one stage)"),
    ],
)
def test_what_asks_for_nothing_is_taken_with_one_line(flags: str, said: str) -> None:
    given = serve("owner/name", *flags.split(), "--max-num-seqs", "8")
    (line,) = given.ignored
    assert said in line
    assert "hf_secret" not in line
    plain = serve("owner/name", "--max-num-seqs", "8")
    assert plain.ignored == []
    assert {**vars(given), "ignored": []} == vars(plain)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--no-enable-chunked-prefill", "--policy prefill-first runs them whole"),
        ("--generation-config auto", "requests state their own"),
        ("--task embed", "this server only generates text, not 'embed'"),
        ("-pp 2", "one pipeline stage, not '2'"),
        ("--dtype int3", "invalid choice: 'int3'"),
        ("--load-format pt", "invalid choice: 'pt'"),
        ("--max-model-len many", "expected a whole number"),
        ("--gpu-memory-utilization", "expected one argument"),
    ],
)
def test_what_asks_for_something_is_refused(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        serve(*flags.split())
    error = capsys.readouterr().err
    assert (stop.value.code, error.count("\n")) == (2, 1)
    assert said in error


@pytest.mark.parametrize(
    ("flag", "logs"),
    [
        ("--enable-log-requests", True),
        ("--disable-log-requests", False),
        ("--no-enable-log-requests", False),
        ("--no-disable-log-requests", True),
    ],
)
def test_request_logs_have_vllms_names_too(flag: str, logs: bool) -> None:
    given = serve(flag)
    assert (given.log_requests, given.ignored) == (logs, [])
    assert serve("--no-log-requests").log_requests is False
    assert serve().log_requests is True


def test_values_of_known_flags_are_still_converted() -> None:
    given = serve("--max-model-len", "4k", "--dtype", "bfloat16", "--load-format", "dummy")
    assert (given.max_model_len, given.dtype, given.load_format) == (4000, "bfloat16", "dummy")
    assert (serve("--dtype", "half").dtype, serve("--dtype", "float").dtype) == ("auto", "float32")


def test_a_configuration_file_may_hold_them(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enforce-eager: true\ntrust-remote-code: false\ngpu-memory-utilization: 0.9\n")
    given = serve("--config", str(file))
    assert [line.split()[1] for line in given.ignored] == ["--enforce-eager", "--gpu-memory-utilization"]
