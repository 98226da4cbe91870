"""The token budget of a step, chosen so that a full step keeps the TBT objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.slo.cost_model import CostModel

DEFAULT_TILE = 128
"""Tokens that matrix kernels take at once; one token more costs a whole tile."""

LARGEST_BUDGET = 8192
"""Beyond this a larger chunk saves next to no time a token, while every gap beside it grows."""

LONGEST_STEP = 0.2
"""Seconds that a step with prompts may take, on which no device is too slow for an efficient chunk: two TBT
objectives of 100 ms."""


def full_step(token_budget: int, *, max_num_seqs: int, context_tokens: int) -> BatchShape:
    """Return the worst step that a budget must allow for: all decode, and one chunk fills what is left.

    Parameters
    ----------
    token_budget : tokens of the step; no chunk is left room for where it is below `max_num_seqs`.
    max_num_seqs : decodes in the step.
    context_tokens : context that each decode reads, and that is already cached before the chunk.
    """
    shape = BatchShape.of_decodes(max_num_seqs, max_num_seqs * (context_tokens + 1))
    if token_budget > max_num_seqs:
        shape.add(context_tokens, token_budget - max_num_seqs, samples=True)
    return shape


def choose_token_budget(
    model: StepTimeModel,
    *,
    tbt: float,
    max_num_seqs: int,
    context_tokens: int,
    tile: int = DEFAULT_TILE,
    q: float | None = None,
) -> int:
    """Return the largest multiple of the tile whose full step takes no longer than the TBT objective.

    Budgets are tried upwards, to `LARGEST_BUDGET`, and the first that misses ends the search: every smaller
    step then keeps the objective too, even under a model that is not monotone.

    Parameters
    ----------
    model : predicts the steps.
    tbt : seconds.
    max_num_seqs, context_tokens : decodes in a full step, and the context that each reads (`full_step`).
    tile : the budget is a multiple of it, and at least `max_num_seqs`.
    q : hold this quantile of the step time against the objective; None is the mean.

    Raises
    ------
    ConfigError : even the decodes alone, or the smallest budget, take too long; says the predicted time.

    References
    ----------
    Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024,
    section 4.3.
    """
    if tile < 1 or max_num_seqs < 1:
        raise ConfigError(f"tile ({tile}) and max_num_seqs ({max_num_seqs}) must be at least 1")

    def seconds(token_budget: int) -> float:
        shape = full_step(token_budget, max_num_seqs=max_num_seqs, context_tokens=context_tokens)
        return model.step_time(shape, q)

    smallest = -(-max_num_seqs // tile) * tile
    decodes = f"{max_num_seqs} decodes with {context_tokens} tokens of context each"
    _require(seconds, 0, tbt, f"{decodes}, without any prompt,")
    _require(
        seconds, smallest, tbt, f"a step of the smallest budget, {smallest} tokens ({decodes}, a chunk),"
    )
    budget = smallest
    while budget + tile <= LARGEST_BUDGET and seconds(budget + tile) <= tbt:
        budget += tile
    return budget


def _require(seconds: Callable[[int], float], token_budget: int, tbt: float, what: str) -> None:
    predicted = seconds(token_budget)
    if not predicted <= tbt:
        raise ConfigError(
            f"no token budget keeps the TBT objective of {tbt * 1e3:g} ms: {what} would take "
            f"{predicted * 1e3:.2f} ms; lower max_num_seqs, use more or faster devices, or relax the "
            "objective"
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
            f"{len(num_prompt_tokens)} prompts and {len(num_output_tokens)} outputs of {num_decodes} tokens"
        )
    read = sum(o * (p + o / 2) for p, o in zip(num_prompt_tokens, num_output_tokens, strict=True))
    return max(1, round(read / num_decodes))


def largest_step(model: StepTimeModel | None, max_num_seqs: int) -> int:
    """Return the tokens of the largest step that can pay where time is the budget, for its activations.

    An efficient chunk beside a full batch, or what `LONGEST_STEP` holds; `LARGEST_BUDGET` without a model.
    """
    if model is None:
        return max(LARGEST_BUDGET, max_num_seqs)
    cost_model = CostModel(model, None)
    num_tokens = max(
        cost_model.efficient_chunk + max_num_seqs, cost_model.max_chunk(BatchShape(), 0, LONGEST_STEP)
    )
    return max(min(-(-num_tokens // DEFAULT_TILE) * DEFAULT_TILE, LARGEST_BUDGET), max_num_seqs)
