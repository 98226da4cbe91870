"""Command lines from vLLM's guides: what is taken with a line, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from onbeat.cli.args import find_command, parse
from onbeat.cli.engine_args import engine_config
from onbeat.cli.main import build_parser
from onbeat.cli.serve import ForeignFlag, foreign_flags
from onbeat.core.errors import ConfigError
from onbeat.engine.engine_config import EngineConfig, vllm_flags
from onbeat.hub.files import ModelFiles
from tests.many_cases import each_case

FOREIGN_FLAGS, MISSING_FLAGS, _ = foreign_flags()


def serve(*arguments: str) -> argparse.Namespace:
    return parse(build_parser(["serve"]), ["serve", *arguments])


@each_case(
    ("flags", "said"),
    [
        ("--trust-remote-code", "--trust-remote-code ("),
        ("--enable-chunked-prefill", "--enable-chunked-prefill ("),
        ("--swap-space 4", "--swap-space ("),
        ("--dtype half", "ignored: --dtype half (float16 "),
        ("--dtype=float16", " bfloat16 or float32"),
        ("--load-format safetensors", "auto sees"),
        ("--uvicorn-log-level debug", "--log-level"),
        ("--task generate", "ignored: --task ("),
        ("--task embed", "ignored: --task ("),
        ("--runner pooling", "ignored: --runner ("),
        ("--convert embed", "ignored: --convert ("),
        ("--max-model-len auto", "ignored: --max-model-len "),
        ("--download-dir /models", "HF_HOME"),
        ("--hf-token hf_secret", "$HF_TOKEN"),
        ("--hf-token", "$HF_TOKEN"),
        ("--tokenizer-mode auto", "--tokenizer-mode ("),
        ("--distributed-executor-backend mp", "--launcher ray"),
        ("--disable-log-stats", "GET /metrics has them"),
        ("--cpu-offload-gb 0", "weights stay"),
        ('--limit-mm-per-prompt {"image":0}', "text only"),
        ("--limit-mm-per-prompt image=0,video=0", "text only"),
        ("--stream-interval 1", "--stream-interval ("),
        ("--max-num-partial-prefills 1", "--max-num-partial-prefills ("),
        ("--config-format auto", "config.json"),
        ("--chat-template-content-format auto", "--chat-template-content-format ("),
        ("--response-role assistant", "assistant"),
        ("--nnodes 1", "one machine"),
        ("--enable-server-load-tracking", "/load"),
        ("--enable-offline-docs", "/docs"),
        ("-O3", "ignored: -O ("),
        ("-O 3", "ignored: -O ("),
        ("--attention-backend FLASH_ATTN", "--attention-backend ("),
        ('--compilation-config {"mode":3}', "it tunes"),
        ("-cc {}", "it tunes"),
        ("-pp 1", "ignored: -pp ("),
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
        ("--no-enable-chunked-prefill", "--policy prefill-first "),
        ("--task classify", " auto or generate or embed or embedding or score, not"),
        ("--distributed-executor-backend ray", "--launcher ray "),
        ("--max-cpu-loras 4", "argument --max-cpu-loras: "),
        ("--lora-modules sql", "'sql' is no adapter"),
        ("--tool-parser-plugin a.py", "argument --tool-parser-plugin: "),
        ("-ep", "argument -ep: "),
        ("-pp 2", " 1, not '2'"),
        ("--dtype int3", "invalid choice: 'int3'"),
        ("--load-format pt", "invalid choice: 'pt'"),
        ("--max-model-len many", "whole number"),
        ("--gpu-memory-utilization", "one argument"),
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
        ("--disable-uvicorn-access-log", False),
    ],
)
def test_request_logs_have_vllms_names_too(flag: str, logs: bool) -> None:
    given = serve(flag)
    assert (given.log_requests, given.ignored) == (logs, [])
    assert serve("--no-log-requests").log_requests is False
    assert serve().log_requests is True


@each_case("flag", FOREIGN_FLAGS)
@each_case("place", [0, -1])
def test_each_foreign_flag_is_taken_where_it_asks_for_nothing(
    flag: ForeignFlag, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name = flag.flags.split()[place]
    harmless = list(flag.values) or ["some"]
    for value in [None] if flag.takes == 0 else harmless:
        given = serve("my.gguf", *([name] if value is None else [f"{name}={value}"]))
        assert given.ignored == [f"ignored: {name} ({flag.why})"]
        assert {**vars(given), "ignored": []} == vars(serve("my.gguf"))
    if flag.values:
        with pytest.raises(SystemExit) as stop:
            serve("my.gguf", name, "other")
        error = capsys.readouterr().err
        assert (stop.value.code, error.count("\n")) == (2, 1)
        assert flag.why in error
        assert "not 'other'" in error


@each_case(("name", "why"), [(name, why) for why, names in MISSING_FLAGS.items() for name in names.split()])
def test_each_missing_flag_says_why(name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([name], [name, "value"], [name, "one", "two"]):
        with pytest.raises(SystemExit) as stop:
            serve("my.gguf", *given)
        error = capsys.readouterr().err
        assert (stop.value.code, error.count("\n")) == (2, 1)
        assert f"argument {name}: {why}; " in error
    if name.startswith("--"):
        off = f"--no-{name.removeprefix('--')}"
        assert vars(serve("my.gguf", off)) == vars(serve("my.gguf"))


def test_no_flag_of_the_tables_is_one_of_the_servers_own() -> None:
    foreign = [name for flag in FOREIGN_FLAGS for name in flag.flags.split()]
    foreign += [name for names in MISSING_FLAGS.values() for name in names.split()]
    assert len(set(foreign)) == len(foreign)
    shown = find_command(build_parser(["serve"]), ["serve"]).format_help().replace(",", " ").split()
    assert not set(foreign) & set(shown)


def test_values_of_known_flags_are_still_converted() -> None:
    given = serve("--max-model-len", "4k", "--dtype", "bfloat16", "--load-format", "dummy")
    assert (given.max_model_len, given.dtype, given.load_format) == (4000, "bfloat16", "dummy")
    assert (serve("--dtype", "half").dtype, serve("--dtype", "float").dtype) == ("auto", "float32")


def test_a_configuration_file_may_hold_them(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "disable-log-stats: true\ntrust-remote-code: false\nswap-space: 4\n"
        "limit-mm-per-prompt: {image: 0}\nfully-sharded-loras: false\n"
    )
    given = serve("--config", str(file))
    taken = ["--disable-log-stats", "--swap-space", "--limit-mm-per-prompt"]
    assert [line.split()[1] for line in given.ignored] == taken


def engine(*arguments: str) -> EngineConfig:
    args = parse(build_parser(["serve"]), ["serve", "small", *arguments])
    return engine_config(args, ModelFiles(kind="hf", path=Path("small"), name="small"))


def test_what_stands_behind_the_dashes_is_for_vllm() -> None:
    assert engine("--backend", "vllm", "--", "--kv-cache-dtype", "fp8").vllm_arguments == (
        "--kv-cache-dtype",
        "fp8",
    )
    assert engine("--", "--quantization=awq").vllm_arguments == ("--quantization=awq",)
    for others in (["--backend", "native"], ["--backend", "torch"], ["--load-format", "stand-in"]):
        with pytest.raises(ConfigError, match=f"behind.*{others[1]}"):
            engine(*others, "--", "--kv-cache-dtype", "fp8")


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--max_num_seqs=4", "onbeat has"),
        ("--no-enable-prefix-caching", "onbeat has"),
        ("--speculative-config.method", "onbeat has"),
        ("--port", "onbeat has"),
        ("-tp=2", "--tensor-parallel-size"),
        ("--spec-model", "--speculative-config"),
        ("--scheduler-cls", "onbeat plans"),
        ("--kv-transfer-config", "onbeat vllm serve"),
    ],
)
def test_what_onbeat_decides_does_not_stand_behind_the_dashes(argument: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead) as refused:
        engine("--backend", "vllm", "--", argument)
    assert argument.partition("=")[0] in str(refused.value)


def test_flags_that_onbeat_has_are_there() -> None:
    parser = find_command(build_parser(["serve"]), ["serve"])
    assert all("--" + name.replace("_", "-") in parser._option_string_actions for name in vllm_flags()[0])
