"""Choosing tokens in Triton: the largest logit of a row, and the draw of `onbeat.engine.draw` on the device.

A draw takes three launches, whatever the rows ask for. The first cuts rows into pieces and sums weights:
those of neighbours, for rows that nothing cuts; and those within some distances of the peak, in units of the
temperature. The tokens within a distance are a prefix of the falling order. The smallest distance whose
tokens certainly include all that min-p, top-k and top-p keep gives the candidates. The second launch writes
them side by side. The third works on one row a program and sorts nothing: a prefix of the falling order ends
at some logit, which is found by narrowing down a range, and so is the token that is drawn. Equal logits are
told apart by their ids. Where there are too many candidates to write, the same lines look at the whole row.

Legend: R rows, V vocabulary, P pieces, B blocks of neighbours, E depths, C candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onbeat.engine.cuda.triton_order import (
    distances_of,
    drawn_in_order_of_ids,
    drawn_of_kept,
    logit_of,
    order_of,
)
from onbeat.engine.torch.kernels import BestBuffers, DrawParams

_PIECE = 4096
"""Logits of a row that a program of the first launches sees."""
_NEIGHBOURS = 256
"""Weights summed together for rows that nothing cuts, as `sampler` does."""
_DEPTHS = 6
"""Distances from the peak at which candidates are looked for, and one that includes all weights."""
_MOST_CANDIDATES = 8192
"""Of a row; where there are more, the row itself is looked at."""
_LOOK = 1024
"""Logits compared at once where a range is narrowed down."""
_PIVOTS = 16
"""With so many places of the order at once: 8 rounds find one of 2**32."""


def best(logits_RV: Tensor, out: BestBuffers) -> None:
    """Find each row's most likely token; see `Kernels.best`."""
    num_rows, vocab_size = logits_RV.shape
    pieces = triton.cdiv(vocab_size, _PIECE)
    best_RP = logits_RV.new_empty(num_rows, pieces, dtype=torch.int64)
    _best_of_pieces[(num_rows, pieces)](
        logits_RV, best_RP, VOCAB=vocab_size, PIECES=pieces, BLOCK=_PIECE, num_warps=4
    )
    _best_of_rows[(num_rows,)](
        best_RP, out.ids_R, out.peaks_R, PIECES=pieces, BLOCK=triton.next_power_of_2(pieces), num_warps=1
    )


def draw(
    logits_RV: Tensor,
    params: DrawParams,
    best: BestBuffers,
    ids_R: Tensor,
    *,
    most_candidates: int = _MOST_CANDIDATES,
) -> None:
    """Choose each row's token; see `Kernels.draw`."""
    num_rows, vocab_size = logits_RV.shape
    pieces = triton.cdiv(vocab_size, _PIECE)
    num_blocks = pieces * (_PIECE // _NEIGHBOURS)
    block_sums_RB = logits_RV.new_empty(num_rows, num_blocks, dtype=torch.float64)
    # Of each piece: weights and numbers of all tokens, and of those within each distance
    sums_RPE = logits_RV.new_empty(num_rows, pieces, _DEPTHS, dtype=torch.float64)
    counts_RPE = logits_RV.new_empty(num_rows, pieces, _DEPTHS, dtype=torch.int32)
    # By rising id
    candidates_RC = logits_RV.new_empty(num_rows, most_candidates)
    candidate_ids_RC = logits_RV.new_empty(num_rows, most_candidates, dtype=torch.int32)
    sizes = {"VOCAB": vocab_size, "PIECE": _PIECE, "PIECES": pieces, "DEPTHS": _DEPTHS}
    _sum_pieces[(num_rows, pieces)](
        logits_RV,
        best.peaks_R,
        params.temperatures_R,
        block_sums_RB,
        sums_RPE,
        counts_RPE,
        **sizes,
        NEIGHBOURS=_NEIGHBOURS,
        num_warps=8,
    )
    sizes |= {"PIECES_BLOCK": triton.next_power_of_2(pieces), "MOST_CANDIDATES": most_candidates}
    _collect[(num_rows, pieces)](
        logits_RV,
        best.peaks_R,
        *params[:-1],
        sums_RPE,
        counts_RPE,
        candidates_RC,
        candidate_ids_RC,
        **sizes,
        num_warps=8,
    )
    _draw_rows[(num_rows,)](
        logits_RV,
        best.ids_R,
        best.peaks_R,
        *params,
        block_sums_RB,
        sums_RPE,
        counts_RPE,
        candidates_RC,
        candidate_ids_RC,
        ids_R,
        **sizes,
        NEIGHBOURS=_NEIGHBOURS,
        BLOCKS_BLOCK=triton.next_power_of_2(num_blocks),
        LOOK=_LOOK,
        PIVOTS=_PIVOTS,
        num_warps=16,
    )


@triton.jit
def _distance_of(depth):
    """Return a depth's distance from the peak in units of the temperature: 1, 2, 4, 8, 16; 0: any."""
    distance = tl.exp2((depth - 1) * tl.full([], 1.0, tl.float32))
    return tl.where(depth == 0, 1e300, distance.to(tl.float64))


@triton.jit
def _best_of_pieces(logits_ptr, best_ptr, VOCAB: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = piece * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * VOCAB + ids, mask=ids < VOCAB, other=-float("inf"))
    # The lowest id of equals is the largest of the pairs, where the id counts down.
    pairs = (order_of(logits).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    tl.store(best_ptr + row * PIECES + piece, tl.max(pairs, axis=0))


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "peaks_ptr"])
def _best_of_rows(best_ptr, ids_ptr, peaks_ptr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, BLOCK)
    least: tl.constexpr = -(2**63)
    pair = tl.max(tl.load(best_ptr + row * PIECES + pieces, mask=pieces < PIECES, other=least), axis=0)
    tl.store(ids_ptr + row, 0x7FFFFFFF - (pair & 0x7FFFFFFF).to(tl.int32))
    tl.store(peaks_ptr + row, logit_of((pair >> 32).to(tl.int32)))


