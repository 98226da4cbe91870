"""The input of a pass that makes drafts, over the target's block tables.

Legend: T tokens of the pass, R rows.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.attention.base import AttentionBatch, IntArray
from onbeat.engine.input_batch import InputBatch, StepInputs

_NOTHING: IntArray = np.zeros(0, np.int64)


def chunk_inputs(
    batch: InputBatch, slots_R: IntArray, starts_R: IntArray, ends_R: IntArray, samples_R: NDArray[np.bool_]
) -> StepInputs:
    """Return the input that runs known tokens.

    Parameters
    ----------
    batch : has the tokens and the block tables.
    slots_R : request slots, one a row.
    starts_R, ends_R : positions of each row's first token, and behind its last; not empty.
    samples_R : whether the logits behind the row's last token are wanted.
    """
    lens_R = ends_R - starts_R
    last_R = np.cumsum(lens_R)
    slots_T = np.repeat(slots_R, lens_R)
    positions_T = np.arange(len(slots_T)) + np.repeat(starts_R - (last_R - lens_R), lens_R)
    token_ids_T = batch.token_ids_SP[slots_T, positions_T].astype(np.int64)
    return _inputs(
        token_ids_T,
        positions_T,
        _attention(batch, slots_R, ends_R, lens_R, (slots_T, positions_T)),
        last_R[samples_R] - 1,
    )


def decode_inputs(
    batch: InputBatch, slots_R: IntArray, positions_R: IntArray, token_ids_R: IntArray
) -> StepInputs:
    """Return the input that runs one draft of each row, whose logits are wanted."""
    ones_R = np.ones(len(slots_R), np.int64)
    attention = _attention(batch, slots_R, positions_R + 1, ones_R, (slots_R, positions_R))
    return _inputs(token_ids_R, positions_R, attention, np.arange(len(slots_R)))


def _attention(
    batch: InputBatch,
    slots_R: IntArray,
    ends_R: IntArray,
    lens_R: IntArray,
    places_T: tuple[IntArray, IntArray],
) -> AttentionBatch:
    """Return rows that see everything up to their ends; `places_T` is each token's slot and position."""
    slots_T, positions_T = places_T
    size = batch.block_size
    blocks_T = batch.block_tables_SB[slots_T, positions_T // size].astype(np.int64)
    return AttentionBatch(
        query_lens_R=lens_R,
        context_lens_R=ends_R,
        slots_R=slots_R,
        block_tables_SB=batch.block_tables_SB,
        slot_mapping_T=blocks_T * size + positions_T % size,
    )


def _inputs(
    token_ids_T: IntArray, positions_T: IntArray, attention: AttentionBatch, sampling_tokens: IntArray
) -> StepInputs:
    return StepInputs(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        attention=attention,
        sampling_tokens=sampling_tokens,
        sampling_rows=[],  # who samples is not the forward pass's matter
        sampling_request_ids=[],
        sampling_slots=_NOTHING,
        sampling_positions=_NOTHING,
    )
