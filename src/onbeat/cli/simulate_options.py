"""The flags that say what is simulated, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from onbeat.cli.args import add_config_flag
from onbeat.cli.options import add_options, find_group, read_options
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, option
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.speculation.speculative_config import TRAINED, SpeculativeConfig
from onbeat.report.result import ResultOptions
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.replay.history import read_acceptance
from onbeat.simulator.speculation import DEFAULT_RATE, Acceptance, SpeculationSettings
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


_TITLE = "speculative decoding"
_drafts = partial(option, group=_TITLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What becomes of drafts."""

    acceptance_rate: tuple[str, ...] = _drafts(
        (),
        metavar="[CLASS=]RATE",
        help="probability that a draft is accepted if all before it are, for all requests or by class "
        f"(default: {DEFAULT_RATE:g})",
    )
    acceptance_record: Path | None = _drafts(
        None, metavar="FILE", help="take acceptance rates from a file of `onbeat serve --record`"
    )
    draft_hit_rate: float | None = _drafts(
        None,
        metavar="SHARE",
        help="share of steps for which ngram finds drafts (default: all, or as in the record)",
    )

    def speculation(self, config: SpeculativeConfig | None) -> SpeculationSettings | None:
        """Return what is speculated; None without --speculative-config.

        Raises
        ------
        ConfigError : flags that do not go together, or a rate that is none.
        """
        if config is None:
            for each in changed(self):
                raise ConfigError(f"{each.flag} needs --speculative-config")
            return None
        if config.method == "grammar":
            raise ConfigError(
                "simulated requests have no text, so method grammar finds no drafts; use method ngram "
                "with --draft-hit-rate, the share of steps with drafts"
            )
        if config.method in TRAINED:
            raise ConfigError(
                f"a simulation does not know what drafts by {config.method} cost; take method draft-model "
                "and name a model of that size"
            )
        if config.runs_model and self.draft_hit_rate is not None:
            raise ConfigError(
                f"--draft-hit-rate is for method ngram, but {config.method} has drafts in every step; "
                "leave it out"
            )
        return SpeculationSettings(
            num_speculative_tokens=config.num_speculative_tokens,
            is_adaptive=config.draft_length == "adaptive",
            draft_model=config.model,
            acceptance=self._acceptance(looks_up=not config.runs_model),
        )

    def _acceptance(self, *, looks_up: bool) -> Acceptance:
        """Return the given rates; where none is given, those of the record.

        Parameters
        ----------
        looks_up : whether drafts have to be found; a model makes any number.
        """
        found = Acceptance() if self.acceptance_record is None else read_acceptance(self.acceptance_record)
        rates = {"": found.rate, **dict(found.rates)}
        for text in self.acceptance_rate:
            name, _, number = text.rpartition("=")
            try:
                rates[name] = float(number)
            except ValueError:
                raise ConfigError(f"--acceptance-rate is {text!r}; write 0.7 or CLASS=0.7") from None
        hits = 1.0 if found.hit_rate is None else found.hit_rate
        return replace(
            found,
            rate=rates.pop(""),
            rates=tuple(sorted(rates.items())),
            hit_rate=None if not looks_up else hits if self.draft_hit_rate is None else self.draft_hit_rate,
        )


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated and under which load: all flags that `simulate` and `capacity` share."""
    add_config_flag(parser)
    find_group(parser, "model and devices")  # the first in --help
    add_options(parser, Deployment)
    add_options(parser, EngineConfig, only=("speculative",), group=_TITLE)
    add_options(parser, DraftOptions)
    find_group(parser, "data set")
    add_options(parser, Load)


def replica_settings(args: argparse.Namespace) -> Deployment:
    """Return what the flags ask for.

    Raises
    ------
    ConfigError : flags that do not go together.
    """
    drafts = read_options(args, DraftOptions).speculation(args.speculative_config)
    return read_options(
        args, Deployment, seed=args.seed, max_concurrency=args.max_concurrency, speculation=drafts
    )
