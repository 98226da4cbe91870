"""The flags that say what is simulated, and the settings that they make."""

from __future__ import annotations

import argparse

from onbeat.cli.args import add_config_flag
from onbeat.cli.options import add_options, read_options
from onbeat.cli.simulate_speculation import add_speculation_arguments, speculation_settings
from onbeat.cli.workload import WorkloadOptions
from onbeat.simulator.settings import ReplicaSettings


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
