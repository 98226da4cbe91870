"""The flags of `onbeat capacity` that it does not share, and the settings that `--vary` compares."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from onbeat.cli.args import count
from onbeat.cli.options import milliseconds, read_value
from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.core.options import settings_of
from onbeat.simulator.settings import ReplicaSettings

TBT = "slo_tbt_ms"
"""The TBT objective: it changes the load and the objective, not the replica."""

_SETTINGS = {setting.name: setting for setting in settings_of(ReplicaSettings)}
VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    **{
        flag: (name, partial(read_value, _SETTINGS[name]))
        for flag, name in (
            *(("tp", "tensor_parallel"), ("pp", "pipeline_parallel"), ("replicas", "replicas")),
            *(("router", "router"), ("device", "device"), ("dtype", "dtype"), ("policy", "policy")),
            *(("max-num-seqs", "max_num_seqs"), ("max-num-batched-tokens", "max_num_batched_tokens")),
            *(("shed", "shed"), ("shed-order", "shed_order")),
        )
    },
    "slo-tbt-ms": (TBT, milliseconds),
}
"""What may take several values: its flag -> its setting, and what reads one value."""

_ALIASES = {"tensor-parallel-size": "tp", "pipeline-parallel-size": "pp"}


def add_capacity_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is searched for, over which configurations, and where the result goes."""
    group = parser.add_argument_group("capacity")
    group.add_argument(
        "--objective",
        metavar="NAME",
        help="what a rate must keep: sarathi (P99 of all gaps within --slo-tbt-ms, median scheduling delay "
        "at most 2 s), vidur (P99 scheduling delay below 5 s), attainment:0.9 (share of good requests), "
        "distserve:0.9 (share within TTFT and TPOT); default: sarathi, or none with a sweep",
    )
    group.add_argument(
        "--hopeless",
        choices=("count", "exclude"),
        default="count",
        help="requests that even an idle machine could not serve in time: count them as missed, or leave "
        "them out (attainment only)",
    )
    group.add_argument(
        "--tolerance", type=float, default=0.025, metavar="SHARE", help="width of the final bracket"
    )
    group.add_argument(
        "--repeats", type=count, default=3, metavar="N", help="searches per case, each with a seed of its own"
    )
    group.add_argument("--jobs", type=count, default=1, metavar="N", help="processes")
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="compare values of a flag; several --vary give every combination; of " + ", ".join(VARIABLES),
    )
    group.add_argument(
        "--sweep-concurrency", metavar="N,N,...", help="latency against throughput: a closed loop for each"
    )
    group.add_argument(
        "--sweep-rate", metavar="R,R,...", help="latency against throughput: an open loop for each"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="save the result")
    group.add_argument(
        "--report", type=Path, metavar="FILE.html", help="write one self-contained page with plots"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each field that varies, in the order given.

    Raises
    ------
    ConfigError : an unknown name, one that is given twice, or a value that cannot be read.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--").replace("_", "-")
        name = _ALIASES.get(name, name)
        if name not in VARIABLES:
            near = likely_meant(name, VARIABLES)
            hint = f"did you mean {near}?" if near else f"choose of {', '.join(VARIABLES)}"
            raise ConfigError(f"--vary {text}: {name!r} cannot vary; {hint}")
        words = [word.strip() for word in values.split(",")]
        if not equals or not all(words):
            raise ConfigError(f"--vary {text}: expected NAME=VALUE,VALUE, such as tp=1,2")
        if len(set(words)) < len(words):
            raise ConfigError(f"--vary {text}: a value is given twice")
        setting, read = VARIABLES[name]
        if setting in axes:
            raise ConfigError(f"--vary {name} is given twice; put all its values into one")
        try:
            axes[setting] = [read(word) for word in words]
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--vary {text}: {error}") from error
    return axes


def numbers(flag: str, text: str | None, convert: Callable[[str], Any]) -> list[Any]:
    """Return the levels of a sweep.

    Raises
    ------
    ConfigError : a level that is not a number above 0.
    """
    levels = []
    for word in text.split(",") if text else ():
        try:
            level = convert(word)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{flag} {text}: {word!r} is not a number") from error
        if not 0 < level < float("inf"):
            raise ConfigError(f"{flag} {text}: {word!r} is not above 0")
        levels.append(level)
    return levels
