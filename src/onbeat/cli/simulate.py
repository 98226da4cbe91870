"""`onbeat simulate`: what a configuration would do under a load, without the hardware.

The flags that say what is simulated are those of `onbeat capacity`, too.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console

from onbeat.cli.args import INTERRUPTED, add_config_flag
from onbeat.cli.options import add_options, find_group, read_options
from onbeat.cli.outputs import check_writable, deliver, files_of, progress_bar, shown_settings
from onbeat.core.errors import counted
from onbeat.core.options import option
from onbeat.core.step import BatchShape
from onbeat.core.step_stats import StepStats
from onbeat.metrics.attainment import count_missed
from onbeat.metrics.jobs import JobSummary, lines_of_jobs
from onbeat.metrics.record import RequestRecord, write_records
from onbeat.metrics.summary import SummaryOptions, summarise
from onbeat.metrics.timeline import Timeline, open_timeline
from onbeat.perfmodel.model_spec import ModelSpec
from onbeat.perfmodel.speculative import draft_pass
from onbeat.perfmodel.utilisation import StepOperations
from onbeat.recording.fleet_log import fleet_record, plain
from onbeat.report.result import Fact, Facts, ResultOptions
from onbeat.report.run import SCHEDULED, Level, Run, RunHeader
from onbeat.report.run_report import runs_result
from onbeat.report.units import exact_percent, rate_text, whole_percent
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import Resolved, resolve_for, step_times_text
from onbeat.simulator.result import (
    IdleReplica,
    OnRequests,
    SimulationObserver,
    SimulationResult,
    outcomes_of,
)
from onbeat.simulator.simulate import simulate
from onbeat.workload.job_kinds import LANES, summarise_calls, unit_of
from onbeat.workload.load import Load
from onbeat.workload.offered import OfferedLoad

_option = partial(option, group="output")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(ResultOptions):
    """How `onbeat simulate` runs, and what it writes."""

    label: str | None = _option(None, help="name of the run in files and reports")
    records: Path | None = _option(None, metavar="FILE", help="save every request (JSON lines; .gz packs)")
    timeline: Path | None = _option(None, metavar="FILE", help="write a trace for ui.perfetto.dev")
    record: Path | None = _option(
        None, metavar="FILE", help="write what the fleet decides, for onbeat replay"
    )


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated and under which load: all flags that `simulate` and `capacity` share."""
    add_config_flag(parser)
    find_group(parser, "model and devices")  # the first in --help
    add_options(parser, Deployment)
    find_group(parser, "data set")
    add_options(parser, Load)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    add_simulation_arguments(parser)
    add_options(parser, SimulateOptions)


def asked_of(args: argparse.Namespace) -> tuple[Deployment, Resolved, OfferedLoad]:
    """Return what the flags name, what it is, and the load that it gets.

    Raises
    ------
    ConfigError : an unknown name, or settings that do not go together.
    """
    said = read_options(args, Deployment, seed=args.seed, max_concurrency=args.max_concurrency)
    return said, *resolve_for(said, read_options(args, Load))


def run(args: argparse.Namespace) -> int:
    """Simulate; returns the exit code."""
    console = Console(stderr=True, highlight=False)
    options = read_options(args, SimulateOptions)
    check_writable(args, files_of(options))
    settings, simulation, load = asked_of(args)
    console.print(_describe(settings, simulation), markup=False, soft_wrap=True)
    result = _simulate(simulation, load, console, options)
    if not result.records:
        console.print("interrupted before any request had ended")
        return INTERRUPTED
    found = as_run(
        settings, simulation, load, result, options=read_options(args, SummaryOptions), label=options.label
    )
    shown = runs_result(
        [found],
        kind="simulation",
        percentiles=(50.0, 90.0, 99.0),
        settings=shown_settings(args),
        answer=answer_of(found),
    )
    others: dict[Path | None, Callable[[Path], None]] = {
        options.records: lambda path: write_records(path, result.records),
        options.timeline: lambda _path: None,  # it was written while the run went on
    }
    deliver(shown, console, json=options.json, report=options.report, others=others)
    return 0 if result.is_complete else INTERRUPTED


def _describe(settings: Deployment, simulation: Resolved) -> str:
    limits, model = simulation.config.scheduler, simulation.target.model
    parallel = f"TP {settings.tensor_parallel}" + (
        f" PP {settings.pipeline_parallel}" if settings.pipeline_parallel > 1 else ""
    )
    kv_tokens = limits.num_blocks * limits.block_size
    where = f"{simulation.num_devices} x {simulation.target.device.name}, {parallel}"
    if settings.fleet.kinds:
        where = (
            f"{simulation.num_devices} devices ({'; '.join(map(str, settings.fleet.kinds))}), of the first"
        )
    return (
        f"{model.name} ({settings.dtype}) on {where}: policy {limits.policy}, "
        f"{limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} requests a step, KV cache of "
        f"{kv_tokens:,} tokens a replica, requests up to {limits.max_model_len:,} tokens; step times: "
        f"{step_times_text(settings, simulation.errors)}"
    )


