"""`onbeat bench`: load a server and report its latency; compare two results."""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from onbeat.cli.args import FAILED, INTERRUPTED, natural
from onbeat.cli.outputs import check_writable, deliver, result_console, shown_settings

if TYPE_CHECKING:
    from onbeat.bench.bench_config import BenchConfig
    from onbeat.bench.bench_load import RunConfig
    from onbeat.bench.result import BenchRun
    from onbeat.cli.bench_progress import BenchProgress
    from onbeat.cli.bench_settings import OutputOptions
    from onbeat.core.protocols import Tokenizer
    from onbeat.planner.plan_file import Promise

BROKEN = 3
"""A promise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands `serve`, `compare` and `chaos`."""
    from onbeat.cli import chaos
    from onbeat.cli.bench_settings import BenchOptions
    from onbeat.cli.options import add_options

    commands = parser.add_subparsers(dest="bench_command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="load a running server", description="Load a running server.")
    add_options(serve, BenchOptions)
    compare = commands.add_parser(
        "compare", help="compare two saved results", description="Compare two saved results."
    )
    compare.add_argument("baseline", type=Path, metavar="A.json")
    compare.add_argument("candidate", type=Path, metavar="B.json")
    compare.add_argument("--seed", type=natural, default=0, help="random seed of the bootstrap")
    about = "check that a server delivers each token once while connections break and engines die"
    chaos.add_arguments(commands.add_parser("chaos", help=about, description=about))


def run(args: argparse.Namespace) -> int:
    """Run a sub-command; returns the exit code."""
    if args.bench_command == "compare":
        return _compare(args)
    if args.bench_command == "chaos":
        from onbeat.cli.chaos import run as run_chaos

        return run_chaos(args)
    return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    from onbeat.cli.bench_progress import BenchProgress
    from onbeat.cli.bench_settings import BenchOptions, bench_config, planned_runs
    from onbeat.cli.options import read_options

    options = read_options(args, BenchOptions)
    promise = None
    if options.check_plan is not None:
        from onbeat.cli.bench_settings import with_planned_load
        from onbeat.planner.plan_file import read_promise

        promise = read_promise(options.check_plan)
        options = with_planned_load(options, promise)
    output = options.output
    _check_outputs(output)
    bench = bench_config(options)
    runs = planned_runs(options.load, output.label or "")
    console = Console(stderr=True)
    tokenizer = _load_tokenizer(options.load.tokenizer)
    with BenchProgress(console, is_quiet=output.disable_tqdm, num_runs=len(runs)) as progress:
        results = asyncio.run(_measure(bench, runs, tokenizer, progress))
    if not results:
        console.print("interrupted before anything was measured")
        return INTERRUPTED
    shown = shown_settings(args, hidden=("bench_command", "header"))  # headers may carry keys
    _deliver(output, bench, results, shown, console)
    code = _exit_code(results)
    return _check(promise, results[0]) if promise is not None and code == 0 else code


def _check(promise: Promise, result: BenchRun) -> int:
    """Say whether a promise was kept; return the exit code."""
    from onbeat.bench.promise import check_promise, compare_pace

    kept = check_promise(result.records, promised=promise.share, mode=promise.mode)
    console = result_console()
    console.print(
        f"{promise.path}, for {promise.fleet}: {kept}", markup=False, highlight=False, soft_wrap=True
    )
    if promise.mean_tpot is not None:
        pace = compare_pace(result.records, promise.mean_tpot)
        console.print(pace, markup=False, highlight=False, soft_wrap=True)
    return 0 if kept.is_kept else BROKEN


def _exit_code(results: list[BenchRun]) -> int:
    """Return 130 of an interrupted bench, 1 where nothing but failures came of a run, else 0.

    A run whose requests were all refused is a measurement; one whose requests all failed is none.
    """
    if any(result.is_interrupted for result in results):
        return INTERRUPTED
    counts = [result.summary.counts for result in results]
    return FAILED if any(own.num_failed + own.num_expired == own.num_offered for own in counts) else 0


def _load_tokenizer(path: Path | None) -> Tokenizer | None:
    if path is None:
        return None
    from onbeat.text.tokenizer import load_tokenizer

    return load_tokenizer(path)


async def _measure(
    bench: BenchConfig, runs: list[RunConfig], tokenizer: Tokenizer | None, progress: BenchProgress
) -> list[BenchRun]:
    """Measure; Ctrl-C ends the current run early and keeps what it has measured, if anything."""
    from onbeat.bench.session import run_bench

    stop = asyncio.Event()
    measuring = asyncio.create_task(run_bench(bench, runs, tokenizer=tokenizer, progress=progress, stop=stop))

    def interrupt() -> None:
        if stop.is_set() or not progress.is_measuring:
            measuring.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await measuring
    except asyncio.CancelledError:
        return []


def _check_outputs(output: OutputOptions) -> None:
    """Find out before the load whether its results can be saved."""
    named = None
    if output.saves_under_name:
        named = (output.result_dir or Path()) / (output.result_filename or "result.json")
    check_writable({"--json": output.json, "--report": output.report, "--result-dir": named})


def _deliver(
    output: OutputOptions,
    bench: BenchConfig,
    runs: list[BenchRun],
    settings: dict[str, Any],
    console: Console,
) -> None:
    from onbeat.bench.result import default_file_name, request_columns
    from onbeat.report.result import save
    from onbeat.report.run_report import runs_result

    if output.save_detailed:
        runs = [replace(run, details={**run.details, **request_columns(run)}) for run in runs]
    result = runs_result(
        runs,
        kind="bench",
        percentiles=output.metric_percentiles,
        metrics=output.percentile_metrics,
        settings=settings,
    )
    paths = [output.json]
    if output.saves_under_name:
        name = output.result_filename or default_file_name(bench, runs)
        paths.append((output.result_dir or Path()) / name)
    write = partial(save, result, append=output.append_result)
    deliver(result, console, report=output.report, others=dict.fromkeys(paths, write))


def _compare(args: argparse.Namespace) -> int:
    import numpy as np

    from onbeat.bench.compare import compare, comparison_table, read_runs
    from onbeat.report.result import say, show_parts

    baselines, candidates = read_runs(args.baseline), read_runs(args.candidate)
    comparisons = compare(baselines, candidates, np.random.default_rng(args.seed))
    names = (args.baseline.stem, args.candidate.stem)
    console = result_console()
    for comparison in comparisons:
        show_parts([comparison_table(comparison, names)], console)
        say(console, (f"note: settings differ: {difference}" for difference in comparison.differences))
    if not any(row.interval for comparison in comparisons for row in comparison.rows):
        say(
            console,
            ["note: intervals and verdicts need both results saved by bench serve with --save-detailed"],
        )
    return 0
