"""`onbeat bench`: load a server and report its latency; compare two results; disturb it.

Names and defaults of flags are those of `vllm bench serve` wherever it has the flag.

`chaos` tells whether a server delivers each token once, whatever happens to it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import TaskID

from onbeat.bench.bench_config import BenchConfig, TargetConfig, key_headers
from onbeat.bench.bench_load import RunConfig
from onbeat.bench.chaos import TIMEOUT, Chaos, ChaosPlan, ChaosRun
from onbeat.bench.client import why_no_answer
from onbeat.bench.compare import compare, comparison_table, read_runs
from onbeat.bench.history import End, ObservedAnswer, Violation, counts, violations
from onbeat.bench.history import save as save_history
from onbeat.bench.probe import choose_model, read_models
from onbeat.bench.promise import check_promise, compare_pace, refuse_too_few
from onbeat.bench.record import SentRequest
from onbeat.bench.result import BenchRun, default_file_name, request_columns
from onbeat.bench.session import run_bench
from onbeat.cli.args import FAILED, INTERRUPTED, natural, server_root
from onbeat.cli.options import add_options, read_options, read_value
from onbeat.cli.outputs import check_writable, deliver, progress_bar, result_console, shown_settings
from onbeat.core.errors import ConfigError, counted, quoted
from onbeat.core.options import change, changed, check, option, part, settings_of
from onbeat.core.tokenizer import Tokenizer
from onbeat.planner.plan_file import Promise, read_promise
from onbeat.report.result import Column, filled_table, save, say, show_parts
from onbeat.report.run_report import runs_result
from onbeat.text.tokenizer import load_tokenizer

_OWN = ("num-prompts", "num-warmups", "salt", "seed", "tokenizer")
"""Flags of the load that may differ from the plan's: how long the test is, and what is drawn."""


def with_planned_load(bench: BenchConfig, promise: Promise) -> BenchConfig:
    """Return the settings with the load of a plan.

    Raises
    ------
    ConfigError : the command line asks for another load, or for too few requests, or the plan for a flag that
        there is none of.
    """
    settings = {setting.key.replace("_", "-"): setting for setting in settings_of(BenchConfig)}
    planned = {**promise.load, "slo-mode": promise.mode}
    given = {each.name: value for each, value in changed(bench).items()}
    changes: dict[str, Any] = {"ignore_eos": True}
    for name, value in planned.items():
        if name not in settings:
            raise ConfigError(f"{promise.path} has the load flag {name!r}, which a load test does not take")
        setting = settings[name]
        try:
            wanted = read_value(setting, str(value)) if not isinstance(value, bool) else value
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{promise.path}: {name} is {quoted(value)}: {error}") from error
        if name not in _OWN and given.get(setting.name, wanted) != wanted:
            raise ConfigError(
                f"{setting.flag} changes the load, but the plan has {name} {value}; leave it out, or "
                "make another plan"
            )
        if name not in _OWN or setting.name not in given:
            changes[setting.name] = wanted
    for each in changed(bench.load):
        if each.key.replace("_", "-") not in {*planned, *_OWN}:
            raise ConfigError(f"--check-plan runs the load of its plan: leave out {each.flag}")
    num_prompts = changes.get("num_prompts", given.get("num_prompts"))
    if num_prompts is not None:
        refuse_too_few(num_prompts, promise.share)  # rather than once they were sent
    return change(bench, **changes)


