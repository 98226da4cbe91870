"""The flags that say what is simulated, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onbeat.cli.args import add_config_flag, require_jobs
from onbeat.cli.options import add_options, read_options
from onbeat.cli.simulate_speculation import add_speculation_arguments, speculation_settings
from onbeat.cli.workload import WorkloadOptions
from onbeat.core.options import option
from onbeat.simulator.settings import ReplicaSettings

_option = partial(option, group="run and output")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """How `onbeat simulate` runs, and what it writes."""

    jobs: int = _option(1, metavar="N", help="processes, where the router needs no state")
    label: str | None = _option(None, help="name of the run in files and reports")
    json: Path | None = _option(None, metavar="FILE", help="save the summary")
    records: Path | None = _option(None, metavar="FILE", help="save every request (JSON lines; .gz packs)")
    report: Path | None = _option(None, metavar="FILE.html", help="write charts")
    timeline: Path | None = _option(None, metavar="FILE", help="write a trace for ui.perfetto.dev")
    record: Path | None = _option(
        None, metavar="FILE", help="write what the fleet decides, for onbeat replay"
    )
    disable_tqdm: bool = _option(default=False, is_switch=True, help="show no progress")

    def __post_init__(self) -> None:
        require_jobs(self.jobs)

    @property
    def files(self) -> dict[str, Path | None]:
        """The files that the command writes, by their flags."""
        names = ("json", "records", "report", "timeline", "record")
        return {f"--{name}": getattr(self, name) for name in names}


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated and under which load: all flags that `simulate` and `capacity` share."""
    add_config_flag(parser)
    add_options(parser, ReplicaSettings)
    add_speculation_arguments(parser)
    add_options(parser, WorkloadOptions)


def replica_settings(args: argparse.Namespace) -> ReplicaSettings:
    """Return what the flags ask for.

    Raises
    ------
    ConfigError : flags that do not go together.
    """
    return read_options(
        args,
        ReplicaSettings,
        seed=args.seed,
        max_concurrency=args.max_concurrency,
        speculation=speculation_settings(args),
    )
