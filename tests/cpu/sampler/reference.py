"""The sampler's rules written the slow and obvious way: one row, whole vocabulary, Python and float64."""

from __future__ import annotations

import math
from collections import Counter

from onbeat.core.request import SamplingParams


def edited_logits(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Penalties, logit bias, bans."""
    logits = list(logits)
    counts = Counter(output)
    for token_id in range(len(logits)):
        if token_id in counts or token_id in prompt:
            value = logits[token_id]
            rep = params.repetition_penalty
            logits[token_id] = value / rep if value > 0 else value * rep
        logits[token_id] -= params.frequency_penalty * counts[token_id]
        logits[token_id] -= params.presence_penalty * (counts[token_id] > 0)
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if params.allowed_token_ids:
        logits = [
            x if token_id in params.allowed_token_ids else -math.inf for token_id, x in enumerate(logits)
        ]
    if len(output) < params.min_tokens:
        logits = [-math.inf if token_id in params.stop_token_ids else x for token_id, x in enumerate(logits)]
    return logits


def distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Tokens that may be drawn and their probabilities: in order of ids, most likely first if truncated."""
    peak = max(logits)
    weights = {token_id: math.exp((x - peak) / params.temperature) for token_id, x in enumerate(logits)}
    order = sorted(weights, key=lambda token_id: (-logits[token_id], token_id))
    if params.min_p:
        order = [token_id for token_id in order if weights[token_id] >= params.min_p]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        total, reached, nucleus = sum(weights[token_id] for token_id in order), 0.0, []
        for token_id in order:
            nucleus.append(token_id)
            reached += weights[token_id]
            if reached >= params.top_p * total:
                break
        order = nucleus
    if not (params.min_p or params.top_k or params.top_p < 1.0):
        order = sorted(order)
    total = sum(weights[token_id] for token_id in order)
    return {token_id: weights[token_id] / total for token_id in order if weights[token_id] > 0}


def invert(probabilities: dict[int, float], number: float) -> int:
    """Return the token at which the probabilities, summed up in order, exceed the number."""
    reached = 0.0
    for token_id, probability in probabilities.items():
        reached += probability
        if reached > number:
            return token_id
    return token_id
