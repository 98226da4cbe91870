"""The strict parser: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cli.args import count, normalise, parse
from onbeat.cli.engine_args import find_model, model_name
from onbeat.cli.main import COMMANDS, build_parser, main
from onbeat.cli.outputs import StudyOptions
from onbeat.core.errors import ConfigError
from onbeat.hub.known import DEFAULT_MODEL
from tests.many_cases import each_case

DATA = Path(__file__).parents[2] / "data"


def serve(*arguments: str) -> argparse.Namespace:
    return parse(build_parser(["serve"]), ["serve", *arguments])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command; return its one line on stderr."""
    code: object
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    assert "error: " in captured.err
    return captured.err


def sub_parser(*names: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = build_parser()
    for name in names:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[name]
    return parser


def test_help_shows_defaults_of_zero_and_no_false_ones() -> None:
    text = " ".join(sub_parser("simulate").format_help().split())
    assert re.search(r"--seed \S+ [^(]*\(default: 0\)", text)
    assert "default: False" not in text
    assert "default: None" not in text


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins"])
def test_the_model_may_follow_a_flag_that_can_be_given_again(flag: str) -> None:
    args = serve(flag, "one", flag, "two", "my.gguf", "--port", "9000")
    assert model_name(args) == "my.gguf"
    assert getattr(args, flag[2:].replace("-", "_")) == ["one", "two"]


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins"])
@pytest.mark.parametrize("model", [("my.gguf",), ("--model", "my.gguf"), ("--model=my.gguf",)])
def test_a_flag_takes_several_values_where_the_model_is_told(model: tuple[str, ...], flag: str) -> None:
    args = serve(*model, flag, "one", "two", "--port", "9000", flag, "three")
    assert model_name(args) == "my.gguf"
    assert getattr(args, flag[2:].replace("-", "_")) == ["one", "two", "three"]
    assert args.port == 9000


def test_several_values_need_no_model_where_a_command_has_none() -> None:
    args = parse(
        build_parser(),
        ["capacity", "--model", "llama-3.1-8b", "--device", "l4", "--vary", "policy=slo", "shed=off"],
    )
    assert args.vary == ["policy=slo", "shed=off"]


def test_two_values_behind_one_flag_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "serve", "--api-key", "one", "two", "my.gguf")
    assert "'my.gguf'" in error
    error = refusal(capsys, "serve", "my.gguf", "--port", "0", "two")
    assert "'two'" in error
    error = refusal(capsys, "serve", "--port", "0", "--served-model-name", "one", "two")
    assert "model 'two'" in error


def test_a_stand_in_has_no_revision() -> None:
    with pytest.raises(ConfigError, match="--revision"):
        find_model(serve("any", "--load-format", "stand-in", "--revision", "v2"))


def test_every_flag_of_serve_is_explained() -> None:
    assert [action.dest for action in sub_parser("serve")._actions if not action.help] == []


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in COMMANDS), ("bench", "serve"), ("bench", "compare")],
)
def test_help_can_be_shown(command: tuple[str, ...]) -> None:
    assert "--help" in sub_parser(*command).format_help()  # a stray % in a help text would raise


@each_case(
    ("arguments", "expected"),
    [
        (["serve", "--max-model-lem", "8"], "--max-model-lem; did you mean --max-model-len?"),
        (["serve", "--max_modl_len=8"], "--max-modl-len; did you mean --max-model-len?"),
        (["serve", "--qqq"], "--qqq (see onbeat serve --help)"),
        (["serve", "--max-log", "x"], "flag --max-log"),
        (["serve", "--max-prob-len", "x"], "flag --max-prob-len"),
        (["serve", "--tp-size=2"], "--tp-size; did you mean --tensor-parallel-size?"),  # SGLang's name
        (["bench", "serve", "--tp-size=2"], "unknown flag --tp-size (see"),  # which it has by no name
        (["serve", "--max-queue-seconds", "x"], "--max-queue-seconds: expected SECONDS, got 'x'"),
        (["bench", "serve", "--num-gpus", "x"], "--num-gpus: expected NUM_GPUS, got 'x'"),
        (["serve", "--slo", "x"], "unknown flag --slo (see"),  # of many flags the beginning
        (["serve", "--slo-nodules", "x"], "flag --slo-nodules"),
        (["serve", "--tensor-parallel", "2"], "mean --tensor-parallel-size?"),
        (["serve", "--max-model", "8"], "unknown flag --max-model"),  # no abbreviations
        (["serve", "a.gguf", "b.gguf"], "unexpected argument 'b.gguf'"),
        (["serve", "-x"], "unknown flag -x"),
        (["serve", "-c", "3"], "unknown flag -c"),  # of -cc the beginning
        (["serve", "-p", "3"], "unknown flag -p"),
        (["bench", "serve", "--max-concurency", "8"], "mean --max-concurrency?"),
        (["serve", "--policy", "fifo"], "choice: 'fifo'"),
        (["serve", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["serve", "--port", "http"], "--port"),
        (["serve", "--port"], "one argument"),
        (["serve", "--max-model-len", "many"], "as 4096, 32k"),
        (["serve", "--config"], "one argument"),
        (["serv"], "choice: 'serv'"),
        ([], "required: COMMAND"),
        (["--no-such"], "required: COMMAND"),
        (["bench"], "required: COMMAND"),
    ],
)
def test_what_is_not_understood_is_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(capsys, *arguments)


def test_underscores_are_dashes() -> None:
    assert serve("--max_model_len", "64", "--no_log_requests") == serve(
        "--max-model-len=64", "--no-log-requests"
    )
    assert normalise("--chat_template=/a_b/c_d") == "--chat-template=/a_b/c_d"
    assert normalise("a_b") == "a_b"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("1.5k", 1500),
        ("32K", 32_768),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("4g", 4 * 10**9),
        ("4G", 4 * 2**30),
        ("4GB", 4 * 2**30),
        ("4GiB", 4 * 2**30),
        (" 7 ", 7),
    ],
)
def test_count(text: str, value: int) -> None:
    assert count(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "4Q", "four", "1.5", "nan", "infk", "nanG", "0x10", "4 000", "4kG"]
)
def test_a_bad_count_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        count(text)


@given(st.text(max_size=8))
def test_count_gives_a_number_or_its_own_error(text: str) -> None:
    try:
        value = count(text)
    except argparse.ArgumentTypeError:
        return
    assert isinstance(value, int)


def test_model_by_position_or_by_flag() -> None:
    assert model_name(serve()) == DEFAULT_MODEL
    assert model_name(serve("a.gguf")) == "a.gguf"
    assert model_name(serve("--model", "a.gguf")) == "a.gguf"
    assert model_name(serve("a.gguf", "--model", "a.gguf")) == "a.gguf"
    with pytest.raises(ConfigError, match=r"a\.gguf.*--model.*b\.gguf"):
        model_name(serve("a.gguf", "--model", "b.gguf"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "onbeat 0.2.0\n"


@pytest.mark.parametrize("repeats", [0, 10**20])
def test_repeats_are_bounded(repeats: int) -> None:
    with pytest.raises(ConfigError, match=f"repeats is {repeats}; "):
        StudyOptions(repeats=repeats)
