"""The flags that say what is simulated, and the settings that they make."""

from __future__ import annotations

import argparse

from onbeat.cli.args import add_config_flag
from onbeat.cli.options import add_options, given_options, read_options
from onbeat.cli.simulate_speculation import add_speculation_arguments, speculation_settings
from onbeat.cli.workload import WorkloadOptions
from onbeat.core.errors import ConfigError
from onbeat.core.options import settings_of
from onbeat.simulator.setup import DisaggregationSettings, ReplicaSettings


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated and under which load: all flags that `simulate` and `capacity` share."""
    add_config_flag(parser)
    add_options(parser, ReplicaSettings)
    add_options(parser, DisaggregationSettings, has_defaults=False)
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
        disaggregation=_disaggregation(args),
    )


def _disaggregation(args: argparse.Namespace) -> DisaggregationSettings | None:
    given = given_options(args, DisaggregationSettings)
    if not given:
        return None
    flags = {setting.name: setting.flag for setting in settings_of(DisaggregationSettings)}
    if missing := {"prefill_replicas", "decode_replicas"} - given.keys():
        raise ConfigError(
            f"{' and '.join(flags[name] for name in given)} needs "
            f"{' and '.join(flags[name] for name in flags if name in missing)}: prompts and generation are "
            "split between two pools"
        )
    if args.replicas != 1:
        raise ConfigError("--prefill-replicas and --decode-replicas go with no --replicas beside them")
    return DisaggregationSettings(**given)
