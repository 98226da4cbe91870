"""`onbeat simulate`: what a configuration would do under a load, without the hardware."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from onbeat.cli.args import INTERRUPTED
from onbeat.cli.outputs import check_writable, result_console, save_all, shown_settings

if TYPE_CHECKING:
    from pathlib import Path

    from onbeat.cli.simulate_options import SimulateOptions
    from onbeat.cli.simulate_output import SimulatedRun
    from onbeat.simulator.settings import ReplicaSettings
    from onbeat.simulator.setup import Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    from onbeat.cli.options import add_options
    from onbeat.cli.simulate_options import SimulateOptions, add_simulation_arguments

    add_simulation_arguments(parser)
    add_options(parser, SimulateOptions)


def run(args: argparse.Namespace) -> int:
    """Simulate; returns the exit code."""
    from onbeat.cli.options import read_options
    from onbeat.cli.simulate_options import SimulateOptions, replica_settings
    from onbeat.cli.simulate_output import as_run
    from onbeat.cli.simulate_run import run_simulation
    from onbeat.metrics.summary import SummaryOptions
    from onbeat.simulator.setup import build_for_load
    from onbeat.workload.load import Load, tightest_tbt

    console = Console(stderr=True, highlight=False)
    settings = replica_settings(args)
    asked = read_options(args, Load)
    options = read_options(args, SimulateOptions)
    check_writable(options.files)
    classes = asked.classes()
    simulation, load = build_for_load(
        settings,
        lambda longest: asked.offered(classes, max_model_len=longest, overlong=settings.overlong),
        tbt=tightest_tbt(classes),
    )
    console.print(_describe(settings, simulation), markup=False, soft_wrap=True)
    result = run_simulation(
        simulation,
        load,
        console=console,
        is_quiet=options.disable_tqdm,
        timeline=options.timeline,
        record=options.record,
    )
    if not result.records:
        console.print("interrupted before any request had ended")
        return INTERRUPTED
    shown = as_run(
        settings, simulation, load, result, options=read_options(args, SummaryOptions), label=options.label
    )
    _show(shown)
    _save(args, options, shown, console)
    return 0 if result.is_complete else INTERRUPTED


def _describe(settings: ReplicaSettings, simulation: Simulation) -> str:
    limits, model = simulation.config.scheduler, simulation.model
    parallel = f"TP {settings.tensor_parallel}" + (
        f" PP {settings.pipeline_parallel}" if settings.pipeline_parallel > 1 else ""
    )
    kv_tokens = limits.num_blocks * limits.block_size
    where = f"{simulation.num_devices} x {simulation.device.name}, {parallel}"
    if settings.fleet.kinds:
        where = (
            f"{simulation.num_devices} devices ({'; '.join(map(str, settings.fleet.kinds))}), of the first"
        )
    return (
        f"{model.name} ({settings.dtype}) on {where}: policy {limits.policy}, "
        f"{limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} requests a step, KV cache of "
        f"{kv_tokens:,} tokens a replica, requests up to {limits.max_model_len:,} tokens; step times: "
        f"{simulation.step_times}"
    )


def _show(run: SimulatedRun) -> None:
    from onbeat.cli.simulate_answer import answer_of
    from onbeat.metrics.jobs import lines_of_jobs
    from onbeat.metrics.summary import METRICS
    from onbeat.report.breakdown import breakdown_tables, worst_decile_line
    from onbeat.report.table import run_tables

    console = result_console()
    tables = run_tables(run, METRICS, (50.0, 90.0, 99.0), what="Simulation")
    for table in (*tables, *breakdown_tables(run.summary.breakdown)):
        console.print(table)
    if line := worst_decile_line(run.summary.breakdown):
        console.print(line, markup=False, highlight=False)
    for line in lines_of_jobs(run.jobs):
        console.print(line, markup=False, highlight=False)
    if run.decisions:
        decided = ", ".join(f"{what} {num:,}" for what, num in sorted(run.decisions.items()))
        console.print(f"fleet decisions: {decided}", markup=False, highlight=False)
    if run.sizes and run.replica_seconds is not None:
        numbers = [each.num_replicas for each in run.sizes]
        changes = f"{len(numbers) - 1} change" + "s" * (len(numbers) != 2)
        console.print(
            f"fleet size: {min(numbers)} to {max(numbers)} replicas, {changes}, "
            f"{run.replica_seconds / 3600:,.2f} replica-hours",
            highlight=False,
        )
    for warning in run.warnings:
        console.print(f"note: {warning}", markup=False, highlight=False)
    if run.is_interrupted:
        console.print("interrupted: this is a partial result", style="bold yellow")
    for sentence in answer_of(run):
        console.print(sentence, markup=False, highlight=False)


def _save(args: argparse.Namespace, options: SimulateOptions, run: SimulatedRun, console: Console) -> None:
    from onbeat.cli.simulate_output import result_keys
    from onbeat.metrics.records_file import write_records
    from onbeat.report.result import write_document
    from onbeat.report.run_report import write_report

    def report(path: Path) -> None:
        settings = shown_settings(args)
        write_report(path, [run], percentiles=(50.0, 90.0, 99.0), settings=settings, what="Simulation")

    writers = {
        options.json: lambda path: write_document(path, result_keys(run)),
        options.records: lambda path: write_records(path, run.records),
        options.report: report,
        options.timeline: lambda _path: None,  # it was written while the run went on
    }
    save_all(writers, console)