def _simulate(
    simulation: Resolved, load: OfferedLoad, console: Console, options: SimulateOptions
) -> SimulationResult:
    """Simulate a load; Ctrl-C gives what had ended by then."""
    with ExitStack() as stack:
        observer = None
        if options.timeline is not None:
            observer = TimelineObserver(stack.enter_context(open_timeline(options.timeline)))
        on_decision, config = None, simulation.config
        if options.record is not None:
            about = {"router": config.router, "fleet": plain(config.fleet_rules)}
            on_decision = stack.enter_context(fleet_record(options.record, about))
        on_progress = stack.enter_context(
            _progress(console, is_quiet=options.disable_tqdm, num_requests=len(load))
        )
        return simulate(
            load,
            config,
            simulation.step_time,
            on_progress=on_progress,
            observer=observer,
            on_decision=on_decision,
        )


@contextmanager
def _progress(console: Console, *, is_quiet: bool, num_requests: int) -> Iterator[OnRequests]:
    """Show how many requests have ended, and how much virtual time has passed."""
    bar = progress_bar(console, is_quiet=is_quiet or not console.is_terminal)
    task = bar.add_task("simulating", total=num_requests, note="")

    def on_progress(num_finished: int, _num_requests: int, virtual_time: float) -> None:
        bar.update(task, completed=num_finished, note=f"{virtual_time:,.0f} s of virtual time")

    with bar:
        yield on_progress


