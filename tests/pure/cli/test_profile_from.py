"""`onbeat profile --from`, `onbeat replay --steps`: from recorded steps of another engine to its profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onbeat.cli.args import parse
from onbeat.cli.main import build_parser, main
from onbeat.cli.profile import measured_engine
from onbeat.hub.files import ModelFiles
from onbeat.perfmodel.profile import read_profile
from tests.pure.perfmodel.recorded import made_up_steps, write_lines

ORIGIN = [
    *("--model", "Llama-3.1-8B", "--device", "h100-sxm", "--tp", "2", "--weights", "fp8"),
    *("--engine", "vllm", "--engine-version", "0.32.0"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("steps"), *made_up_steps(400))


@pytest.fixture(scope="module")
def profile(recorded: Path) -> Path:
    path = recorded.with_name("profile.json")
    files = ["--from", str(recorded), "--output", str(path)]
    assert main(["profile", *files, *ORIGIN, "--request-overhead-ms", "15"]) == 0
    return path


def test_a_profile_says_whose_steps_it_is_of(profile: Path) -> None:
    found = read_profile(profile)
    key = found.key
    assert (key.model, key.device, key.parallelism.tensor, key.precision.weights) == (
        *("Llama-3.1-8B", "h100-sxm", 2, "fp8"),
    )
    assert (key.backend, key.engine_version) == ("vllm", "0.32.0")
    assert (found.server.steps_ahead, found.server.request_seconds) == (1, 0.015)
    assert found.fitted.errors.p50 < 0.03
    assert found.fitted.errors.num_points == 80


def test_it_predicts_the_steps_that_it_was_fitted_to(
    recorded: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = recorded.with_name("errors.json")
    arguments = ["replay", "--steps", str(recorded), "--profile", str(profile), "--json", str(saved)]
    assert main(arguments) == 0
    assert "Predicted against recorded" in capsys.readouterr().out
    errors = {each["kind"]: each for each in json.loads(saved.read_text())["errors"]}
    assert set(errors) == {"decode", "prompt", "mixed", "all"}
    assert errors["all"]["num_steps"] == 400
    assert all(each["p50"] < 0.03 and abs(each["bias"]) < 0.02 for each in errors.values())


def test_it_drives_a_simulation(profile: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    common = "--model Llama-3.1-8B --device h100-sxm --tp 2 --dtype fp8 --step-time fitted --disable-tqdm"
    load = "--num-prompts 20 --request-rate 2 --random-input-len 100 --random-output-len 8"
    times = []
    for extra in ([], ["--request-overhead-ms", "0"]):
        files = ["--profile", str(profile), "--json", str(summary)]
        arguments = [*common.split(), *load.split(), *files, *extra]
        assert main(["simulate", *arguments]) == 0
        times.append(json.loads(summary.read_text())["mean_ttft_ms"])
    assert times[0] - times[1] == pytest.approx(15, abs=1.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "nowhere.jsonl"], "steps nowhere.jsonl"),
        (["--tp", "2"], "--tensor-parallel-size describes recorded steps; give --from SOURCE"),
        (["--from", "STEPS", "--threads", "2"], "--threads has no effect on --from"),
        (["--from", "STEPS", "--seconds", "2"], "--seconds has no effect on --from"),
        (["--from", "STEPS", "--max-context-tokens", "9"], "--max-context-tokens has no effect on --from"),
        (["--from", "STEPS", "--model", "no-such-model", "--device", "l4"], "no-such-model"),
        (["record", "tcp://nowhere", "x", "--from", "STEPS"], "--from has no effect on `onbeat profile rec"),
        (["record", "tcp://nowhere", "x", "--device", "l4"], "--device has no effect on `onbeat profile"),
        (["record", "tcp://127.0.0.1:1"], "takes a source and a file"),
        (["record", "steps.jsonl", "out.jsonl"], "'steps.jsonl'; give tcp://HOST:PORT"),
        (["llama", "more"], "argument 'more'"),
    ],
)
def test_bad_input_is_one_sentence(
    recorded: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [str(recorded) if each == "STEPS" else each for each in arguments]
    given = [str(tmp_path / each) if each == "out.jsonl" else each for each in given]
    assert main(["profile", *given]) == 2
    assert words in capsys.readouterr().err


def test_steps_without_a_model_ask_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path, *made_up_steps(20))
    assert main(["profile", "--from", str(path)]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["replay", "--steps", str(path)]) == 2
    assert "--profile" in capsys.readouterr().err


def test_too_few_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path, *made_up_steps(6))
    assert main(["profile", "--from", str(path), *ORIGIN]) == 2
    assert "too few" in capsys.readouterr().err


def test_what_was_never_measured_is_not_extrapolated_in_silence(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded steps had 40 requests and 512 prompt tokens; here come prompts of 4,000, one a step."""
    common = "--model Llama-3.1-8B --device h100-sxm --tp 2 --dtype fp8 --step-time fitted --disable-tqdm"
    load = "--policy sarathi --max-num-batched-tokens 4096 --random-output-len 4 --random-range-ratio 0"
    few = "--num-prompts 10 --request-rate 1"
    words = "note: steps went beyond what the profile was fitted to: up to"
    for num_tokens, is_told in ((4000, True), (300, False)):
        shape = f"--random-input-len {num_tokens}"
        arguments = ["simulate", *common.split(), *load.split(), *few.split(), *shape.split()]
        assert main([*arguments, "--profile", str(profile)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert out.count(words) == is_told
        assert ("new tokens (5" in out) == is_told
    shape = "--random-input-len 4000 --num-prompts 30 --slo-ttft-ms 2000 --slo-tbt-ms 200 --repeats 1"
    arguments = ["capacity", *common.split(), *load.split(), *shape.split()]
    assert main([*arguments, "--profile", str(profile)]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(words) == 1


def test_what_is_measured_here_is_one_process(tmp_path: Path) -> None:
    """The number of processes that can be given is of another engine's."""
    args = parse(build_parser(["profile"]), ["profile"])
    model = ModelFiles(kind="hf", path=tmp_path, name="tiny")
    assert measured_engine(args, model).tensor_parallel_size == 1
