"""Logits to tokens. Rows never influence one another, and only rows that use a feature pay for it.

Legend: R rows, V vocabulary, C rows handled at once.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.core.request import TokenLogprobs
from onbeat.engine.device import Device
from onbeat.engine.draw import draw, locate, min_p_bound, nucleus_candidates
from onbeat.engine.guided_draw import GuideOutcome, hold_to_grammars, redrawn
from onbeat.engine.logit_edits import edit_logits
from onbeat.engine.logprobs import token_logprobs, with_tokens
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampling_row import SamplingRow

__all__ = ["BestTokens", "SampledTokens", "Sampler", "SamplingRow"]

INVALID_TOKEN = -1
"""Stands for the token of a row that has none because of an error."""

_NEVER_NEEDS_LOGITS = attrgetter("is_always_plain")
_CHUNK_ROWS = 32
"""Rows whose probabilities exist at once: their scratch memory stays in the cache and is used again."""
_SUM_BLOCK = 256
"""Probabilities summed together; a draw looks at the sums first, then inside one block."""


@dataclass(slots=True)
class SampledTokens:
    """One step's tokens, in the order of the rows."""

    token_ids: list[int]
    """`INVALID_TOKEN` where the row is in `errors`."""
    logprobs: list[TokenLogprobs | None]
    """None where the row did not ask, or is in `errors`."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row index to what is wrong with its logits or its grammar; the other rows are not affected."""
    guides: GuideOutcome | None = None
    """What grammars did; None where no row has one."""


class BestTokens(NamedTuple):
    """Each row's most likely token, found where the logits were computed."""

    ids_R: NDArray[np.int64]
    """The lowest id of equals."""
    logits_R: NDArray[np.float32]
    """Its logit; NaN where any logit of the row is NaN."""