class TimelineObserver(SimulationObserver):
    """Writes a simulated run as a live run is written."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def on_request(self, record: RequestRecord) -> None:
        self._timeline.on_request(record)

    def on_step(self, replica: int, stats: StepStats) -> None:
        self._timeline.on_step(stats, replica=replica)

    def on_finish(self, record: RequestRecord) -> None:
        if record.delivery_times:
            first = copy(record)
            first.delivery_times = array("d", record.delivery_times[:1])
            self._timeline.on_delivery(first)
        self._timeline.on_finish(record)


# ---- what was found, in the form in which measured runs are shown and saved ----


_MISSED = {
    "refused": "were refused or ended in the queue",
    "TTFT": "had a late first token (TTFT)",
    "TBT": "had late tokens after the first (TBT)",
    "E2E": "ended late (E2E)",
}
"""By what `count_missed` says."""
_NO_OBJECTIVE = "No objective was given: --slo-ttft-ms and --slo-tbt-ms set one."

SimulatedRun = Run[RequestRecord]


def as_run(
    settings: Deployment,
    simulation: Resolved,
    load: OfferedLoad,
    result: SimulationResult,
    *,
    options: SummaryOptions,
    label: str | None = None,
) -> SimulatedRun:
    """Return a simulated run in the form in which measured runs are shown."""
    # Virtual time of an interrupted run may be 0.
    summary = summarise(result.records, duration=max(result.duration, 1e-9), options=options)
    idle = IdleReplica(simulation.step_time, simulation.config)
    outcomes = outcomes_of(summary, result.records, idle)
    machine = Facts("Replicas", _machine_facts(simulation, result))
    drafts = Facts("Speculation", _draft_facts(simulation, result), key="speculation")
    jobs = _jobs(load, result)
    return Run(
        header=_header(settings, simulation, load, result, label),
        summary=summary,
        num_gpus=simulation.num_devices,
        timing_origin=SCHEDULED,
        is_interrupted=not result.is_complete,
        records=result.records,
        # Calls of jobs may never have come.
        num_interrupted_requests=0 if result.is_complete else result.num_requests - len(result.records),
        warnings=(
            *_warnings(simulation, load, result, outcomes, summary.counts.num_expired),
            *filter(None, [result.beyond]),
        ),
        facts=[Fact(name, value) for name, value in outcomes.items()],
        parts=[machine, drafts] if drafts.facts else [machine],
        lines=[*lines_of_jobs(jobs), *_fleet_lines(result)],
        settings=_settings(settings, simulation, result),
        of_classes={
            name: outcomes_of(own, result.records, idle, name) for name, own in summary.classes.items()
        },
        details={
            "speculation": drafts.values or None,
            "num_overlong": load.num_skipped,
            **({"jobs": {kind: asdict(own) for kind, own in jobs.items()}} if jobs else {}),
            "fleet_decisions": dict(result.decisions) or None,
            "replica_seconds": result.replica_seconds,
            "fleet_sizes": [each._asdict() for each in result.sizes] or None,
        },
    )


def _jobs(load: OfferedLoad, result: SimulationResult) -> dict[str, JobSummary]:
    if load.jobs is None or load.name == LANES:  # whose requests are nobody's jobs
        return {}
    return summarise_calls(load.jobs, {int(each.request_id): each for each in result.records})


def _header(
    settings: Deployment,
    simulation: Resolved,
    load: OfferedLoad,
    result: SimulationResult,
    label: str | None,
) -> RunHeader:
    rate = inf if load.rate is None else load.rate
    return RunHeader(
        model_id=simulation.target.model.name,
        backend="simulation",
        label=label,
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        dataset_name=load.name,
        num_prompts=result.num_requests,
        arrivals="closed loop" if load.arrivals is None else "offered",
        burstiness=None,
        level=Level(request_rate=rate, max_concurrency=settings.max_concurrency),
        unit="jobs" if unit_of(load) == "job" else "req",
    )


def _settings(settings: Deployment, simulation: Resolved, result: SimulationResult) -> dict[str, Any]:
    """Return what was simulated, as a file has it."""
    limits, fleet = simulation.config.scheduler, settings.fleet
    names = ("dtype", "step_time", "engine", "step_noise", "guided_share", "seed")
    names_of_limits = (
        *("policy", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "block_size"),
        *("shed_order", "max_num_queued_reqs", "max_num_queued_tokens", "max_queue_seconds"),
    )
    return {
        "device": simulation.target.device.id,
        "tensor_parallel_size": simulation.target.parallelism.tensor,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "replicas": len(result.replicas),
        "kinds": list(map(str, fleet.kinds)),
        "router": simulation.config.router,
        "shed": settings.shed.value,
        **{name: getattr(limits, name) for name in names_of_limits},
        **{name: getattr(settings, name) for name in names},
    }


def _machine_facts(simulation: Resolved, result: SimulationResult) -> list[Fact]:
    """Return what the replicas did."""
    total = result.total
    busy, bubbles = total.busy_seconds, total.bubble_seconds
    mbu, mfu = _utilisation(simulation, result, busy)
    held = result.replica_seconds if result.is_complete else None  # known once all have been given back
    whole = result.duration * len(result.replicas) if held is None else held
    # A replica that had not run when Ctrl-C came has no blocks.
    used = [each.peak_used_blocks / each.num_blocks for each in result.replicas if each.num_blocks]
    mean_step = _ratio(busy * 1e3, total.num_steps)
    hit_rate = _ratio(total.num_prefix_hits, total.num_prefix_queries)
    return [
        Fact("num_steps", total.num_steps, "steps"),
        Fact("mean_step_ms", mean_step, "mean step (ms)", "{:.2f}".format),
        Fact("replica_busy_share", _ratio(busy, whole), "replicas busy", whole_percent),
        Fact("pipeline_bubble_seconds", bubbles, "pipeline bubbles (s)" if bubbles else ""),
        Fact("mbu", mbu, "memory bandwidth used while busy (MBU)", whole_percent),
        Fact("mfu", mfu, "arithmetic used while busy (MFU)", whole_percent),
        Fact("num_preemptions", total.num_preemptions, "preemptions"),
        Fact("prefix_cache_hit_rate", hit_rate, "prompt tokens from the prefix cache", exact_percent),
        Fact("kv_cache_peak_usage", max(used, default=None), "KV cache at its fullest", whole_percent),
        Fact("wall_seconds", result.wall_seconds, "simulated in (s)"),
    ]


def _draft_facts(simulation: Resolved, result: SimulationResult) -> list[Fact]:
    """Return what was speculated and what became of it; nothing where nothing was."""
    config, counts = simulation.config.scheduler.speculation, result.total.drafts
    if config is None or counts is None:
        return []
    most, share = config.num_speculative_tokens, _ratio(counts.num_verify_rows, counts.num_rows)
    return [
        Fact("num_speculative_tokens", most, "drafts of a row, at most"),
        Fact("draft_length", config.draft_length, "length of drafts", str),
        Fact("num_drafted_tokens", counts.num_drafted, "draft tokens verified"),
        Fact("num_accepted_tokens", counts.num_accepted),
        Fact("accepted_share", _ratio(counts.num_accepted, counts.num_drafted), "accepted", exact_percent),
        Fact("verifying_share", share, "decode rows with drafts", exact_percent),
        Fact("tokens_per_decode", counts.tokens_per_row, "tokens of a decode row"),
    ]


def _utilisation(
    simulation: Resolved, result: SimulationResult, busy: float
) -> tuple[float | None, float | None]:
    """Return MBU and MFU of the busy time, against the device's specification (`perfmodel.utilisation`)."""
    if not (result.total.num_steps and busy):
        return None, None
    target, draft = _operations(simulation, simulation.target.model), None
    if simulation.draft is not None:
        draft = _operations(simulation, simulation.draft)
    num_bytes = num_operations = 0.0
    for replica in result.replicas:
        total, num_steps = replica.work, max(1, replica.num_steps)
        context = round((total.chunk_cached_tokens + total.decode_context_tokens) / num_steps)
        for size, number in total.sizes.items():
            mean = BatchShape(num_new_tokens=size, decode_context_tokens=context)
            num_bytes += target.bytes_read(mean) * number
        num_operations += target.flops(total)
        if draft is not None:
            one = draft_pass(total)
            num_bytes += draft.bytes_read(one) * total.num_draft_passes
            num_operations += draft.flops(one) * total.num_draft_passes
    device = simulation.target.device
    return (
        num_bytes / busy / device.memory_bandwidth,
        num_operations / busy / device.peak(simulation.target.precision.compute),
    )


