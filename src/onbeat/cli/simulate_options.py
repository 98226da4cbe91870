"""The flags that say what is simulated, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onbeat.cli.args import add_config_flag
from onbeat.cli.options import add_options, find_group
from onbeat.core.options import option
from onbeat.report.result import ResultOptions
from onbeat.simulator.deployment import Deployment
from onbeat.workload.load import Load

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
