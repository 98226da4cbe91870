"""What the limits of a scheduler leave open, above all the token budget of a step.

It may be chosen so that a full step keeps the TBT objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.kv_windows import KVWindows
from onbeat.core.slo import DEFAULT_QUEUE_SECONDS
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import check_policy, composition
from onbeat.scheduler.scheduler_config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_POLICY,
    SchedulerConfig,
    SchedulerLimits,
)
from onbeat.scheduler.triage import CostModel

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


def choose_token_budget(model: StepTimeModel, *, tbt: float, max_num_seqs: int, context_tokens: int) -> int:
    """Return the largest multiple of the usual tile whose full step takes no longer than the TBT objective.

    Budgets are tried upwards, to `LARGEST_BUDGET`, and the first that misses ends the search: every smaller
    step then keeps the objective too, even under a model that is not monotone.

    Parameters
    ----------
    model : predicts the steps.
    tbt : seconds.
    max_num_seqs, context_tokens : decodes in a full step, and the context that each reads (`full_step`).

    Raises
    ------
    ConfigError : even the decodes alone, or the smallest budget, take too long; says the predicted time.

    References
    ----------
    Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024,
    section 4.3.
    """
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")

    def seconds(token_budget: int) -> float:
        shape = full_step(token_budget, max_num_seqs=max_num_seqs, context_tokens=context_tokens)
        return model.step_time(shape)

    smallest = -(-max_num_seqs // DEFAULT_TILE) * DEFAULT_TILE
    decodes = f"{max_num_seqs} decodes with {context_tokens} tokens of context each"
    _require(seconds, 0, tbt, f"{decodes}, without any prompt,")
    _require(
        seconds, smallest, tbt, f"a step of the smallest budget, {smallest} tokens ({decodes}, a chunk),"
    )
    budget = smallest
    while budget + DEFAULT_TILE <= LARGEST_BUDGET and seconds(budget + DEFAULT_TILE) <= tbt:
        budget += DEFAULT_TILE
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
    Where nothing decodes, it is the mean prompt.

    Parameters
    ----------
    num_prompt_tokens, num_output_tokens : of each request; the same length, at least one request.
    """
    num_decodes = sum(num_output_tokens)
    if len(num_prompt_tokens) != len(num_output_tokens) or not num_prompt_tokens:
        raise ConfigError(
            "the mean context of decodes needs the lengths of at least one request, got "
            f"{len(num_prompt_tokens)} prompts and {len(num_output_tokens)} outputs"
        )
    if not num_decodes:
        return round(sum(num_prompt_tokens) / len(num_prompt_tokens))
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


DEFAULT_TOKEN_BUDGET = 512
"""Sarathi-Serve's budget for a strict TBT objective (OSDI 2024, section 5)."""


def queue_seconds(policy: str, given: float | None) -> float | None:
    """Return the `max_queue_seconds` of a policy.

    Parameters
    ----------
    given : what was asked for, seconds: 0 is no limit, None is the policy's default.

    Returns
    -------
    Seconds; None is no limit, as by default under a policy that predicts no waits.
    """
    if given is None:
        return DEFAULT_QUEUE_SECONDS if composition(policy).predicts_waits else None
    return given or None


def settle(
    limits: SchedulerLimits,
    *,
    num_blocks: int,
    model_len: int,
    model: StepTimeModel | None = None,
    most_tokens: int = LARGEST_BUDGET,
    **others: Any,
) -> SchedulerConfig:
    """Decide what the limits leave open, and check that all goes together.

    Parameters
    ----------
    num_blocks : KV blocks in the cache.
    model_len : tokens of the longest request that the model was made for.
    model : predicts steps; None where nobody does yet.
    most_tokens : of a step whose budget is time, where the limits leave it open.
    others : further fields of `SchedulerConfig`.

    Raises
    ------
    ConfigError : limits that cannot be kept.
    """
    if (limits.max_model_len or 0) > model_len:
        raise ConfigError(
            f"max_model_len is {limits.max_model_len}, but this model was made for {model_len} tokens; give "
            "a smaller one"
        )
    settled = {each.name: getattr(limits, each.name) for each in fields(SchedulerLimits)}
    settled["policy"] = policy = limits.policy or DEFAULT_POLICY
    settled["block_size"] = block_size = limits.block_size or DEFAULT_BLOCK_SIZE
    # A length that the user asked for must fit (SchedulerConfig checks it); the model's own may be cut.
    num_behind = speculation.num_lookahead_tokens if (speculation := others.get("speculation")) else 0
    settled["max_model_len"] = longest = limits.max_model_len or min(
        model_len, num_blocks * block_size - num_behind
    )
    if limits.max_num_batched_tokens == "auto":
        raise ConfigError("max_num_batched_tokens is 'auto', which is for simulations; give a number")
    if limits.max_num_batched_tokens is None:
        if (num_tables := others.get("num_tables", 1)) > 1:
            num_asked = -(-((limits.max_model_len or 0) + num_behind) // block_size)
            num_seen = others["window_length"] + num_behind
            beside = KVWindows.step_beside(num_tables, num_seen, num_blocks, block_size, num_asked)
            most_tokens = min(most_tokens, max(beside, DEFAULT_TOKEN_BUDGET))
        sizes = {"max_model_len": longest, "max_num_seqs": limits.max_num_seqs, "most_tokens": most_tokens}
        settled["max_num_batched_tokens"] = default_token_budget(policy, model=model, **sizes)
    settled["max_queue_seconds"] = queue_seconds(policy, limits.max_queue_seconds)
    config = SchedulerConfig(**settled, num_blocks=num_blocks, **others)
    if limits.max_model_len is None:
        config = replace(config, max_model_len=min(model_len, config.longest_request))
    check_policy(config)
    return config


def default_token_budget(
    policy_name: str,
    *,
    max_model_len: int,
    max_num_seqs: int,
    model: StepTimeModel | None = None,
    most_tokens: int = LARGEST_BUDGET,
) -> int:
    """Return the token budget of a step where the user gave none.

    Parameters
    ----------
    model : predicts steps; None where nobody does yet.
    most_tokens : where the budget is time; every request that runs has one all the same.
    """
    policy = composition(policy_name)
    if policy.whole_prompts:
        return max(2048, max_model_len, max_num_seqs)
    if policy.is_bound_by_time:
        return max(min(largest_step(model, max_num_seqs), most_tokens), max_num_seqs)
    return max(DEFAULT_TOKEN_BUDGET, max_num_seqs)


def most_step_tokens(limits: SchedulerLimits, model: StepTimeModel | None) -> int:
    """Return the tokens of the largest step, for the memory of its activations."""
    if isinstance(limits.max_num_batched_tokens, int):
        return limits.max_num_batched_tokens
    is_bound_by_time = composition(limits.policy or DEFAULT_POLICY).is_bound_by_time
    return largest_step(model, limits.max_num_seqs) if is_bound_by_time else LARGEST_BUDGET