def _operations(simulation: Resolved, model: ModelSpec) -> StepOperations:
    return StepOperations(model, simulation.target.precision, simulation.target.parallelism)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _warnings(
    simulation: Resolved,
    load: OfferedLoad,
    result: SimulationResult,
    outcomes: Mapping[str, float | None],
    num_expired: int,
) -> Iterator[str]:
    if load.num_skipped:
        longest = simulation.config.scheduler.max_model_len
        yield f"left out {counted(load.num_skipped, 'request', ',')} longer than {longest:,} tokens"
    if num_preemptions := result.total.num_preemptions:
        preemptions = counted(num_preemptions, "preemption", ",")
        yield f"{preemptions}: the KV cache ran full, and prompts were computed again"
    num_relegated = int(outcomes["relegated"] or 0)
    if num_relegated or num_expired:
        relegated = counted(num_relegated, "request", ",")
        yield f"relegated {relegated} to best effort, and ended {num_expired:,} in the queue"
    if num_infeasible := outcomes["hopeless"]:
        infeasible = counted(int(num_infeasible), "request", ",")
        yield f"even an idle machine would miss the objectives of {infeasible}"


def _fleet_lines(result: SimulationResult) -> Iterator[str]:
    """Say what a fleet decided how often, and how its size changed."""
    if result.decisions:
        decided = ", ".join(f"{what} {num:,}" for what, num in sorted(result.decisions.items()))
        yield f"fleet decisions: {decided}"
    if result.sizes and result.replica_seconds is not None:
        numbers = [each.num_replicas for each in result.sizes]
        yield (
            f"fleet size: {min(numbers)} to {max(numbers)} replicas, {counted(len(numbers) - 1, 'change')}, "
            f"{result.replica_seconds / 3600:,.2f} replica-hours"
        )


def answer_of(run: SimulatedRun) -> list[str]:
    """Return in a sentence or two how many requests were in time at which load, and what others missed."""
    score = run.summary.score.own
    load = _load(run.header.level, "job" if "jobs" in run.details else "request")
    counts = run.summary.counts
    if not score.num_offered:
        done = [f"{counts.num_completed:,} of {counts.num_offered:,} requests were completed, {load}."]
        # The deadline of a job is its objective.
        return done if "jobs" in run.details else [*done, _NO_OBJECTIVE]
    if num_free := counts.num_offered - score.num_offered:
        load = f"beside {num_free:,} without any, {load} in all"
    if score.num_good == score.num_offered:
        all_of_them = "All {:,} requests kept their" if score.num_offered > 1 else "The only request kept its"
        return [f"{all_of_them.format(score.num_offered)} objectives, {load}."]
    missed = count_missed(run.records, mode=run.summary.score.slo_mode)
    *most, last = (f"{num:,} {_MISSED[what]}" for what, num in missed.most_common())
    share = score.num_good / score.num_offered * 100
    kept = f"{score.num_good:,} of {score.num_offered:,} requests ({share:.1f} %) kept their objectives"
    return [
        f"{kept}, {load}.",
        f"Of the others, {' and '.join(filter(None, (', '.join(most), last)))}.",
    ]


def _load(level: Level, of: str) -> str:
    most = "" if level.max_concurrency is None else f"at most {level.max_concurrency:,} open at a time"
    if level.is_closed:
        return most or "all sent at once"
    return f"at {rate_text(level.request_rate, of=of)}" + (f" and {most}" if most else "")
