"""The token budget of a step, chosen so that a full step keeps the TBT objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel

DEFAULT_TILE = 128
"""Tokens that matrix kernels take at once; one token more costs a whole tile."""

LARGEST_BUDGET = 16384
"""Beyond this a larger chunk saves no time a token, while every gap beside it grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullStep:
    """The worst step that a budget must allow for: every row decodes, and one chunk fills what is left.

    Parameters
    ----------
    max_num_seqs : decodes in the step.
    context_tokens : context that each decode reads, and that is already cached before the chunk.
    """

    max_num_seqs: int
    context_tokens: int

    def shape(self, token_budget: int) -> BatchShape:
        """Return the sums of the step that spends the whole budget, at least one token a decode."""
        shape = BatchShape(
            num_new_tokens=self.max_num_seqs,
            num_sequences=self.max_num_seqs,
            num_decodes=self.max_num_seqs,
            decode_context_tokens=self.max_num_seqs * (self.context_tokens + 1),
            num_lm_head_rows=self.max_num_seqs,
        )
        if token_budget > self.max_num_seqs:
            shape.add(self.context_tokens, token_budget - self.max_num_seqs, samples=True)
        return shape


def choose_token_budget(
    model: StepTimeModel,
    step: FullStep,
    *,
    tbt: float,
    tile: int = DEFAULT_TILE,
    largest: int = LARGEST_BUDGET,
    q: float | None = None,
) -> int:
    """Return the largest multiple of the tile whose full step takes no longer than the TBT objective.

    Budgets are tried upwards and the first that misses ends the search, so that every smaller step keeps the
    objective too, even under a model that is not monotone.

    Parameters
    ----------
    model : predicts the steps.
    step : what a full step holds beside the chunk.
    tbt : seconds.
    tile : the budget is a multiple of it.
    largest : no budget above this is looked at.
    q : hold this quantile of the step time against the objective; None is the mean.

    Raises
    ------
    ConfigError : even the smallest budget, or the decodes alone, take too long; says the predicted time.

    References
    ----------
    Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024,
    section 4.3.
    """
    if tile < 1:
        raise ConfigError(f"the tile is {tile} tokens; it must be at least 1")
    smallest = -(-step.max_num_seqs // tile) * tile
    if largest < smallest:
        raise ConfigError(
            f"the largest token budget ({largest}) is below the smallest that gives each of "
            f"{step.max_num_seqs} requests a token in tiles of {tile} ({smallest}); raise the first or lower "
            "max_num_seqs"
        )
    _require_decodes(model, step, tbt, q)
    _require_smallest(model, step, smallest, tbt, q)
    budget = smallest
    while budget + tile <= largest and model.step_time(step.shape(budget + tile), q) <= tbt:
        budget += tile
    return budget


def _require_decodes(model: StepTimeModel, step: FullStep, tbt: float, q: float | None) -> None:
    seconds = model.step_time(step.shape(0), q)
    if not seconds <= tbt:
        raise ConfigError(
            f"no token budget keeps the TBT objective of {tbt * 1e3:g} ms: {step.max_num_seqs} decodes with "
            f"{step.context_tokens} tokens of context each are predicted to take {seconds * 1e3:.2f} ms "
            "without any prompt; lower max_num_seqs, use more or faster devices, or relax the objective"
        )


def _require_smallest(
    model: StepTimeModel, step: FullStep, smallest: int, tbt: float, q: float | None
) -> None:
    seconds = model.step_time(step.shape(smallest), q)
    if not seconds <= tbt:
        raise ConfigError(
            f"no token budget keeps the TBT objective of {tbt * 1e3:g} ms: the smallest one, {smallest} "
            f"tokens ({step.max_num_seqs} decodes and a chunk), is predicted to take {seconds * 1e3:.2f} ms; "
            "lower max_num_seqs, use more or faster devices, or relax the objective"
        )


def mean_decode_context(num_prompt_tokens: Sequence[int], num_output_tokens: Sequence[int]) -> int:
    """Return the context that a decode reads on average over all decodes of some requests, in tokens.

    Long answers hold more of the decodes, so they weigh more: sum of o (p + o / 2) over sum of o.

    Parameters
    ----------
    num_prompt_tokens, num_output_tokens : of each request; the same length, at least one request.
    """
    num_decodes = sum(num_output_tokens)
    if len(num_prompt_tokens) != len(num_output_tokens) or not num_decodes:
        raise ConfigError(
            "the mean context of decodes needs the lengths of at least one request, got "
            f"{len(num_prompt_tokens)} prompts and {len(num_output_tokens)} outputs with {num_decodes} tokens"
        )
    read = sum(o * (p + o / 2) for p, o in zip(num_prompt_tokens, num_output_tokens, strict=True))
    return max(1, round(read / num_decodes))
