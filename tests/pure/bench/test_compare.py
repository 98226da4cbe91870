from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from rich.console import Console

from onbeat.bench.bench_load import BenchLoad
from onbeat.bench.compare import Comparison, Row, SavedRun, compare, comparison_table, read_runs
from onbeat.core.errors import ConfigError
from onbeat.report.result import show_parts
from tests.pure.bench.results import document_of, failure, make_records, make_result


def saved(path: Path, *results: Any, detailed: bool = True) -> list[SavedRun]:
    path.write_bytes(orjson.dumps(document_of(*results, detailed=detailed)))
    return read_runs(path)


def quickly(baseline: list[SavedRun], candidate: list[SavedRun]) -> list[Comparison]:
    return compare(baseline, candidate, np.random.default_rng(0))


def rows_of(baseline: list[SavedRun], candidate: list[SavedRun]) -> dict[str, Row]:
    [comparison] = quickly(baseline, candidate)
    return {row.name: row for row in comparison.rows}


def test_a_slower_run_is_found_worse(tmp_path: Path) -> None:
    fast = saved(tmp_path / "a.json", make_result(make_records(60)))
    slow = saved(tmp_path / "b.json", make_result(make_records(60, slowdown=1.5, seed=1)))
    rows = rows_of(fast, slow)

    row = rows["mean_tpot_ms"]
    assert row.ratio == pytest.approx(1.5, rel=0.1)
    assert row.ratio is not None
    assert row.interval is not None
    assert row.interval[0] < row.ratio < row.interval[1]
    assert row.verdict == "worse"
    assert rows_of(slow, fast)["p90_itl_ms"].verdict == "better"


def test_two_draws_of_one_thing_are_not_told_apart(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.json", make_result(make_records(60, seed=1)))
    second = saved(tmp_path / "b.json", make_result(make_records(60, seed=2)))

    assert rows_of(first, second)["mean_ttft_ms"].verdict.startswith("no clear")


def test_without_details_there_is_a_ratio_but_no_verdict(tmp_path: Path) -> None:
    runs = saved(tmp_path / "a.json", make_result(), detailed=False)
    row = rows_of(runs, runs)["mean_ttft_ms"]

    assert (row.ratio, row.interval, row.verdict) == (1.0, None, "")


def test_what_was_0_has_no_ratio() -> None:
    row = Row("attainment", 0.0, 0.5, None, higher_is_better=True)
    table = comparison_table(Comparison("", (row,), ()), ("a", "b"))
    assert table.cells == [["attainment", "0.00", "0.50", "-", "-", ""]]


def test_failed_requests_are_left_out_of_the_intervals(tmp_path: Path) -> None:
    runs = saved(tmp_path / "a.json", make_result([*make_records(20), failure(20)]))

    assert rows_of(runs, runs)["mean_e2el_ms"].interval is not None


def test_differing_settings_are_said(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.json", make_result(load=BenchLoad(max_concurrency=4)))
    second = saved(tmp_path / "b.json", make_result(load=BenchLoad(max_concurrency=8)))
    [comparison] = quickly(first, second)

    assert comparison.differences == ("max_concurrency: 4 against 8",)


def test_differing_lengths_and_loads_are_said(tmp_path: Path) -> None:
    slow, quick = (BenchLoad(rate_steps=f"1:10,{rate}:10") for rate in (2, 8))
    short = saved(tmp_path / "a.json", make_result(load=slow))
    long = saved(tmp_path / "b.json", make_result(load=replace(quick, input_len=10)))
    [comparison] = quickly(short, long)

    assert comparison.differences == (
        "load.rate_steps: 1:10,2:10 against 1:10,8:10",
        "load.input_len: None against 10",
    )


def test_a_level_that_comes_twice_is_compared_in_order(tmp_path: Path) -> None:
    twice = [make_result(make_records(30, slowdown=slow), title=f"{slow:g}") for slow in (1.0, 10.0)]
    runs = saved(tmp_path / "a.json", *twice)

    compared = quickly(runs, runs)
    ratios = [row.ratio for comparison in compared for row in comparison.rows if row.name == "mean_ttft_ms"]
    assert ([comparison.title for comparison in compared], ratios) == (["1", "10"], [1.0, 1.0])


def test_results_that_were_added_a_line_each_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    documents = [document_of(make_result(title=name)) for name in ("first", "second")]
    path.write_bytes(b"\n".join(map(orjson.dumps, documents)) + b"\n")

    assert [run.title for run in read_runs(path)] == ["first", "second"]


def test_sweeps_are_compared_level_by_level(tmp_path: Path) -> None:
    levels = [make_result(load=BenchLoad(max_concurrency=n), title=f"c={n}") for n in (1, 4, 8)]
    first = saved(tmp_path / "a.json", *levels[:2])
    second = saved(tmp_path / "b.json", *levels[1:])

    assert [comparison.title for comparison in quickly(first, second)] == ["c=4"]


def test_sweeps_without_a_common_level_are_refused(tmp_path: Path) -> None:
    levels = [make_result(load=BenchLoad(max_concurrency=n)) for n in (1, 2, 4, 8)]
    first = saved(tmp_path / "a.json", *levels[:2])
    second = saved(tmp_path / "b.json", *levels[2:])

    with pytest.raises(ConfigError, match="no run"):
        quickly(first, second)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "must be a mapping"), ('{"runs": [{"a": 1}]}', "not a result")],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=message):
        read_runs(path)


def test_the_table_has_a_row_per_number(tmp_path: Path) -> None:
    runs = saved(tmp_path / "a.json", make_result())
    [comparison] = quickly(runs, runs)

    assert len(comparison_table(comparison, ("a", "b")).cells) == len(comparison.rows)


@pytest.mark.parametrize("detailed", [True, False])
def test_the_printed_table_says_what_its_intervals_leave_out(tmp_path: Path, detailed: bool) -> None:
    runs = saved(tmp_path / "a.json", make_result(), detailed=detailed)
    [comparison] = quickly(runs, runs)
    console = Console(width=160)
    with console.capture() as printed:
        show_parts([comparison_table(comparison, ("a", "b"))], console)

    words = " ".join(printed.get().split())
    assert (
        "covers the spread inside the two runs only, so repeat and alternate the runs" in words
    ) is detailed
