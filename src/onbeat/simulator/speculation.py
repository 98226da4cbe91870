"""What a person says of speculative decoding, and what it costs a simulated replica.

A simulated run draws which drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.options import changed, option
from onbeat.perfmodel.memory import KVCapacity
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.speculative_config import TRAINED, SpeculativeConfig, speculative_option

_TITLE = "speculative decoding"
_drafts = partial(option, group=_TITLE)
DEFAULT_RATE = 0.7
_RIGHT, _FOUND = 1, 2
"""Streams of random numbers of a request."""


@dataclass(frozen=True, slots=True)
class KnownDrafts:
    """What a recorded run found out about the output tokens of one request, by their place, from 0."""

    is_right: dict[int, bool] = field(default_factory=dict)
    """Whether the draft for a token was accepted, where one was verified."""
    num_available: dict[int, int] = field(default_factory=dict)
    """Drafts that the proposer had from a token on, where it said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How often drafts are right, and how often there are any.

    A draft is accepted with the rate of its request's class if all before it in its row were. So the number
    that a row of k drafts accepts has the truncated geometric distribution of Leviathan et al. (ICML 2023).

    Raises
    ------
    ConfigError : a rate that is no share.
    """

    rate: float = DEFAULT_RATE
    """Of classes that have none of their own."""
    rates: tuple[tuple[str, float], ...] = ()
    """(class of objectives, its rate)"""
    hit_rate: float | None = None
    """Share of steps for which the proposer finds drafts; None: always, as many as it is asked for."""
    known: Sequence[KnownDrafts] = ()
    """By row of the load, what is known instead of drawn; empty where nothing is."""

    def __post_init__(self) -> None:
        of_classes = ((f"acceptance rate of {name}", rate) for name, rate in self.rates)
        named = [("acceptance rate", self.rate), *of_classes]
        if self.hit_rate is not None:
            named.append(("hit rate", self.hit_rate))
        for name, value in named:
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"the {name} is {value:g}; it must be between 0 and 1")

    def draw(
        self,
        row: int,
        num_output_tokens: int,
        *,
        request_class: str | None,
        seed: int,
        num_speculative_tokens: int,
    ) -> RequestDrafts:
        """Return which drafts a request accepts: a function of (seed, row, place of the token) and the rate.

        So it is the same whatever policy and however many drafts a step is planned with, and a token that is
        guessed at one rate is guessed at every higher one.

        Parameters
        ----------
        row : of the load.
        num_speculative_tokens : drafts that a proposer which finds any has.
        """
        rate = self.rate if request_class is None else dict(self.rates).get(request_class, self.rate)
        is_right = np.random.default_rng([seed, row, _RIGHT]).random(num_output_tokens) < rate
        known = self.known[row] if self.known else None
        if known is not None:
            for place, value in known.is_right.items():
                if place < num_output_tokens:
                    is_right[place] = value
        places = np.arange(num_output_tokens)
        first_wrong = np.where(is_right, num_output_tokens, places)
        num_right = np.minimum.accumulate(first_wrong[::-1])[::-1] - places
        if self.hit_rate is None:
            return RequestDrafts(num_right.tolist(), None)
        found = np.random.default_rng([seed, row, _FOUND]).random(num_output_tokens + 1) < self.hit_rate
        available = np.where(found, num_speculative_tokens, 0).tolist()
        if known is not None:
            for place, num in known.num_available.items():
                if place < len(available):
                    available[place] = num
        return RequestDrafts(num_right.tolist(), available)


@dataclass(frozen=True, slots=True)
class RequestDrafts:
    """Which drafts one request accepts, by the place of an output token, from 0."""

    num_right: list[int]
    """Drafts in a row that are right from this token on."""
    num_available: list[int] | None
    """Drafts that the proposer has from this token on; None where it makes any number."""

    def num_drafted(self, place: int, num_asked: int) -> int:
        """Return how many drafts are verified where so many were planned."""
        return num_asked if self.num_available is None else min(num_asked, self.num_available[place])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What a person says of speculative decoding: what makes drafts, and what becomes of them.

    Raises
    ------
    ConfigError : settings that do not go together, drafts that a simulation does not know, or a rate that is
        none.
    """

    speculative: SpeculativeConfig | None = speculative_option(_TITLE)
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

    def __post_init__(self) -> None:
        config, _ = self.speculative, self.acceptance(Acceptance())
        if config is None:
            for each in changed(self):
                raise ConfigError(f"{each.flag} needs --speculative-config")
        elif config.method == "grammar":
            raise ConfigError(
                "simulated requests have no text, so method grammar finds no drafts; use method ngram "
                "with --draft-hit-rate, the share of steps with drafts"
            )
        elif config.method in TRAINED:
            raise ConfigError(
                f"a simulation does not know what drafts by {config.method} cost; take method draft-model "
                "and name a model of that size"
            )
        elif config.runs_model and self.draft_hit_rate is not None:
            raise ConfigError(
                f"--draft-hit-rate is for method ngram, but {config.method} has drafts in every step; "
                "leave it out"
            )

    def check_classes(self, known: Sequence[str]) -> None:
        """Raise ConfigError if a rate is of a class that the load has not."""
        for text in self.acceptance_rate:
            name = text.rpartition("=")[0]
            if name and name not in known:
                names = ", ".join(known) or "none, as without --slo-config"
                raise ConfigError(f"--acceptance-rate {text}: the load has no such class; it has {names}")

    def acceptance(self, found: Acceptance) -> Acceptance:
        """Return the given rates; where none is given, those that a record shows.

        Raises
        ------
        ConfigError : one is no share.
        """
        rates = {"": found.rate, **dict(found.rates)}
        for text in self.acceptance_rate:
            name, _, number = text.rpartition("=")
            try:
                rates[name] = float(number)
            except ValueError:
                raise ConfigError(f"--acceptance-rate is {text!r}; write 0.7 or CLASS=0.7") from None
        given, usual = self.draft_hit_rate, 1.0 if found.hit_rate is None else found.hit_rate
        # A model makes any number; others have to be found.
        looks_up = self.speculative is not None and not self.speculative.runs_model
        return replace(
            found,
            rate=rates.pop(""),
            rates=tuple(sorted(rates.items())),
            hit_rate=None if not looks_up else usual if given is None else given,
        )


