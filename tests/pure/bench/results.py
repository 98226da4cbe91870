"""Made-up results for tests of what is shown and saved."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.record import SentRequest, Status, TokenCountSource
from onbeat.bench.result import BenchRun, build_result, request_columns
from onbeat.bench.runner import LoadOutcome
from onbeat.core.options import make
from onbeat.report.result import Result
from onbeat.report.run_report import runs_result

START = 100.0


def make_records(count: int, *, slowdown: float = 1.0, seed: int = 0) -> list[SentRequest]:
    rng = np.random.default_rng(seed)
    records = []
    for index in range(count):
        sent = START + 0.1 * index
        first = sent + 0.05 * slowdown * rng.uniform(0.9, 1.1)
        times = first + np.concatenate([[0.0], np.cumsum(rng.gamma(20.0, 0.001 * slowdown, size=9))])
        records.append(
            SentRequest(
                index=index,
                num_prompt_tokens=12,
                max_tokens=10,
                sent=sent,
                end=float(times[-1]) + 0.001,
                delivery_times=array("d", times.tolist()),
                num_output_tokens=10,
                count_source=TokenCountSource.USAGE,
                finish_reason="length",
                status=Status.COMPLETED,
            )
        )
    return records


def failure(index: int, *, status: Status = Status.FAILED, detail: str = "boom") -> SentRequest:
    sent = START + 0.1 * index
    return SentRequest(
        index=index,
        num_prompt_tokens=12,
        max_tokens=10,
        sent=sent,
        end=sent + 0.2,
        status=status,
        cause="HTTP 500" if status is Status.FAILED else "HTTP 429",
        detail=detail,
    )


def make_result(
    records: list[SentRequest] | None = None,
    *,
    load: BenchLoad | None = None,
    interrupted: bool = False,
    model: str = "org/model",
    bench: dict[str, Any] | None = None,
    **run_options: Any,
) -> BenchRun:
    records = make_records(30) if records is None else records
    options: dict[str, Any] = {"goodput": ("ttft:200",)}
    load = replace(load or BenchLoad(max_concurrency=4), num_prompts=len(records))
    run = RunConfig(load=load, **run_options)
    end = max((record.end for record in records), default=START + 1)
    outcome = LoadOutcome(records=records, start=START, duration=end - START, interrupted=interrupted)
    made = make(BenchConfig, **(options | (bench or {})))
    return build_result(made, run, outcome, model=model, length_source="tokenizer")


def result_of(*runs: BenchRun, percentiles: Sequence[float] = (50.0, 90.0, 99.0)) -> Result:
    return runs_result(runs, kind="bench", percentiles=percentiles, settings={"num_prompts": 30})


def document_of(*runs: BenchRun, detailed: bool = False) -> dict[str, Any]:
    """What is saved of runs."""
    if detailed:
        runs = tuple(replace(run, details={**run.details, **request_columns(run)}) for run in runs)
    return result_of(*runs).document()