@triton.jit(do_not_specialize_on_alignment=["peaks_ptr", "temperatures_ptr"])
def _sum_pieces(
    logits_ptr,
    peaks_ptr,
    temperatures_ptr,
    block_sums_ptr,
    sums_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0.0:
        blocks = tl.arange(0, PIECE // NEIGHBOURS)
        ids = piece * PIECE + blocks[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
        logits = tl.load(logits_ptr + row * VOCAB + ids, mask=ids < VOCAB, other=-float("inf"))
        distances = distances_of(logits, tl.load(peaks_ptr + row), temperature)
        weights = tl.exp(-distances)
        place = row * PIECES + piece
        tl.store(block_sums_ptr + place * (PIECE // NEIGHBOURS) + blocks, tl.sum(weights, axis=1))
        for depth in range(DEPTHS):
            within = distances <= _distance_of(depth)
            tl.store(sums_ptr + place * DEPTHS + depth, tl.sum(tl.where(within, weights, 0.0)))
            tl.store(counts_ptr + place * DEPTHS + depth, tl.sum(within.to(tl.int32)))


@triton.jit
def _candidates_of(
    sums_ptr,
    counts_ptr,
    top_k,
    top_p,
    min_p,
    PIECES: tl.constexpr,
    PIECES_BLOCK: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """Choose the candidates of a row.

    Returns
    -------
    The smallest depth that includes all that the row keeps (0: none does), the number of tokens that it
    includes, and the weight of the whole row.
    """
    pieces = tl.arange(0, PIECES_BLOCK)
    mask = pieces < PIECES
    mass = tl.sum(tl.load(sums_ptr + pieces * DEPTHS, mask=mask, other=0.0), axis=0)
    chosen = tl.full([], 0, tl.int32)
    num_candidates = tl.full([], 0, tl.int32)
    for nearer in range(DEPTHS - 1):
        depth = DEPTHS - 1 - nearer
        count = tl.sum(tl.load(counts_ptr + pieces * DEPTHS + depth, mask=mask, other=0), axis=0)
        weight = tl.sum(tl.load(sums_ptr + pieces * DEPTHS + depth, mask=mask, other=0.0), axis=0)
        has_min_p = (min_p > 0.0) & (tl.exp(-_distance_of(depth)) < min_p)
        has_top_k = (top_k > 0) & (count >= top_k)
        has_top_p = (min_p <= 0.0) & (top_k <= 0) & (weight >= top_p * mass)
        if has_min_p | has_top_k | has_top_p:
            chosen = depth
            num_candidates = count
    return chosen, num_candidates, mass


@triton.jit(
    do_not_specialize_on_alignment=["peaks_ptr", "temperatures_ptr", "top_ks_ptr", "top_ps_ptr", "min_ps_ptr"]
)
def _collect(
    logits_ptr,
    peaks_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    sums_ptr,
    counts_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    DEPTHS: tl.constexpr,
    PIECES_BLOCK: tl.constexpr,
    MOST_CANDIDATES: tl.constexpr,
):
    """Write the candidates of a piece of a row behind those of the pieces before it."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, peak = tl.load(temperatures_ptr + row), tl.load(peaks_ptr + row)
    top_k, top_p = tl.minimum(tl.load(top_ks_ptr + row), VOCAB), tl.load(top_ps_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    is_cut = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if (temperature > 0.0) & is_cut & (peak - peak == 0.0):
        sums_ptr += row * (PIECES * DEPTHS)
        counts_ptr += row * (PIECES * DEPTHS)
        depth, num_candidates, _ = _candidates_of(
            sums_ptr, counts_ptr, top_k, top_p, min_p, PIECES, PIECES_BLOCK, DEPTHS
        )
        if (depth > 0) & (num_candidates <= MOST_CANDIDATES):
            before = tl.arange(0, PIECES_BLOCK)
            counts = tl.load(counts_ptr + before * DEPTHS + depth, mask=before < piece, other=0)
            ids = piece * PIECE + tl.arange(0, PIECE)
            logits = tl.load(logits_ptr + row * VOCAB + ids, mask=ids < VOCAB, other=-float("inf"))
            within = distances_of(logits, peak, temperature) <= _distance_of(depth)
            places = (
                row * MOST_CANDIDATES + tl.sum(counts, axis=0) + tl.cumsum(within.to(tl.int32), axis=0) - 1
            )
            tl.store(candidates_ptr + places, logits, mask=within)
            tl.store(candidate_ids_ptr + places, ids, mask=within)


@triton.jit(
    do_not_specialize_on_alignment=[
        "best_ids_ptr",
        "peaks_ptr",
        "temperatures_ptr",
        "top_ks_ptr",
        "top_ps_ptr",
        "min_ps_ptr",
        "numbers_ptr",
        "ids_ptr",
    ]
)
def _draw_rows(
    logits_ptr,
    best_ids_ptr,
    peaks_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    numbers_ptr,
    block_sums_ptr,
    sums_ptr,
    counts_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    ids_ptr,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    DEPTHS: tl.constexpr,
    PIECES_BLOCK: tl.constexpr,
    BLOCKS_BLOCK: tl.constexpr,
    MOST_CANDIDATES: tl.constexpr,
    LOOK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * VOCAB
    block_sums_ptr += row * (PIECES * (PIECE // NEIGHBOURS))
    sums_ptr += row * (PIECES * DEPTHS)
    counts_ptr += row * (PIECES * DEPTHS)
    candidates_ptr += row * MOST_CANDIDATES
    candidate_ids_ptr += row * MOST_CANDIDATES
    peak, temperature = tl.load(peaks_ptr + row), tl.load(temperatures_ptr + row)
    top_k, top_p = tl.minimum(tl.load(top_ks_ptr + row), VOCAB), tl.load(top_ps_ptr + row)
    min_p, number = tl.load(min_ps_ptr + row), tl.load(numbers_ptr + row)
    token = tl.load(best_ids_ptr + row)
    if (temperature > 0.0) & (peak - peak == 0.0):
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            depth, num_candidates, mass = _candidates_of(
                sums_ptr, counts_ptr, top_k, top_p, min_p, PIECES, PIECES_BLOCK, DEPTHS
            )
            lowest = tl.full([], -(2**31), tl.int64)
            length = tl.full([], VOCAB, tl.int32)
            if depth > 0:
                bound = peak.to(tl.float64) - _distance_of(depth) * temperature
                lowest = order_of(bound.to(tl.float32)).to(tl.int64) - 2  # rounding moves it by one
            is_collected = (depth > 0) & (num_candidates <= MOST_CANDIDATES)
            from_ptr = logits_ptr
            if is_collected:
                from_ptr = candidates_ptr
                length = num_candidates
            token = drawn_of_kept(
                from_ptr, length, lowest, peak, temperature, top_k, top_p, min_p, number, mass, LOOK, PIVOTS
            )
            if is_collected:
                token = tl.load(candidate_ids_ptr + token)
        else:
            token = drawn_in_order_of_ids(
                logits_ptr,
                block_sums_ptr,
                peak,
                temperature,
                number,
                VOCAB,
                PIECES * (PIECE // NEIGHBOURS),
                BLOCKS_BLOCK,
                NEIGHBOURS,
            )
        token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
    tl.store(ids_ptr + row, token)