class BenchProgress:
    """Shows phases, a bar per run, and failures as they come.

    Parameters
    ----------
    is_quiet : show nothing.
    """

    def __init__(self, console: Console, *, is_quiet: bool, num_runs: int) -> None:
        self._bar = progress_bar(console, is_quiet=is_quiet, refresh_per_second=2)
        self._num_runs = num_runs
        self._num_started = 0
        self._num_not_completed = 0
        self._task: TaskID = self._bar.add_task("", total=None, note="")

    @property
    def is_measuring(self) -> bool:
        """Whether a run has begun, so that there is something to keep."""
        return self._num_started > 0

    def __enter__(self) -> BenchProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self.is_measuring:
            self._bar.update(self._task, visible=False)  # the error says all
        self._bar.stop()

    def on_phase(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def on_start(self, run: RunConfig, num_requests: int) -> None:
        self._num_started += 1
        self._num_not_completed = 0
        position = f"[{self._num_started}/{self._num_runs}] " if self._num_runs > 1 else ""
        self._bar.reset(self._task, total=num_requests, description=f"{position}{run.title}", note="")

    def on_request(self, record: SentRequest) -> None:
        if not record.is_completed:
            self._num_not_completed += 1
            self._bar.update(self._task, note=f"{self._num_not_completed} not completed ({record.cause})")
        self._bar.advance(self._task)

    def on_result(self, result: BenchRun) -> None:
        rate = result.summary.counts.output_throughput
        self._bar.update(self._task, note=f"{rate:,.0f} output tok/s")


BROKEN = 3
"""A promise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands `serve`, `compare` and `chaos`."""
    commands = parser.add_subparsers(dest="bench_command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="load a running server", description="Load a running server.")
    add_options(serve, BenchConfig)
    compare = commands.add_parser(
        "compare", help="compare two saved results", description="Compare two saved results."
    )
    compare.add_argument("baseline", type=Path, metavar="A.json")
    compare.add_argument("candidate", type=Path, metavar="B.json")
    compare.add_argument("--seed", type=natural, default=0, help="random seed of the bootstrap")
    about = "check that a server delivers each token once while connections break and engines die"
    add_chaos_arguments(commands.add_parser("chaos", help=about, description=about))


def run(args: argparse.Namespace) -> int:
    """Run a sub-command; returns the exit code."""
    if args.bench_command == "compare":
        return _compare(args)
    if args.bench_command == "chaos":
        return run_chaos(args)
    return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    bench = read_options(args, BenchConfig)
    promise = None
    if bench.check_plan is not None:
        promise = read_promise(bench.check_plan)
        bench = with_planned_load(bench, promise)
    output = bench.output
    named = (output.result_dir or Path()) / (output.result_filename or "result.json")
    written = {"--json": output.json, "--report": output.report}
    check_writable(args, written | ({"--result-dir": named} if output.saves_under_name else {}))
    runs = bench.runs()
    console = Console(stderr=True)
    path = bench.load.tokenizer
    tokenizer = None if path is None else load_tokenizer(path)
    with BenchProgress(console, is_quiet=output.disable_tqdm, num_runs=len(runs)) as progress:
        results = asyncio.run(_measure(bench, runs, tokenizer, progress))
    if not results:
        console.print("interrupted before anything was measured")
        return INTERRUPTED
    shown = shown_settings(args, hidden=("bench_command", "header"))  # headers may carry keys
    _deliver(bench, results, shown, console)
    code = _exit_code(results)
    return _check(promise, results[0]) if promise is not None and code == 0 else code


def _check(promise: Promise, result: BenchRun) -> int:
    """Say whether a promise was kept; return the exit code."""
    kept = check_promise(result.records, promised=promise.share, mode=promise.mode)
    told = [f"{promise.path}, for {promise.fleet}: {kept}"]
    if promise.mean_tpot is not None:
        told.append(compare_pace(result.records, promise.mean_tpot))
    say(result_console(), told)
    return 0 if kept.is_kept else BROKEN


def _exit_code(results: list[BenchRun]) -> int:
    """Return 130 of an interrupted bench, 1 where nothing but failures came of a run, else 0.

    A run whose requests were all refused is a measurement; one whose requests all failed is none.
    """
    if any(result.is_interrupted for result in results):
        return INTERRUPTED
    counts = [result.summary.counts for result in results]
    return FAILED if any(own.num_failed + own.num_expired == own.num_offered for own in counts) else 0


async def _measure(
    bench: BenchConfig, runs: list[RunConfig], tokenizer: Tokenizer | None, progress: BenchProgress
) -> list[BenchRun]:
    """Measure; Ctrl-C ends the current run early and keeps what it has measured, if anything."""
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


def _deliver(bench: BenchConfig, runs: list[BenchRun], settings: dict[str, Any], console: Console) -> None:
    output = bench.output
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


VIOLATED = 3
MOST_SHOWN = 20
_option = partial(option, group="chaos")
_MEANING = {
    End.WHOLE: "every token once, one end",
    End.CANCELLED: "broken off by this client",
    End.FAILED: "the server said so",
    End.REFUSED: "before anything was answered",
    End.CUT: "the connection ended; the client knows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What is done to the server."""

    model: str | None = _option(None, help="model to ask for (default: the server's first)")
    plan: ChaosPlan = part(ChaosPlan)
    history: Path | None = _option(None, metavar="FILE.jsonl", help="write every request and its answer")

    def __post_init__(self) -> None:
        check(self, ChaosOptions)


def add_chaos_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the sub-command."""
    parser.add_argument(
        "url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="the server's address"
    )
    add_options(parser, ChaosOptions)


def run_chaos(args: argparse.Namespace) -> int:
    """Disturb and check; return 0 if nothing is wrong, else 3."""
    options, root = read_options(args, ChaosOptions), server_root(args.url)
    check_writable(args, {"--history": options.history})
    console = result_console(highlight=False)
    result = asyncio.run(_disturb(root, options, Console(stderr=True)))
    if options.history is not None:
        save_history(options.history, result.exchanges, result.known)
    return _report(result, console)


async def _disturb(root: str, options: ChaosOptions, console: Console) -> ChaosRun:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(headers=key_headers(), connector=connector, timeout=TIMEOUT) as session:
        model = options.model or await _first_model(session, root)
        with progress_bar(console, is_quiet=not console.is_terminal) as progress:
            task = progress.add_task("chaos", total=options.plan.seconds, note="")
            ended = 0

            def tell(exchange: ObservedAnswer) -> None:
                nonlocal ended
                ended += 1
                progress.update(task, completed=exchange.ended, note=counted(ended, "request"))

            chaos = Chaos(session, root, model, options.plan, tell)
            await chaos.learn()
            await chaos.run()
            await chaos.settle()
            return chaos.result


async def _first_model(session: aiohttp.ClientSession, root: str) -> str:
    try:
        async with session.get(f"{root}/v1/models") as response:
            if response.status != 200:
                raise ConfigError(f"{root}/v1/models answers {response.status}; name the model with --model")
            target = TargetConfig(base_url=root)
            return choose_model(target, await read_models(f"{root}/v1/models", response))
    except aiohttp.ClientError as error:
        problem = why_no_answer(error)
        raise ConfigError(f"no server answers at {root} ({problem}); start one, or name another") from error


def _report(result: ChaosRun, console: Console) -> int:
    found = counts(result.exchanges)
    rows = [(str(found[end]), end.value, meaning) for end, meaning in _MEANING.items() if found[end]]
    columns = (Column("", "requests"), Column("", "ended", str), Column("", "meaning", str))
    console.print(filled_table(columns, rows))
    if result.kills:
        failed = sum(code != 0 for _, code in result.kills)
        console.print(
            f"the command was run {counted(len(result.kills), 'time')}"
            + (f", {counted(failed, 'time')} it failed" if failed else "")
        )
    if result.unsteady:
        console.print(
            f"{counted(result.unsteady, 'prompt')} left out: undisturbed, two answers to it differed"
        )
    wrong = violations(result.exchanges, result.known)
    if result.still_open:
        wrong.append(
            Violation(-1, f"{counted(result.still_open, 'request')} open long after the client had gone")
        )
    for each in wrong[:MOST_SHOWN]:
        who = f"request {each.exchange}: " if each.exchange >= 0 else ""
        console.print(f"{who}{each.what}", style="red", markup=False)
    if len(wrong) > MOST_SHOWN:
        console.print(f"and {len(wrong) - MOST_SHOWN} more; --history FILE.jsonl has all")
    checked = len(result.exchanges)
    console.print(
        f"{counted(len(wrong), 'violation')} in {counted(checked, 'request')}: "
        + ("tokens were lost, doubled or changed" if wrong else "no token lost, doubled or reordered"),
        style="bold red" if wrong else "bold green",
    )
    return VIOLATED if wrong else 0
