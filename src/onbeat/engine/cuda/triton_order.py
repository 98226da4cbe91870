"""What the draw in Triton computes of one row: its order of logits, and the token that a number draws.

Logits are ordered by an integer: their bits as a number, those of negative ones turned around. Weights and
sums are float64, in an order that depends on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_of(logits):
    """Return int32 numbers that are ordered as float32 logits are: -0.0 is 0.0, and NaN is the largest."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(logits != logits, 0x7FFFFFFF, order)


@triton.jit
def logit_of(order):
    """Return the logit that has this place in the order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def distances_of(logits, peak, temperature):
    """Return how far below the peak logits are, in units of the temperature (float64, >= 0)."""
    return (peak.to(tl.float64) - logits.to(tl.float64)) * (1.0 / temperature)


@triton.jit
def _at(values, indices, index):
    """Return the number at a place of a vector."""
    return tl.sum(tl.where(indices == index, values, 0), axis=0)


@triton.jit
def _located(cumulative, indices, length, target):
    """Return the first index below `length` whose cumulative weight exceeds the target; see `draw.locate`."""
    inside = indices < length
    index = tl.sum((inside & (cumulative <= target)).to(tl.int32), axis=0)
    total = _at(cumulative, indices, length - 1)
    last = tl.sum((inside & (cumulative < total)).to(tl.int32), axis=0)
    return tl.minimum(index, last)


@triton.jit
def drawn_in_order_of_ids(
    logits_ptr,
    block_sums_ptr,
    peak,
    temperature,
    number,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Return the token of a row that nothing cuts: find its block of neighbours, then look inside."""
    blocks, places = tl.arange(0, BLOCKS_BLOCK), tl.arange(0, NEIGHBOURS)
    sums = tl.load(block_sums_ptr + blocks, mask=blocks < NUM_BLOCKS, other=0.0)
    cumulative = tl.cumsum(sums, axis=0)
    target = number * _at(cumulative, blocks, NUM_BLOCKS - 1)
    block = _located(cumulative, blocks, NUM_BLOCKS, target)
    ids = block * NEIGHBOURS + places
    logits = tl.load(logits_ptr + ids, mask=ids < VOCAB, other=-float("inf"))
    inside = tl.cumsum(tl.exp(-distances_of(logits, peak, temperature)), axis=0)
    return block * NEIGHBOURS + _located(
        inside, places, NEIGHBOURS, target - _at(cumulative, blocks, block - 1)
    )


@triton.jit
def _weight_of(order, peak, temperature):
    """Return the weight of the logit that has this place in the order."""
    return tl.exp(-distances_of(logit_of(order.to(tl.int32)), peak, temperature))


@triton.jit
def _measure(
    logits_ptr, length, pivots, by_count, peak, temperature, LOOK: tl.constexpr, PIVOTS: tl.constexpr
):
    """Return for each pivot the weight (or the number) of the tokens that are not before it in the order."""
    measures = tl.zeros([PIVOTS], tl.float64)
    start = tl.full([], 0, tl.int32)
    while start < length:
        places = start + tl.arange(0, LOOK)
        mask = places < length
        logits = tl.load(logits_ptr + places, mask=mask, other=-float("inf"))
        weights = tl.where(by_count, 1.0, tl.exp(-distances_of(logits, peak, temperature)))
        reached = mask[None, :] & (order_of(logits).to(tl.int64)[None, :] >= pivots[:, None])
        measures += tl.sum(tl.where(reached, weights[None, :], 0.0), axis=1)
        start += LOOK
    return measures


@triton.jit
def drawn_of_kept(
    logits_ptr,
    length,
    lowest,
    peak,
    temperature,
    top_k,
    top_p,
    min_p,
    number,
    mass,
    LOOK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Return the place among the logits of the token that a number draws from what the rules keep.

    What is kept is a prefix of the falling order: all tokens behind place `last` of the order, and the first
    `ties` at it. Each phase looks for the last place from which on tokens measure enough: for top-k by their
    number, for top-p and for the token itself by their weight.

    Parameters
    ----------
    logits_ptr, length : logits of the candidates or of the row, by rising id.
    lowest : a place of the order from which on all candidates are.
    """
    last = lowest
    ties = length.to(tl.float64)
    top = order_of(peak).to(tl.int64)
    if min_p > 0.0:
        end = top
        while last < end:
            middle = (last + end) >> 1
            if _weight_of(middle, peak, temperature) >= min_p:
                end = middle
            else:
                last = middle + 1
    renormalises = (min_p > 0.0) | (top_k > 0)
    pivots = tl.arange(0, PIVOTS)
    drawn = tl.full([], 0, tl.int64)
    tie = tl.full([], 0.0, tl.float64)
    for phase in range(3):
        by_count, exceeds = phase == 0, phase == 2
        if ((phase == 0) & (top_k > 0)) | ((phase == 1) & (top_p < 1.0)) | (phase == 2):
            target = top_k.to(tl.float64)
            if phase > 0:
                # All that is kept, then all behind its last place.
                weights = _measure(logits_ptr, length, last + pivots, False, peak, temperature, LOOK, PIVOTS)
                all_ties, behind_ties = _at(weights, pivots, 0), _at(weights, pivots, 1)
                kept = tl.minimum(all_ties, behind_ties + ties * _weight_of(last, peak, temperature))
                whole = tl.where((phase == 1) & (not renormalises), mass, kept)
                target = tl.where(phase == 1, top_p, number) * whole
            place, end = lowest, top + 1
            behind = tl.full([], 0.0, tl.float64)
            while end - place > 1:
                step = (end - place + PIVOTS) // (PIVOTS + 1)
                at = place + (pivots + 1) * step
                measures = _measure(logits_ptr, length, at, by_count, peak, temperature, LOOK, PIVOTS)
                suffices = (measures > target) | ((measures == target) & (not exceeds))
                num_suffice = tl.sum((suffices & (at < end)).to(tl.int32), axis=0)
                place += num_suffice * step
                if place + step < end:
                    end = place + step
                    behind = _at(measures, pivots, num_suffice)
            each = tl.where(by_count, 1.0, _weight_of(place, peak, temperature))
            missing = (target - behind) / each
            if phase < 2:
                needed = tl.maximum(tl.ceil(missing), 1.0)
                kept_ties = tl.where(place == last, tl.minimum(ties, needed), ties)
                ties = tl.where(place > last, needed, kept_ties)
                last = tl.maximum(last, place)
            else:
                drawn = tl.maximum(place, last)  # before it only by rounding
                tie = tl.where(place < last, ties, tl.floor(missing))
                tie = tl.where(drawn == last, tl.minimum(tie, ties - 1.0), tie)
    return _place_of_tie(logits_ptr, length, drawn, tie, LOOK)


@triton.jit
def _place_of_tie(logits_ptr, length, order, tie, LOOK: tl.constexpr):
    """Return the place of a token among equals, counted from 0; of the last where they are fewer."""
    num_before = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < length:
        places = start + tl.arange(0, LOOK)
        logits = tl.load(logits_ptr + places, mask=places < length, other=-float("inf"))
        equals = (places < length) & (order_of(logits).to(tl.int64) == order)
        ranks = num_before + tl.cumsum(equals.to(tl.int32), axis=0) - 1
        chosen = tl.where(equals & (ranks.to(tl.float64) <= tie), places, 0)
        found = tl.maximum(found, tl.max(chosen, axis=0))
        num_before += tl.sum(equals.to(tl.int32), axis=0)
        start += LOOK
    return found