def draft_model(config: SpeculativeConfig, target: ModelSpec) -> ModelSpec | None:
    """Return what makes the drafts, on the target's devices, cut and stored alike; None looks them up.

    Raises
    ------
    ConfigError : an unknown model, or one that is not smaller than the target.
    """
    if config.model is None:
        return None
    draft = find_model_spec(config.model)
    if draft.layer_parameters >= target.layer_parameters:
        raise ConfigError(
            f"the draft model {draft.name} has {draft.layer_parameters / 1e9:.2f} billion parameters in "
            f"its layers, and {target.name} has {target.layer_parameters / 1e9:.2f}; choose a smaller one"
        )
    return draft


def beside_draft_model(target: KVCapacity, draft: KVCapacity, least_tokens: int) -> KVCapacity:
    """Return the target's KV capacity where a draft model and its KV share the devices with it.

    Every block of the target has one of the draft model beside it, for the same tokens.

    Parameters
    ----------
    least_tokens : that the KV caches must hold.

    Raises
    ------
    DoesNotFit : they hold fewer.
    """
    left = target.kv_bytes - draft.weight_bytes
    block_bytes = target.block_bytes + draft.block_bytes
    kv_needed = -(-least_tokens // target.block_size) * block_bytes
    if left < kv_needed:
        raise DoesNotFit(
            "the draft model does not fit beside the model: a device has "
            f"{target.kv_bytes / 2**30:.1f} GiB left, but its weights take {draft.weight_bytes / 2**30:.1f} "
            f"and both KV caches {kv_needed / 2**30:.2g} for {least_tokens} tokens"
        )
    return replace(
        target,
        num_blocks=int(left // block_bytes),
        weight_bytes=target.weight_bytes + draft.weight_bytes,
        kv_bytes=left,
        block_bytes=block_bytes,
    )
