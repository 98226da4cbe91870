"""Choose one token of one row: min-p, top-k, top-p, then the inverse of the distribution.

Everything here is NumPy on the host and sees one row at a time, so a row's token depends on its own logits
and parameters only. What goes over the whole vocabulary is in the logits' type, the rest in float64.

Legend: V vocabulary.
"""

# ruff: noqa: N803, N806 -- array names carry shape suffixes

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from onbeat.core.request import SamplingParams

TokenIds = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.floating]
"""float32 or float64, contiguous."""

_SUM_BLOCK = 256
"""Weights summed together; a draw looks at the sums first, then inside one block."""
_LEAST_PARTS = 1024
"""Parts of a row whose largest logits stand for all; there are more where top-k keeps many."""
_NUCLEUS_DEPTHS = (3.0, 6.0, 12.0)
"""Distances from the peak, in units of the temperature, at which a nucleus is looked for."""


def locate(cumulative: Floats, target: float) -> int:
    """Return the first index whose cumulative weight exceeds the target.

    Rounding may put the target at or above the end; then it is the last index of positive weight, so an entry
    of weight zero is never chosen.
    """
    index = int(cumulative.searchsorted(target, side="right"))
    if index < len(cumulative):
        return index
    return int(cumulative.searchsorted(cumulative[-1], side="left"))


def weigh(logits_V: Logits, peak: float, temperature: float, out_V: Logits) -> None:
    """Write exp((logit - peak) / temperature).

    The largest logit is taken off before the division, which so cannot overflow.
    """
    np.subtract(logits_V, peak, out=out_V)
    if temperature != 1.0:
        np.divide(out_V, temperature, out=out_V)
    np.exp(out_V, out=out_V)


def draw_of_all(weights_V: Logits, number: float) -> int:
    """Return the token that a uniform number chooses from a whole row, in the order of ids."""
    sums = np.add.reduceat(weights_V, np.arange(0, len(weights_V), _SUM_BLOCK))
    cumulative = np.cumsum(sums, dtype=np.float64)
    target = number * cumulative[-1]
    block = locate(cumulative, target)
    first = block * _SUM_BLOCK
    inside = np.cumsum(weights_V[first : first + _SUM_BLOCK], dtype=np.float64)
    return first + locate(inside, target - (cumulative[block - 1] if block else 0.0))


def top_k_bound(logits_V: Logits, top_k: int) -> float:
    """Return a logit that the `top_k` largest reach, and few others.

    It is the `top_k`-th largest of the maxima of disjoint parts of the row, in as many of which there is a
    logit that large: this takes a tenth of the time of finding the `top_k`-th largest of all.
    """
    num_parts = max(_LEAST_PARTS, 8 * top_k)
    depth = len(logits_V) // num_parts
    if depth > 1:
        logits_V = logits_V[: depth * num_parts].reshape(depth, num_parts).max(axis=0)
    return float(np.partition(logits_V, -top_k)[-top_k])


def min_p_bound(params: SamplingParams, peak: float) -> float:
    """Return a logit under which min-p certainly drops a token.

    A small margin covers the rounding of float32 logits; `draw` then applies the exact rule.
    """
    distance = -params.temperature * math.log(params.min_p)
    return peak - distance - 1e-5 * (abs(peak) + distance)


def nucleus_candidates(logits: npt.NDArray[np.floating], params: SamplingParams, mass: float) -> TokenIds:
    """Return ascending ids of tokens that include the top-p nucleus, without sorting the row.

    Tokens within some distance of the peak are a prefix of the falling order, so as soon as their weight
    reaches the target, the nucleus is among them. Peaked rows, the usual ones, are done after one short look.

    Parameters
    ----------
    logits : one row.
    params : with top_p < 1.
    mass : sum of exp((logit - peak) / temperature) over the row.
    """
    peak = float(logits.max())
    for depth in _NUCLEUS_DEPTHS:
        token_ids = np.flatnonzero(logits >= peak - depth * params.temperature)
        weights = np.exp((logits[token_ids].astype(np.float64) - peak) / params.temperature)
        if weights.sum() >= params.top_p * mass:
            return token_ids
    return np.arange(len(logits))


def draw(token_ids: TokenIds, logits: Floats, params: SamplingParams, *, mass: float, number: float) -> int:
    """Return the token that a uniform number chooses among the candidates that min-p, top-k and top-p keep.

    Parameters
    ----------
    token_ids : ascending ids of the candidates: every token that may be kept, and possibly more.
    logits : theirs, the row's largest included.
    params : temperature (> 0), min_p, top_k and top_p.
    mass : sum of exp((logit - peak) / temperature) over the whole row; read when top-p acts alone.
    number : uniform in [0, 1).

    Notes
    -----
    Candidates are ordered by falling logit, equal ones by rising id; each rule keeps a prefix of this order.
    """
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    kept = len(weights)
    if params.min_p > 0.0:
        kept = int(np.count_nonzero(weights >= params.min_p))
    if params.top_k > 0:
        kept = min(kept, params.top_k)
    cumulative = np.cumsum(weights[:kept])
    if params.top_p < 1.0:
        renormalised = params.min_p > 0.0 or params.top_k > 0
        target = params.top_p * (cumulative[-1] if renormalised else mass)
        kept = min(kept, int(np.searchsorted(cumulative, target, side="left")) + 1)
        cumulative = cumulative[:kept]
    return int(token_ids[order[locate(cumulative, number * cumulative[-1])]])