class Sampler:
    """Chooses one token for each row of logits.

    Parameters
    ----------
    vocab_size : number of logits in a row.
    device : where the logits are.
    """

    def __init__(self, vocab_size: int, device: Device | torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(str(device))

    def needs_logits(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether more than each row's most likely token is needed to choose."""
        return not all(
            row.is_greedy and not (row.asks_logprobs or row.edits_logits or row.is_guided) for row in rows
        )

    def is_plain(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether no row wants more than a token by temperature, top-k, top-p, min-p and its number."""
        if all(map(_NEVER_NEEDS_LOGITS, rows)):
            return True
        return not any(row.asks_logprobs or row.edits_logits or row.is_guided for row in rows)

    @torch.inference_mode()
    def sample(
        self, logits_RV: Tensor | None, rows: Sequence[SamplingRow], best: BestTokens | None = None
    ) -> SampledTokens:
        """Choose a token for each row.

        Parameters
        ----------
        logits_RV : [rows, vocabulary], float32 or float64, contiguous; may be modified. None where the best
            tokens suffice (`needs_logits`).
        rows : the requests, one per row of logits.
        best : the most likely token of each row of these logits, where it is known already.

        Returns
        -------
        SampledTokens
            A row with NaN, +inf or no finite logit at all is reported in `errors`.
        """
        if logits_RV is not None and logits_RV.shape != (len(rows), self.vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits_RV.shape)} do not fit "
                f"{len(rows)} rows x {self.vocab_size} tokens"
            )
        token_ids, peaks = _best(logits_RV, best)
        sampled = SampledTokens(token_ids, [None] * len(rows))
        _report_invalid(sampled, range(len(rows)), peaks, "the model produced invalid logits")
        if logits_RV is None:
            return sampled
        # Only edits change logits; where log-probabilities are asked for, the model's own are kept.
        changed = _select(rows, sampled, lambda row: row.asks_logprobs and row.edits_logits)
        kept_CV = logits_RV[changed] if changed else None

        self._edit(logits_RV, rows, sampled, peaks)
        self._draw_untruncated(logits_RV, rows, sampled, peaks)
        self._draw_truncated(logits_RV, rows, sampled, peaks)
        guided = _select(rows, sampled, attrgetter("is_guided"))
        if guided:
            sampled.guides = hold_to_grammars(
                rows,
                guided,
                sampled.token_ids,
                lambda refused, allowed: redrawn(logits_RV, rows, refused, allowed),
            )
            for index, message in sampled.guides.errors.items():
                sampled.errors[index], sampled.token_ids[index] = message, INVALID_TOKEN

        if kept_CV is not None:
            _attach_logprobs(kept_CV, changed, rows, sampled)
        asking = _select(rows, sampled, lambda row: row.asks_logprobs and not row.edits_logits)
        if asking:
            _attach_logprobs(take_rows(logits_RV, asking), asking, rows, sampled)
        return sampled

    @torch.inference_mode()
    def score(
        self, logits_RV: Tensor | None, token_ids: Sequence[int], num_alternatives: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Report known tokens, one for each row of logits; see `TokenSampler.score`."""
        assert logits_RV is not None, "logits were asked for"
        return token_logprobs(logits_RV, token_ids, num_alternatives, with_ranks=True)

    def _edit(
        self, logits_RV: Tensor, rows: Sequence[SamplingRow], sampled: SampledTokens, peaks: list[float]
    ) -> None:
        """Change the logits of the rows that ask for it, and look for their largest again."""
        edited = _select(rows, sampled, lambda row: row.edits_logits)
        if not edited:
            return
        edit_logits(logits_RV, {index: rows[index] for index in edited})
        for index, token_id, peak in zip(edited, *_argmax(take_rows(logits_RV, edited)), strict=True):
            sampled.token_ids[index], peaks[index] = token_id, peak
        reason = (
            "no token can be sampled under allowed_token_ids, logit_bias, bad_words, penalties and min_tokens"
        )
        _report_invalid(sampled, edited, peaks, reason)

    def _draw_untruncated(
        self, logits_RV: Tensor, rows: Sequence[SamplingRow], sampled: SampledTokens, peaks: list[float]
    ) -> None:
        """Draw for rows whose whole vocabulary takes part, in the order of token ids."""
        random = _select(rows, sampled, lambda row: not row.is_greedy and not row.is_truncated)
        for chunk in _chunks(random):
            probs_CV = _probabilities(take_rows(logits_RV, chunk), rows, chunk, peaks)
            host_CV, sums = probs_CV.cpu().numpy(), _block_sums(probs_CV)
            for index, probs_V, block_sums in zip(chunk, host_CV, sums, strict=True):
                cumulative = np.cumsum(block_sums, dtype=np.float64)
                target = _number(rows[index]) * cumulative[-1]
                block = locate(cumulative, target)
                inside = np.cumsum(probs_V[block * _SUM_BLOCK : (block + 1) * _SUM_BLOCK], dtype=np.float64)
                before = cumulative[block - 1] if block else 0.0
                sampled.token_ids[index] = block * _SUM_BLOCK + locate(inside, target - before)

    def _draw_truncated(
        self, logits_RV: Tensor, rows: Sequence[SamplingRow], sampled: SampledTokens, peaks: list[float]
    ) -> None:
        """Draw for rows with min-p, top-k or top-p: narrow each row down before anything is sorted."""
        random = _select(rows, sampled, lambda row: not row.is_greedy and row.is_truncated)
        for chunk in _chunks(random):
            logits_CV = take_rows(logits_RV, chunk)
            masses = _masses(logits_CV, rows, chunk, peaks)
            bounds = _bounds(logits_CV, rows, chunk, peaks)
            for index, logits_V in zip(chunk, logits_CV.cpu().numpy(), strict=True):
                params, mass = rows[index].params, masses.get(index, 1.0)
                if index in masses:
                    candidates = nucleus_candidates(logits_V, params, mass)
                else:
                    candidates = np.flatnonzero(logits_V >= bounds[index])
                values = logits_V[candidates].astype(np.float64)
                number = _number(rows[index])
                sampled.token_ids[index] = draw(candidates, values, params, mass=mass, number=number)


def _best(logits_RV: Tensor | None, best: BestTokens | None) -> tuple[list[int], list[float]]:
    """Return each row's most likely token and its logit: what is known of them, or what a search finds."""
    if best is not None:
        return best.ids_R.tolist(), best.logits_R.tolist()
    assert logits_RV is not None, "neither logits nor the best of them"
    return _argmax(logits_RV)


def _argmax(logits_RV: Tensor) -> tuple[list[int], list[float]]:
    """Return each row's most likely token (the lowest id of equals) and its logit; NaN counts as largest."""
    if logits_RV.device.type == "cpu":
        # NumPy's argmax is vectorized; PyTorch's CPU kernel is not, and takes ten times as long.
        host_RV = logits_RV.numpy()
        token_ids = host_RV.argmax(axis=-1)
        return token_ids.tolist(), host_RV[np.arange(len(host_RV)), token_ids].tolist()
    values_R, indices_R = logits_RV.max(dim=-1)
    return indices_R.tolist(), values_R.tolist()


def _report_invalid(
    sampled: SampledTokens, indices: Sequence[int], peaks: Sequence[float], reason: str
) -> None:
    """Mark the rows whose largest logit is not a number that a token can be chosen by."""
    for index in indices:
        if not math.isfinite(peaks[index]):
            sampled.errors[index] = f"{reason}: the largest is {peaks[index]}"
            sampled.token_ids[index] = INVALID_TOKEN


def _select(
    rows: Sequence[SamplingRow], sampled: SampledTokens, wanted: Callable[[SamplingRow], bool]
) -> list[int]:
    return [index for index, row in enumerate(rows) if wanted(row) and index not in sampled.errors]


def _chunks(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), _CHUNK_ROWS):
        yield indices[start : start + _CHUNK_ROWS]


def take_rows(logits_RV: Tensor, indices: Sequence[int]) -> Tensor:
    """Return some rows, as a view where they lie next to one another."""
    first, last = indices[0], indices[-1]
    if last - first + 1 == len(indices):
        return logits_RV[first : last + 1]
    return logits_RV[torch.tensor(indices, device=logits_RV.device)]


def _number(row: SamplingRow) -> float:
    return uniform(row.params.seed, row.position)


def _attach_logprobs(
    logits_CV: Tensor, indices: Sequence[int], rows: Sequence[SamplingRow], sampled: SampledTokens
) -> None:
    """Report the log-probabilities of the rows at `indices`, whose unmodified logits these are."""
    # A row whose edits left nothing to sample reports nothing; any token stands in for the one it lacks.
    token_ids = [max(sampled.token_ids[index], 0) for index in indices]
    params = [rows[index].params for index in indices]
    num_alternatives = [0 if each.logprob_token_ids else each.num_logprobs or 0 for each in params]
    reports = token_logprobs(logits_CV, token_ids, num_alternatives)
    for place, each in enumerate(params):
        if each.logprob_token_ids:
            reports[place] = with_tokens(reports[place], logits_CV[place], each.logprob_token_ids)
    for index, report in zip(indices, reports, strict=True):
        if index not in sampled.errors:
            sampled.logprobs[index] = report


def _probabilities(
    logits_CV: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int], peaks: Sequence[float]
) -> Tensor:
    """Return the probabilities at each row's temperature.

    The largest logit is taken off before the division, which so cannot overflow. Softmax works row by row,
    where a sum over a single row might be split among threads and round differently than in a batch.
    """
    peaks_C1 = logits_CV.new_tensor([peaks[index] for index in indices]).unsqueeze(1)
    temperatures_C1 = logits_CV.new_tensor([rows[index].params.temperature for index in indices]).unsqueeze(1)
    return torch.softmax((logits_CV - peaks_C1).div_(temperatures_C1), dim=-1)


def _block_sums(probs_CV: Tensor) -> np.ndarray:
    """Return sums of `_SUM_BLOCK` neighbouring probabilities, the last of what is left: [C, blocks]."""
    whole = probs_CV.shape[1] // _SUM_BLOCK * _SUM_BLOCK
    sums = [probs_CV[:, :whole].reshape(len(probs_CV), -1, _SUM_BLOCK).sum(-1)] if whole else []
    if whole < probs_CV.shape[1]:
        sums.append(probs_CV[:, whole:].sum(-1, keepdim=True))
    return torch.cat(sums, dim=1).cpu().numpy()


def _masses(
    logits_CV: Tensor, rows: Sequence[SamplingRow], chunk: Sequence[int], peaks: Sequence[float]
) -> dict[int, float]:
    """Return the sum of exp((logit - peak) / temperature) of each row that top-p alone truncates."""
    places = [
        p for p, index in enumerate(chunk) if not rows[index].params.min_p and not rows[index].params.top_k
    ]
    if not places:
        return {}
    indices = [chunk[place] for place in places]
    probs_CV = _probabilities(take_rows(logits_CV, places), rows, indices, peaks)
    largest = probs_CV.amax(dim=-1).tolist()
    return {index: 1.0 / value for index, value in zip(indices, largest, strict=True)}


def _bounds(
    logits_CV: Tensor, rows: Sequence[SamplingRow], chunk: Sequence[int], peaks: Sequence[float]
) -> dict[int, float]:
    """Return for each row with min-p or top-k a logit under which no token is kept."""
    bounds: dict[int, float] = {}
    places_by_k: dict[int, list[int]] = defaultdict(list)
    for place, index in enumerate(chunk):
        params = rows[index].params
        if params.min_p:
            bounds[index] = min_p_bound(params, peaks[index])
        elif params.top_k:
            places_by_k[min(params.top_k, logits_CV.shape[1])].append(place)
    for top_k, places in places_by_k.items():
        smallest = torch.topk(take_rows(logits_CV, places), top_k, dim=-1).values[:, -1].tolist()
        bounds.update(zip([chunk[place] for place in places], smallest, strict=True))
    return bounds
