"""`onbeat capacity`: flags, the answer on the terminal and in files, and its exit codes."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from onbeat.cli.args import INFEASIBLE
from onbeat.cli.capacity import parse_vary
from onbeat.cli.capacity_output import CapacityReport, capacity_result
from onbeat.cli.main import COMMANDS, main
from onbeat.core.errors import ConfigError
from onbeat.planner.capacity import Capacity, SearchEnd
from onbeat.report.result import Table

MODEL = ["--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm"]
LOAD = ["--dataset-name", "random", "--input-len", "512", "--output-len", "32", "--num-prompts", "150"]
QUICK = [
    "--max-model-len",
    "8192",
    "--repeats",
    "1",
    "--tolerance",
    "0.2",
    "--max-num-seqs",
    "4",
    "--jobs",
    "1",
]


def capacity(*flags: str) -> int:
    return main(["capacity", *MODEL, *LOAD, *QUICK, *flags])


def test_reads_lists_of_values() -> None:
    flags = ["tp=1,2", "--max-num-batched-tokens=256,auto", "slo_tbt_ms=50,100", "shed-order=longest-wait"]
    assert parse_vary(flags) == {
        "tensor_parallel": [1, 2],
        "shed_order": ["longest-wait"],
        "max_num_batched_tokens": [256, "auto"],
        "tbt": [0.05, 0.1],
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["polcy=sarathi"], "mean policy"),
        (["seed=1,2"], "'seed'"),
        (["tp"], "expected NAME=VALUE,VALUE"),
        (["tp=1,,2"], "expected NAME=VALUE,VALUE"),
        (["tp=1,1"], "given twice"),
        (["tp=1", "tensor-parallel-size=2"], "given twice"),
        (["tp=two"], "whole number"),
        (["max-num-batched-tokens=some"], "expected a "),
    ],
)
def test_says_what_is_wrong_with_a_list(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_vary(texts)


def make_capacity(outcome: SearchEnd, rate: float, **labels: str) -> Capacity:
    return Capacity(
        labels=tuple(labels.items()),
        outcome=outcome,
        rate=rate,
        interval=(rate, rate * 1.02 if outcome is SearchEnd.FOUND else float("inf")),
        num_devices=2 if rate else 0,
        reason="at 10.2 requests/s: P99 TBT 110.0 ms > 100.0 ms",
        repeats=(),
    )


SETTINGS = {"flags": {"device": "h100-sxm"}, "load": {"num_requests": 900, "mean_output_tokens": 32.0}}


def make_report(*capacities: Capacity) -> CapacityReport:
    promises = {each.labels: "keep it" for each in capacities}
    return CapacityReport(
        title="Capacity", lead="a load", settings=SETTINGS, capacities=capacities, promises=promises
    )


def table_of(report: CapacityReport) -> Table:
    parts = [part for section in capacity_result(report).sections for part in section.parts]
    return next(part for part in parts if isinstance(part, Table) and part.key == "cases")


def test_each_outcome_has_its_words() -> None:
    report = make_report(*(make_capacity(outcome, 10.0 * (outcome != "infeasible")) for outcome in SearchEnd))
    rows = table_of(report).cells
    assert [row[1] for row in rows] == ["found", "INFEASIBLE", "none missed", "at least"]
    assert [row[2] for row in rows] == ["10", "-", "10", "10"]
    assert [row[3] for row in rows] == ["10 to 10.2", "-", "10 or more", "10 or more"]


def test_the_best_case_serves_most_per_device() -> None:
    slow, fast = make_capacity(SearchEnd.FOUND, 4.0, tp="1"), make_capacity(SearchEnd.FOUND, 6.0, tp="2")
    report = make_report(slow, fast, make_capacity(SearchEnd.UNBOUNDED, 99.0))
    assert report.best is fast
    assert not report.is_infeasible
    none = make_capacity(SearchEnd.INFEASIBLE, 0.0)
    assert make_report(none).is_infeasible
    assert not make_report(none, make_capacity(SearchEnd.INTERRUPTED, 0.0)).is_infeasible


def test_the_document_is_plain_json() -> None:
    capacities = [make_capacity(each, 4.0, tp="1") for each in (SearchEnd.UNBOUNDED, SearchEnd.INTERRUPTED)]
    report = make_report(*capacities)
    saved = json.loads(orjson.dumps(capacity_result(report).document()))
    assert saved["interrupted"] is True
    assert saved["cases"][0]["request_rate_interval"] == [4.0, None]


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "capacity.json"
        code = capacity(*flags, "--json", str(path))
        return code, json.loads(path.read_text())

    return run


def test_is_a_command() -> None:
    assert "capacity" in COMMANDS
    assert INFEASIBLE == 3


def test_finds_the_capacity_of_a_real_model(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = saved("--objective", "sarathi", "--slo-tbt-ms", "50")
    assert code == 0
    (case,) = document["cases"]
    assert case["outcome"] == "found"
    assert 1 < case["request_rate"] < 200
    low, high = case["request_rate_interval"]
    assert low <= case["request_rate"] <= high
    assert "requests/s and keep" in capsys.readouterr().out


def test_compares_cases_and_writes_a_page(saved: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, document = saved(
        *("--slo-tbt-ms", "30", "--vary", "policy=sarathi,prefill-first", "--vary", "slo-tbt-ms=20,40"),
        *("--report", str(page)),
    )
    assert code == 0
    assert [case["case"]["policy"] for case in document["cases"]] == ["sarathi", "prefill-first"] * 2
    rates = {tuple(case["case"].values()): case["request_rate"] for case in document["cases"]}
    assert rates["sarathi", "40"] >= rates["sarathi", "20"]
    text = page.read_text()
    assert "TBT objective (ms)" in text
    assert "20 ms or TBT 40 ms" in text
    assert f'<td class="left long">{html.escape(document["cases"][0]["reason"])}</td>' in text
    assert "P99 TBT over the request rate" in text
    rate = f"{document['cases'][0]['request_rate']:.4g}"
    assert f"<td>{rate}</td>" in text
    assert f"<td>{document['cases'][0]['request_rate']:.3f}</td>" not in text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--slo-tbt-ms", "3"), "P99 TBT"),
        (
            ("--slo-tbt-ms", "3", "--max-num-batched-tokens", "auto"),
            "no token budget keeps the TBT objective",
        ),
        (("--objective", "attainment:0.9", "--slo-ttft-ms", "1"), "TTFT met by 0.00 %"),
        (("--objective", "vidur", "--gpu-memory-utilization", "0.1"), "memory"),
    ],
    ids=["step", "budget", "ttft", "memory"],
)
def test_says_why_nothing_fits(
    flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capacity(*flags) == INFEASIBLE
    out = " ".join(capsys.readouterr().out.split())
    assert "INFEASIBLE" in out
    assert reason in out


def test_of_jobs_so_many_keep_their_deadlines(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--dataset-name", "retrieval-plan", "--num-prompts", "40", "--objective", "attainment:0.9"]
    load += ["--job-deadline-ms", "4000", "--max-num-seqs", "4"]
    search = ["--repeats", "1", "--tolerance", "0.5", "--jobs", "1", "--disable-tqdm"]
    assert main(["capacity", *MODEL, *load, *search]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"serves \S+ jobs/s and keeps the deadlines of 90 % of the jobs", out)
    assert "jobs kept" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--slo-tbt-ms"),
        (("--objective", "p99"), "unknown objective 'p99'"),
        (("--objective", "attainment:0.9"), "--slo-ttft-ms"),
        (("--objective", "vidur", "--device", "h1000"), "h1000"),
        (("--objective", "vidur", "--model", "no/such-model"), "no/such-model"),
        (("--objective", "vidur", "--tolerance", "2"), "tolerance"),
        (("--objective", "vidur", "--repeats", "0"), "repeats is 0"),
        (("--objective", "vidur", "--jobs", "0"), "jobs"),
        (("--objective", "vidur", "--max-num-batched-tokens", "2"), "max_num_seqs"),
        (("--objective", "vidur", "--vary", "tp=3"), "3"),
        (("--objective", "vidur", "--request-rate", "2"), "leave out --request-rate"),
        (("--objective", "vidur", "--vary", "shed=off,rejct"), "mean reject?"),
        (("--objective", "vidur", "--vary", "shed-order=longest"), "mean longest-wait?"),
        (("--objective", "vidur", "--vary", "tp=1,2", "--tp", "4"), "--tensor-parallel-size 4"),
        (("--objective", "vidur", "--max-concurrency", "2"), "no rate to search"),
    ],
)
def test_bad_input_is_one_line(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capacity(*flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_case_whose_memory_is_too_small_for_the_longest_request_says_so(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    load = ["--dataset-name", "random", "--input-len", "60000", "--output-len", "8", "--num-prompts", "20"]
    flags = ["--vary", "device=l4,h100-sxm", "--slo-ttft-ms", "60000", "--objective", "attainment:0.5"]
    flags += ["--repeats", "1", "--tolerance", "0.5", "--json", str(path)]
    assert main(["capacity", *MODEL, *load, *flags]) == 0
    small, large = json.loads(path.read_text())["cases"]
    assert "43536 tokens" in small["reason"]
    assert re.search(r"23\.6 GiB .* 21\.6", small["reason"])
    assert re.findall(r"--\w+ \w+", small["reason"]) == ["--tp 2", "--pp 2", "--dtype fp8"]
    assert large["request_rate"] > 0


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_leaves_a_partial_result(jobs: str, tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    command = [sys.executable, "-m", "onbeat.cli.main", "capacity", *MODEL, *LOAD, *QUICK]
    command += ["--objective", "vidur", "--num-prompts", "100k", "--jobs", jobs, "--repeats", "2"]
    process = subprocess.Popen(
        [*command, "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    assert " repeat" in process.stderr.readline()
    time.sleep(1.0)  # the first search is under way then; it takes far longer
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "partial result" in out
    assert json.loads(path.read_text())["interrupted"] is True
