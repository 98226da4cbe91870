"""Logits to tokens. Rows never influence one another, and only rows that use a feature pay for it.

Each row is worked on alone, by functions that see nothing but its own logits, so that its token and its
log-probabilities are the same to the last bit in any batch.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onbeat.core.request import TokenLogprobs
from onbeat.engine.draw import (
    Logits,
    TokenIds,
    draw,
    draw_of_all,
    min_p_bound,
    nucleus_candidates,
    top_k_bound,
    weigh,
)
from onbeat.engine.guided_draw import NO_TOKEN, GuideOutcome, hold_to_grammars, redrawn
from onbeat.engine.logit_edits import edit_logits
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampled import BestTokens, SampledTokens, rows_with_logits
from onbeat.engine.sampling_row import SamplingRow


def token_logprobs(
    logits_V: Logits, token_id: int, alternatives: int | Sequence[int], *, with_rank: bool = False
) -> TokenLogprobs:
    """Report a row's token under the softmax of its logits.

    Parameters
    ----------
    logits_V : [vocabulary], as the model made them: before penalties and temperature.
    token_id : the token that was sampled.
    alternatives : how many of the most likely tokens to report with it, the lowest ids of equals; or which
        tokens to report behind the token itself.
    with_rank : whether to count the tokens that are likelier.
    """
    if isinstance(alternatives, int):
        shown = _most_likely(logits_V, min(alternatives, len(logits_V))).tolist()
    else:
        shown = [token_id, *(other for other in alternatives if other != token_id)]
    with np.errstate(invalid="ignore", over="ignore"):  # of a row that is not finite: its reports are NaN
        peak = float(logits_V.max())
        weights_V = logits_V - peak
        log_mass = peak + math.log(np.exp(weights_V, out=weights_V).sum())
    values = [value - log_mass for value in logits_V[shown].tolist()]
    rank = 1 + int(np.count_nonzero(logits_V > logits_V[token_id])) if with_rank else None
    return TokenLogprobs(token_id, float(logits_V[token_id]) - log_mass, tuple(shown), tuple(values), rank)


def _most_likely(logits_V: Logits, count: int) -> TokenIds:
    if not count:
        return np.zeros(0, np.int64)
    candidates = np.flatnonzero(logits_V >= top_k_bound(logits_V, count))
    return candidates[np.argsort(-logits_V[candidates], kind="stable")[:count]]


class Sampler:
    """Chooses one token for each row of logits.

    Parameters
    ----------
    vocab_size : number of logits in a row.
    """

    trusts_device = True
    """See `TokenSampler`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def needs_logits(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether more than each row's most likely token is needed to choose."""
        return not all(row.is_greedy and row.is_plain for row in rows)

    def sample(
        self, logits_RV: Logits | None, rows: Sequence[SamplingRow], best: BestTokens | None = None
    ) -> SampledTokens:
        """Choose a token for each row; see `TokenSampler.sample`."""
        left = rows_with_logits(best, len(rows)).tolist()
        if logits_RV is not None and logits_RV.shape != (len(left), self.vocab_size):
            raise ValueError(
                f"logits of shape {logits_RV.shape} do not fit {len(left)} rows x {self.vocab_size} tokens"
            )
        best = _best(logits_RV) if best is None else best
        sampled = SampledTokens(best.ids_R.tolist(), [None] * len(rows))
        for index in np.flatnonzero(~np.isfinite(best.logits_R)).tolist():
            _check(sampled, index, float(best.logits_R[index]))
        if logits_RV is None:
            _take_choices(rows, sampled, best)
            return sampled
        pairs = zip(left, logits_RV, strict=True)
        lines = {index: logits_V for index, logits_V in pairs if index not in sampled.errors}
        originals = _edited(lines, rows, sampled)
        _draw(lines, rows, sampled)
        _hold_to_grammars(lines, rows, sampled)
        for index, logits_V in (lines | originals).items():
            if rows[index].asks_logprobs and index not in sampled.errors:
                params = rows[index].params
                wanted = params.logprob_token_ids or params.num_logprobs or 0
                sampled.logprobs[index] = token_logprobs(logits_V, sampled.token_ids[index], wanted)
        return sampled

    def score(
        self, logits_RV: Logits | None, token_ids: Sequence[int], num_alternatives: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Report known tokens, one for each row of logits; see `TokenSampler.score`."""
        assert logits_RV is not None, "logits were asked for"
        lines = zip(logits_RV, token_ids, num_alternatives, strict=True)
        return [token_logprobs(logits_V, token_id, num, with_rank=True) for logits_V, token_id, num in lines]


def _best(logits_RV: Logits | None) -> BestTokens:
    """Find each row's most likely token (the lowest id of equals) and its logit; NaN counts as largest."""
    assert logits_RV is not None, "neither logits nor the best of them"
    ids_R = logits_RV.argmax(axis=-1)
    return BestTokens(ids_R, logits_RV[np.arange(len(ids_R)), ids_R])


def _check(sampled: SampledTokens, index: int, peak: float) -> None:
    """Mark a row whose largest logit is not a number that a token can be chosen by."""
    if not math.isfinite(peak):
        sampled.fail(index, f"the model produced invalid logits: the largest is {peak}")


def _take_choices(rows: Sequence[SamplingRow], sampled: SampledTokens, best: BestTokens) -> None:
    """Add what is known beside the tokens that a device has chosen, and let grammars go on."""
    guides = best.masks or GuideOutcome()
    for index in sampled.errors.keys() - guides.errors.keys():
        if best.logits_R[index] == -math.inf and not rows[index].is_always_plain:
            guides.faults[index] = rows[index].dead_end
    failed = sampled.errors.keys() | guides.errors.keys()
    guided = [index for index, row in enumerate(rows) if row.is_guided and index not in failed]
    if guided:
        work = hold_to_grammars(rows, guided, sampled.token_ids, lambda refused, _: [NO_TOKEN] * len(refused))
        guides.add(work, range(len(rows)))
        guides.failures |= work.failures
    if guided or guides.errors:
        sampled.guides = guides
    for index, message in guides.errors.items():
        sampled.fail(index, message)
    for index, report in enumerate(best.logprobs):
        sampled.logprobs[index] = None if index in sampled.errors else report


def _edited(
    lines: dict[int, Logits], rows: Sequence[SamplingRow], sampled: SampledTokens
) -> dict[int, Logits]:
    """Change the logits of the rows that ask for it, and look for their largest again.

    Returns
    -------
    The model's own logits of those that ask for log-probabilities.
    """
    originals: dict[int, Logits] = {}
    for index, logits_V in list(lines.items()):
        row = rows[index]
        if not row.edits_logits:
            continue
        if row.asks_logprobs:
            originals[index] = logits_V.copy()
        edit_logits(logits_V, row)
        token_id = sampled.token_ids[index] = int(logits_V.argmax())
        if (peak := float(logits_V[token_id])) == -math.inf:
            sampled.guides = sampled.guides or GuideOutcome()
            sampled.guides.faults[index] = row.dead_end
            sampled.fail(index, row.dead_end)
        else:
            _check(sampled, index, peak)
        if index in sampled.errors:
            del lines[index]
    return originals


def _draw(lines: dict[int, Logits], rows: Sequence[SamplingRow], sampled: SampledTokens) -> None:
    """Draw tokens for the random rows in place of the most likely ones."""
    random = [index for index in lines if not rows[index].is_greedy]
    if not random:
        return
    scratch_V = np.empty_like(lines[random[0]])  # stays in the cache from row to row
    with np.errstate(over="ignore"):  # a distance beyond the largest number is -inf, whose weight is 0
        for index in random:
            row, logits_V = rows[index], lines[index]
            peak = float(logits_V[sampled.token_ids[index]])
            sampled.token_ids[index] = _drawn(logits_V, row, peak, scratch_V)


def _drawn(logits_V: Logits, row: SamplingRow, peak: float, scratch_V: Logits) -> int:
    params, number = row.params, uniform(row.params.seed, row.position)
    if params.min_p:
        candidates, mass = np.flatnonzero(logits_V >= min_p_bound(params, peak)), 1.0
    elif params.top_k:
        bound = top_k_bound(logits_V, min(params.top_k, len(logits_V)))
        candidates, mass = np.flatnonzero(logits_V >= bound), 1.0
    else:
        weigh(logits_V, peak, params.temperature, scratch_V)
        if not row.is_truncated:
            return draw_of_all(scratch_V, number)
        mass = float(scratch_V.sum())
        candidates = nucleus_candidates(logits_V, params, mass)
    values = logits_V[candidates].astype(np.float64)
    return draw(candidates, values, params, mass=mass, number=number)


def _hold_to_grammars(lines: dict[int, Logits], rows: Sequence[SamplingRow], sampled: SampledTokens) -> None:
    guided = [index for index in lines if rows[index].is_guided]
    if not guided:
        return
    work = hold_to_grammars(
        rows, guided, sampled.token_ids, lambda refused, allowed: redrawn(lines, rows, refused, allowed)
    )
    for index, message in work.errors.items():
        sampled.fail(index, message)
    work.faults |= {} if sampled.guides is None else sampled.guides.faults
    sampled.guides = work
