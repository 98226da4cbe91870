"""The flags of `onbeat capacity` that it does not share, and the settings that `--vary` compares."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from onbeat.cli.args import LEVELS, RATES, listed
from onbeat.cli.options import milliseconds, read_value
from onbeat.cli.outputs import ResultOptions, StudyOptions
from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.core.options import changed, option, part, settings_of
from onbeat.report.run import Level
from onbeat.simulator.deployment import Deployment

_capacity = partial(option, group="capacity")
_comparison = partial(option, group="comparison")

TBT = "slo_tbt_ms"
"""The TBT objective: it changes the load and the objective, not the replica."""

_SETTINGS = {setting.name: setting for setting in settings_of(Deployment)}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """What is searched for, over which configurations, and where the result goes."""

    objective: str | None = _capacity(
        None,
        metavar="NAME",
        help="what a rate must keep; sarathi: P99 of all gaps within --slo-tbt-ms, and a median scheduling "
        "delay of at most 2 s; vidur: a P99 scheduling delay below 5 s; attainment:0.9: this share of "
        "good requests; distserve:0.9: this share within TTFT and TPOT; default: sarathi, or none with "
        "a sweep",
    )
    tolerance: float = _capacity(0.025, metavar="SHARE", help="stop the search at a bracket of this width")
    study: StudyOptions = part(StudyOptions)
    vary: tuple[str, ...] = _comparison(
        (),
        many="append",
        metavar="NAME=VALUE,VALUE",
        help="compare values of a flag; several --vary give every combination; of " + ", ".join(VARIABLES),
    )
    sweep_concurrency: str | None = _comparison(
        None, metavar="N,N,...", help="show latency against throughput, by a closed loop for each concurrency"
    )
    sweep_rate: str | None = _comparison(
        None, metavar="R,R,...", help="show latency against throughput, by an open loop for each rate"
    )
    output: ResultOptions = part(ResultOptions)

    def __post_init__(self) -> None:
        for each in changed(self) if self.is_sweep and self.objective is None else ():
            if each.name in {"tolerance", "repeats"}:
                raise ConfigError(
                    f"{each.flag} is for a search, and a sweep searches only with --objective: give one, or "
                    f"leave {each.flag} out"
                )

    @property
    def is_sweep(self) -> bool:
        """Whether given loads are run, with or without a search."""
        return self.sweep_concurrency is not None or self.sweep_rate is not None

    def levels(self) -> list[Level]:
        """Return the loads of a sweep: closed loops, then open ones.

        Raises
        ------
        ConfigError : one that is no load.
        """
        closed = (
            listed("--sweep-concurrency", self.sweep_concurrency, *LEVELS) if self.sweep_concurrency else []
        )
        opened = listed("--sweep-rate", self.sweep_rate, *RATES) if self.sweep_rate else []
        return [
            *(Level(max_concurrency=each) for each in closed),
            *(Level(request_rate=each) for each in opened),
        ]


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
