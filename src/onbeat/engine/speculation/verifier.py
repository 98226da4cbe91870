"""Keeps the drafts that the model itself would have sampled.

A draft is accepted if it equals the token that the request's own random number chooses from the model's
distribution at its position. For a draft that was proposed with certainty this is rejection sampling: it is
accepted with the probability p(x) that the model gives it, and otherwise the token chosen is distributed as
p without x. The output is so the same, token for token, as without drafts, whatever the sampling settings.

References
----------
Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023;
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.

Legend: R sampling rows, V vocabulary, W waves, C rows of a wave.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onbeat.core.request import TokenLogprobs
from onbeat.engine.draw import Logits
from onbeat.engine.forward import StepLogits
from onbeat.engine.guided_draw import GuideOutcome
from onbeat.engine.input_batch import wave_order
from onbeat.engine.sampled import INVALID_TOKEN, SampledTokens, TokenSampler, rows_with_logits
from onbeat.engine.sampling_row import SamplingRow

_NO_DRAFT = INVALID_TOKEN - 1
"""Equals no token."""


@dataclass(slots=True)
class VerifiedTokens:
    """What each row of a step gets: the accepted drafts, and one token more."""

    token_ids: list[list[int]]
    """The last one is no token where the row is in `errors`."""
    logprobs: list[list[TokenLogprobs] | None]
    """None where the row did not ask; empty where none did."""
    errors: dict[int, str]
    """Row index to what is wrong with its logits or its grammar."""
    guides: GuideOutcome | None = None
    """What grammars did, and rows whose parameters leave no token; None where no row has either."""


def verify(
    sampler: TokenSampler,
    logits: StepLogits,
    rows: list[SamplingRow],
    drafts: Sequence[Sequence[int]],
    *,
    wants_logits: bool,
) -> VerifiedTokens:
    """Sample after each draft, up to the first that is not what was sampled; append the tokens to the rows.

    Parameters
    ----------
    logits : in the order of `wave_order`.
    rows, drafts : of each request that samples.
    wants_logits : what the sampler said of the rows. If not, or if all tokens are chosen, none depends on
        those before it.
    """
    if wants_logits and logits.values_RV is not None:
        return _verify_in_waves(sampler, logits, rows, drafts)
    return _verify_at_once(sampler, logits, rows, drafts)


def _verify_at_once(
    sampler: TokenSampler, logits: StepLogits, rows: list[SamplingRow], drafts: Sequence[Sequence[int]]
) -> VerifiedTokens:
    """Compare all drafts with the most likely tokens, or with those that were chosen."""
    num_drafts_R = np.array([len(row_drafts) for row_drafts in drafts], np.int64)
    waves, owners = wave_order(num_drafts_R)
    sampled = sampler.sample(logits.values_RV, [rows[index] for index in owners.tolist()], logits.best)
    sampled_RW = np.full((len(rows), num_drafts_R.max() + 1), INVALID_TOKEN, np.int64)
    sampled_RW[owners, waves] = sampled.token_ids
    drafts_RW = np.full((len(rows), num_drafts_R.max()), _NO_DRAFT, np.int64)
    is_draft = waves > 0
    drafts_RW[owners[is_draft], waves[is_draft] - 1] = [
        drafts[row][wave - 1] for wave, row in zip(waves.tolist(), owners.tolist(), strict=True) if wave
    ]
    accepted_R = (sampled_RW[:, :-1] == drafts_RW).cumprod(axis=1).sum(axis=1).tolist()
    token_ids = [
        ids[: num + 1] for ids, num in zip(np.maximum(sampled_RW, 0).tolist(), accepted_R, strict=True)
    ]
    errors = {}
    for place, message in sampled.errors.items():
        row = int(owners[place])
        if waves[place] == accepted_R[row]:
            errors[row] = message
    for sampling_row, ids in zip(rows, token_ids, strict=True):
        sampling_row.output_token_ids += ids
    return VerifiedTokens(token_ids, [None] * len(rows), errors)


def _verify_in_waves(
    sampler: TokenSampler, logits: StepLogits, rows: list[SamplingRow], drafts: Sequence[Sequence[int]]
) -> VerifiedTokens:
    """Sample position by position, so that each token is chosen with those before it known."""
    assert logits.values_RV is not None
    verified = VerifiedTokens([[] for _ in rows], [[] if row.asks_logprobs else None for row in rows], {})
    waves, owners = wave_order(np.array([len(row_drafts) for row_drafts in drafts], np.int64))
    is_alive = np.ones(len(rows), np.bool_)
    left_N = rows_with_logits(logits.best, len(owners))
    for wave in range(int(waves[-1]) + 1):
        places_C = np.flatnonzero((waves == wave) & is_alive[owners])
        if not len(places_C):
            break
        indices = owners[places_C].tolist()
        sampled = sampler.sample(
            _take_rows(logits.values_RV, np.flatnonzero(np.isin(left_N, places_C))),
            [rows[index] for index in indices],
            None if logits.best is None else logits.best.take(places_C),
        )
        if sampled.guides is not None:
            verified.guides = verified.guides or GuideOutcome()
            verified.guides.add(sampled.guides, indices)
        for place, index in enumerate(indices):
            token_id = _take(verified, rows, index, sampled, place)
            is_alive[index] = wave < len(drafts[index]) and token_id == drafts[index][wave]
    return verified


def _take_rows(logits_RV: Logits, lines_C: NDArray[np.intp]) -> Logits:
    """Return some rows, without a copy where they lie next to one another, as those of the first wave do."""
    is_run = len(lines_C) and lines_C[-1] - lines_C[0] + 1 == len(lines_C)
    return logits_RV[lines_C[0] : lines_C[-1] + 1] if is_run else logits_RV[lines_C]


def _take(
    verified: VerifiedTokens, rows: list[SamplingRow], index: int, sampled: SampledTokens, place: int
) -> int:
    """Add a sampled token to its row and return it; `INVALID_TOKEN` where there is none."""
    token_id = sampled.token_ids[place]
    verified.token_ids[index].append(max(token_id, 0))
    rows[index].output_token_ids.append(max(token_id, 0))
    if place in sampled.errors:
        verified.errors[index] = sampled.errors[place]
        return INVALID_TOKEN
    logprobs, entry = verified.logprobs[index], sampled.logprobs[place]
    if logprobs is not None and entry is not None:
        logprobs.append(entry)
    return token_id
