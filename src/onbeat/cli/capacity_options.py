"""The flags of `onbeat capacity` that it does not share, and the settings that `--vary` compares."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onbeat.cli.args import checked, count, unknown_value_message
from onbeat.cli.simulate_options import DTYPES, budget
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SHED_ORDERS, ShedMode
from onbeat.perfmodel.device_spec import CPU, find_device
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.replica.policies import POLICIES


class Variable(NamedTuple):
    """A setting that may take several values."""

    field: str
    """Of `ReplicaSettings`, or `TBT`."""
    convert: Callable[[str], Any]


TBT = "slo_tbt_ms"
"""The TBT objective: it changes the load and the objective, not the replica."""

_number = checked(float, "a number")


def _degree(text: str) -> int:
    number = count(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type that takes known names only."""
    names = tuple(known)

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(unknown_value_message(text, names))
        return text

    return read


def _device(text: str) -> str:
    if text != CPU:  # which is measured where it is looked up
        find_device(text)
    return text


VARIABLES: Mapping[str, Variable] = {
    "tp": Variable("tensor_parallel", _degree),
    "pp": Variable("pipeline_parallel", _degree),
    "replicas": Variable("replicas", _degree),
    "router": Variable("router", _one_of(ROUTERS)),
    "device": Variable("device", _device),
    "dtype": Variable("dtype", _one_of(DTYPES)),
    "policy": Variable("policy", _one_of(POLICIES)),
    "max-num-seqs": Variable("max_num_seqs", _degree),
    "max-num-batched-tokens": Variable("max_num_batched_tokens", budget),
    "shed": Variable("shed", lambda text: ShedMode(_one_of(ShedMode)(text))),
    "shed-order": Variable("shed_order", _one_of(SHED_ORDERS)),
    "slo-tbt-ms": Variable(TBT, _number),
}
"""By the name of the flag that sets one value."""

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
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose of {', '.join(VARIABLES)}"
            raise ConfigError(f"--vary {text}: {name!r} cannot vary; {hint}")
        words = [word.strip() for word in values.split(",")]
        if not equals or not all(words):
            raise ConfigError(f"--vary {text}: expected NAME=VALUE,VALUE, such as tp=1,2")
        if len(set(words)) < len(words):
            raise ConfigError(f"--vary {text}: a value is given twice")
        variable = VARIABLES[name]
        if variable.field in axes:
            raise ConfigError(f"--vary {name} is given twice; put all its values into one")
        axes[variable.field] = [_convert(text, variable, word) for word in words]
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


def _convert(text: str, variable: Variable, word: str) -> Any:
    try:
        return variable.convert(word)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--vary {text}: {error}") from error
