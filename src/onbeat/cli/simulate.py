"""`onbeat simulate`: what a configuration would do under a load, without the hardware."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from onbeat.cli.args import INTERRUPTED
from onbeat.cli.outputs import check_writable, deliver, shown_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from onbeat.simulator.deployment import Deployment
    from onbeat.simulator.resolve import Resolved
    from onbeat.workload.offered import OfferedLoad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    from onbeat.cli.options import add_options
    from onbeat.cli.simulate_options import SimulateOptions, add_simulation_arguments

    add_simulation_arguments(parser)
    add_options(parser, SimulateOptions)


def asked_of(args: argparse.Namespace) -> tuple[Deployment, Resolved, OfferedLoad]:
    """Return what the flags name, what it is, and the load that it gets.

    Raises
    ------
    ConfigError : an unknown name, or settings that do not go together.
    """
    from onbeat.cli.options import read_options
    from onbeat.cli.simulate_options import replica_settings
    from onbeat.simulator.resolve import resolve_for
    from onbeat.workload.load import Load

    deployment, load = replica_settings(args), read_options(args, Load)
    return deployment, *resolve_for(deployment, load, load.classes())


def run(args: argparse.Namespace) -> int:
    """Simulate; returns the exit code."""
    from onbeat.cli.options import read_options
    from onbeat.cli.simulate_options import SimulateOptions
    from onbeat.cli.simulate_output import answer_of, as_run
    from onbeat.cli.simulate_run import run_simulation
    from onbeat.metrics.record import write_records
    from onbeat.metrics.summary import SummaryOptions
    from onbeat.report.run_report import runs_result

    console = Console(stderr=True, highlight=False)
    options = read_options(args, SimulateOptions)
    check_writable(options.files)
    settings, simulation, load = asked_of(args)
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
    from onbeat.simulator.resolve import step_times_text

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
        f"{step_times_text(settings, simulation.errors)}"
    )
