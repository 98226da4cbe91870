"""The flags that say what is simulated, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from onbeat.cli.args import add_config_flag
from onbeat.cli.options import add_options, find_group, number, read_options
from onbeat.core.errors import ConfigError
from onbeat.core.options import option
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.speculation.speculative_config import SpeculativeConfig
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.draft_acceptance import DEFAULT_RATE, Acceptance
from onbeat.simulator.replay.history import read_acceptance
from onbeat.simulator.speculation import SpeculationSettings
from onbeat.workload.load import Load

_option = partial(option, group="run and output")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """How `onbeat simulate` runs, and what it writes."""

    label: str | None = _option(None, help="name of the run in files and reports")
    json: Path | None = _option(None, metavar="FILE", help="save the summary")
    records: Path | None = _option(None, metavar="FILE", help="save every request (JSON lines; .gz packs)")
    report: Path | None = _option(None, metavar="FILE.html", help="write charts")
    timeline: Path | None = _option(None, metavar="FILE", help="write a trace for ui.perfetto.dev")
    record: Path | None = _option(
        None, metavar="FILE", help="write what the fleet decides, for onbeat replay"
    )
    disable_tqdm: bool = _option(default=False, is_switch=True, help="show no progress")

    @property
    def files(self) -> dict[str, Path | None]:
        """The files that the command writes, by their flags."""
        names = ("json", "records", "report", "timeline", "record")
        return {f"--{name}": getattr(self, name) for name in names}


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated and under which load: all flags that `simulate` and `capacity` share."""
    add_config_flag(parser)
    find_group(parser, "model and devices")  # the first in --help
    add_options(parser, Deployment)
    add_speculation_arguments(parser)
    find_group(parser, "data set")
    add_options(parser, Load)


def replica_settings(args: argparse.Namespace) -> Deployment:
    """Return what the flags ask for.

    Raises
    ------
    ConfigError : flags that do not go together.
    """
    return read_options(
        args,
        Deployment,
        seed=args.seed,
        max_concurrency=args.max_concurrency,
        speculation=speculation_settings(args),
    )


_TITLE = "speculative decoding"
_OF_DRAFTS = ("acceptance_rate", "acceptance_record", "draft_hit_rate")
"""Flags that need --speculative-config."""


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what makes drafts, and what becomes of them."""
    add_options(parser, EngineConfig, only=("speculative",), group=_TITLE)
    group = find_group(parser, _TITLE)
    group.add_argument(
        "--acceptance-rate",
        nargs="+",
        default=[],
        metavar="[CLASS=]RATE",
        help="probability that a draft is accepted if all before it are, for all requests or by class "
        f"(default: {DEFAULT_RATE:g})",
    )
    group.add_argument(
        "--acceptance-record",
        type=Path,
        metavar="FILE",
        help="take acceptance rates from a file of `onbeat serve --record`",
    )
    group.add_argument(
        "--draft-hit-rate",
        type=number,
        metavar="SHARE",
        help="share of steps for which ngram finds drafts (default: all, or as in the record)",
    )


def speculation_settings(args: argparse.Namespace) -> SpeculationSettings | None:
    """Return what the flags ask for; None without --speculative-config.

    Raises
    ------
    ConfigError : flags that do not go together, or a rate that is none.
    """
    config: SpeculativeConfig | None = args.speculative_config
    if config is None:
        for name in _OF_DRAFTS:
            if getattr(args, name) not in (None, []):
                raise ConfigError(f"--{name.replace('_', '-')} needs --speculative-config")
        return None
    if config.method == "grammar":
        raise ConfigError(
            "simulated requests have no text, so method grammar finds no drafts; use method ngram "
            "with --draft-hit-rate, the share of steps with drafts"
        )
    return SpeculationSettings(
        num_speculative_tokens=config.num_speculative_tokens,
        is_adaptive=config.draft_length == "adaptive",
        draft_model=config.model,
        acceptance=_acceptance(args, config),
    )


def _acceptance(args: argparse.Namespace, config: SpeculativeConfig) -> Acceptance:
    """Return the given rates; where none is given, those of the record."""
    found = Acceptance() if args.acceptance_record is None else read_acceptance(args.acceptance_record)
    rate, rates = found.rate, dict(found.rates)
    for text in args.acceptance_rate:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(f"--acceptance-rate is {text!r}; write 0.7 or CLASS=0.7") from None
        if name:
            rates[name] = value
        else:
            rate = value
    return replace(
        found, rate=rate, rates=tuple(sorted(rates.items())), hit_rate=_hit_rate(args, config, found)
    )


def _hit_rate(args: argparse.Namespace, config: SpeculativeConfig, found: Acceptance) -> float | None:
    """Return how often drafts are found; None for a model, which makes any number."""
    given: float | None = args.draft_hit_rate
    if config.runs_model:
        if given is not None:
            raise ConfigError(
                f"--draft-hit-rate is for method ngram, but {config.method} has drafts in every step; "
                "leave it out"
            )
        return None
    if given is not None:
        return given
    return 1.0 if found.hit_rate is None else found.hit_rate
