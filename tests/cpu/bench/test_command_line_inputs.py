"""Where the load of `onbeat bench serve` comes from, and which flags are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.cli.main import main
from tests.cpu.bench.background import SMALL, Background, bench, load


@pytest.mark.parametrize(
    "flags", [["--json", "/proc/nowhere/r.json"], ["--save-result", "--result-dir", "/proc/nowhere"]]
)
def test_a_result_that_cannot_be_saved_is_found_out_before_the_load(
    server: Background, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, *SMALL, "--num-prompts", "2", *flags) == 2

    assert f"{flags[-2]}: cannot write /proc/nowhere/" in capsys.readouterr().err
    assert server.fake.num_completions == 0


def test_lines_are_added_to_the_named_file_alone(server: Background, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for _ in range(2):
        bench(server, *SMALL, "--num-prompts", "2", "--json", str(path), "--append-result")

    assert list(tmp_path.iterdir()) == [path]
    assert main(["bench", "compare", str(path), str(path)]) == 0


def test_a_trace_is_found_by_its_header_and_replayed(server: Background, tmp_path: Path) -> None:
    trace, path = tmp_path / "t.jsonl", tmp_path / "r.json"
    trace.write_text(
        '{"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1]}\n'
        '{"timestamp": 100, "input_length": 20, "output_length": 2, "hash_ids": [1]}\n'
    )

    bench(server, "--trace", str(trace), "--json", str(path))

    document = load(path)
    assert (document["dataset_name"], document["arrivals"]) == ("mooncake", "replay")
    assert server.fake.bodies[0]["prompt"] == server.fake.bodies[1]["prompt"]
    assert document["duration"] >= 0.1


def test_prefixes_repeat(server: Background) -> None:
    bench(
        server,
        *(
            "--dataset-name",
            "prefix_repetition",
            "--num-prompts",
            "6",
            "--prefix-repetition-num-prefixes",
            "2",
        ),
        *("--prefix-repetition-prefix-len", "10", "--prefix-repetition-suffix-len", "5"),
        *("--prefix-repetition-output-len", "3", "--max-concurrency", "2"),
    )

    prefixes = {" ".join(body["prompt"].split()[:10]) for body in server.fake.bodies}
    assert len(prefixes) == 2
    assert len({body["prompt"] for body in server.fake.bodies}) == 6


def test_custom_prompts(server: Background, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "hello there", "output_tokens": 3}\n{"prompt": "again"}\n')

    bench(server, "--dataset-name", "custom", "--dataset-path", str(path), "--output-len", "5")

    assert {(body["prompt"], body["max_tokens"]) for body in server.fake.bodies} == {
        ("hello there", 3),
        ("again", 5),
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goodput", "ttft"], "--goodput takes NAME:MILLISECONDS"),
        (["--goodput", "speed:5"], "objective 'speed'"),
        (["--percentile-metrics", "ttft,foo"], "metric 'foo'"),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--extra-body", "[]"], "must be a mapping"),
        (["--header", "novalue"], "KEY=VALUE"),
        (["--sweep-concurrency", "1,0"], "sweep_concurrency"),
        (["--sweep-concurrency", "1,2", "--request-rate", "3"], "leave out --request-rate"),
        (["--sweep-concurrency", "1,2", "--max-concurrency", "3"], "leave out --max-concurrency"),
        (["--sweep-concurrency", "1,2", "--rate-steps", "2:60"], "leave out --rate-steps"),
        (["--sweep-rate", "1,2", "--request-rate", "3"], "sets --request-rate itself"),
        (["--save-detailed"], "--save-detailed is for a saved result: give --json FILE or --save-result"),
        (["--metadata", "a=b"], "--metadata"),
        (["--random-range-ratio", "0.5", "--dataset-name", "conversation"], "--random-range-ratio is for"),
        (["--prefix-repetition-num-prefixes", "3"], "is for --dataset-name prefix_repetition"),
        (["--disable-shuffle"], "--disable-shuffle is for"),
        (["--burstiness", "0.5", "--max-concurrency", "3"], "--burstiness"),
        (["--dataset-name", "sharegpt"], "needs a file"),
        (["--trace", "/nowhere/trace.csv"], "/nowhere/trace.csv"),
        (["--dataset-name", "prefix_repetition", "--input-len", "4"], "--input-len is for"),
        (["--rate-scale", "2"], "--rate-scale"),
        (["--result-dir", "x", "--num-prompts", "1"], "--result-dir needs --save-result"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--base-url", "localhost"], "--base-url"),
        (["--num-warmups", "-1"], "num_warmups is -1"),
        (["--request-timeout-sec", "nan"], "request_timeout_sec is nan;"),
        (["--ready-check-timeout-sec", "nan"], "ready_check_timeout_sec is nan"),
        (["--ready-check-timeout-sec", "-1"], "ready_check_timeout_sec is -1"),
    ],
)
def test_bad_flags_are_one_clear_line(
    flags: list[str], message: str, server: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, *flags) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert server.fake.num_completions == 0


@pytest.mark.parametrize("value", ["0", "-3"])
def test_lengths_below_one_are_refused(
    value: str, server: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--random-input-len", value) == 2
    assert f" is {value};" in capsys.readouterr().err


def test_a_server_that_cannot_be_asked_leaves_the_error_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "m"]) != 0
    error = capsys.readouterr().err.strip()
    assert error.startswith("onbeat: error: ")
    assert "asking" not in error


def test_a_bad_load_is_refused_before_a_server_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", "http://127.0.0.1:9", "--model", "m", "--dataset-name", "sharegpt"]
    assert main(["bench", "serve", *flags]) == 2
    assert "--dataset-path" in capsys.readouterr().err


def test_an_unknown_flag_names_a_near_one(server: Background, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench(server, "--num-prompt", "3")
    assert caught.value.code == 2
    assert "--num-prompts" in capsys.readouterr().err
