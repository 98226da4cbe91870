"""The host's part of a step: from the runner's arrays to the words that the device reads.

Legend: T tokens of the step, R rows, N rows that sample, U changed entries of the block tables, S request
slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.engine.cuda import state
from onbeat.engine.cuda.graphs import PIECE_SIZES, GraphKey
from onbeat.engine.input_batch import AttentionBatch, IntArray, StepInputs
from onbeat.engine.random_stream import uniforms
from onbeat.engine.sampled import BestTokens
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.kernels import ChunkRows, DrawParams, Int32Array


class SlotSettings:
    """What is known of the rows in the slots; a row that is new to its slot is looked at once.

    Parameters
    ----------
    num_slots : request slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._rows: list[SamplingRow | None] = [None] * num_slots
        self._temperatures_S = np.zeros(num_slots)
        self._top_ks_S = np.zeros(num_slots, np.int32)
        self._top_ps_S = np.ones(num_slots)
        self._min_ps_S = np.zeros(num_slots)
        self._stream_starts_S = np.zeros(num_slots, np.uint64)
        self._num_prompt_tokens_S = np.zeros(num_slots, np.int64)

    def write(
        self, inputs: StepInputs, parts: state.StepWords, places: IntArray, drawn_N: NDArray[np.bool_]
    ) -> bool:
        """Write how the step's tokens are chosen; return whether any of them is random.

        Parameters
        ----------
        parts : what the device reads; of tokens that are not in `places`, nothing is drawn.
        places : where each token that is sampled is among those of `parts`.
        drawn_N : of these, which are drawn if their row is random; the others are the most likely ones.
        """
        slots_N, positions_N = inputs.sampling_slots, inputs.sampling_positions
        known = self._rows
        for slot, row in zip(slots_N.tolist(), inputs.sampling_rows, strict=True):
            if known[slot] is not row:
                self._learn(slot, row)
        if inputs.waves is not None:
            waves_N, rows_N = inputs.waves
            slots_N, positions_N = slots_N[rows_N], positions_N[rows_N] + waves_N
        temperatures_N = self._temperatures_S[slots_N] * drawn_N
        if not temperatures_N.any():
            return False
        for part, nothing, wanted_N in (
            (parts.temperatures_N, 0.0, temperatures_N),
            (parts.top_ks_N, 0, self._top_ks_S[slots_N]),
            (parts.top_ps_N, 1.0, self._top_ps_S[slots_N]),
            (parts.min_ps_N, 0.0, self._min_ps_S[slots_N]),
        ):
            part[:] = nothing
            part[places] = wanted_N
        parts.numbers_N[:] = 0.0
        self.write_numbers(parts, places, slots_N, positions_N)
        return True

    def write_numbers(
        self, parts: state.StepWords, places: IntArray, slots_N: IntArray, positions_N: IntArray
    ) -> None:
        """Write the numbers that tokens are drawn by: all that changes from step to step of the same rows."""
        indices_N = positions_N - self._num_prompt_tokens_S[slots_N]
        parts.numbers_N[places] = uniforms(self._stream_starts_S[slots_N], indices_N)

    def _learn(self, slot: int, row: SamplingRow) -> None:
        params = row.params
        self._rows[slot] = row
        self._temperatures_S[slot] = 0.0 if row.is_greedy else params.temperature
        self._top_ks_S[slot] = min(params.top_k, np.iinfo(np.int32).max)
        self._top_ps_S[slot] = params.top_p
        self._min_ps_S[slot] = params.min_p
        self._stream_starts_S[slot] = row.stream_start
        self._num_prompt_tokens_S[slot] = len(row.prompt_token_ids)


def draw_params(parts: state.StepWords) -> DrawParams:
    """Return the settings as the device has them."""
    return DrawParams(
        temperatures_R=parts.temperatures_N,
        top_ks_R=parts.top_ks_N,
        top_ps_R=parts.top_ps_N,
        min_ps_R=parts.min_ps_N,
        numbers_R=parts.numbers_N,
    )


_MOST_EAGER_UPDATES = 4096
"""Changed entries of block tables that travel with a step outside of graphs; more go their own way."""

_MANY_TOKENS = PIECE_SIZES[-1]
"""Of a step from which on the device, and not the host, decides how long it takes."""
_MUCH_CONTEXT = 1 << 14
"""Tokens that a smaller step's rows of one token see. To read so many by tiles of 128 queries takes a fast
GPU some 30 us a layer more than by tiles of 16, which is about what a second call takes the host."""

ALL_DRAWN: NDArray[np.bool_] = np.ones((), np.bool_)
"""As `drawn_N` of `StepPacker.pack`: every row's token."""


class PackedStep(NamedTuple):
    """A step, ready to be queued."""

    views: state.EntryViews
    """Its memory."""
    graph: GraphKey | None
    """Of a step whose rows are alike; None for other steps."""
    sampling_tokens: IntArray
    late_updates: Tensor | None
    """int32 [2, U]: changes of the block tables that the words have no room for, places and blocks."""
    is_random: bool
    """Whether tokens are to be drawn."""
    pooled_tokens: IntArray = np.zeros(0, np.int64)
    """Where the tokens of `StepInputs.pooled_tokens` are among the step's."""
    chunks: Sequence[ChunkRows] = ()
    """Its rows, in the order of their tokens, in parts that attend one after the other; none where it has a
    graph."""

    def best_tokens(self) -> BestTokens:
        """Return what came back of each sampling row, once the step is done."""
        rows = slice(None) if self.graph is None else self.sampling_tokens
        return BestTokens(self.views.ids_N[rows].astype(np.int64), self.views.peaks_N[rows].copy())


class StepPacker:
    """Packs steps, and remembers what the device knows of the block tables.

    Parameters
    ----------
    options : sizes.
    """

    def __init__(self, options: state.CudaOptions) -> None:
        self._options = options
        self._sizes: dict[int, list[int]] = {}
        """Rows of the graphs of each width, rising."""
        for key in options.graph_keys:
            self._sizes.setdefault(key.width, []).append(key.size)
        self._mirror = state.TableMirror(options)
        self._settings = SlotSettings(options.max_num_seqs)

    def graph_counts(self, key: GraphKey) -> state.StepCounts:
        """Return the counts of a graph's words."""
        num_tokens = key.size * key.width
        return state.StepCounts(num_tokens, key.size, num_tokens, key.size)

    def padding(self, key: GraphKey) -> Int32Array:
        """Return the words of a graph's step that has no row."""
        counts = self.graph_counts(key)
        words = np.zeros(counts.num_words, np.int32)
        parts = state.step_words(words, counts)
        self._pad_rows(parts, 0, key.width)
        self._pad_updates(parts, 0)
        return words

    def pack(
        self, inputs: StepInputs, entry: state.RingEntry, drawn_N: NDArray[np.bool_] | None
    ) -> PackedStep:
        """Write a step's words into a ring entry.

        Parameters
        ----------
        drawn_N : of each token that is sampled, whether the device draws it if its row is random; None where
            it only finds the most likely ones.
        """
        if (key := self._graph_of(inputs)) is not None:
            return self._pack_alike(inputs, key, entry, drawn_N)
        return self._pack_eager(inputs, entry, drawn_N)

    def _changes(
        self, batch: AttentionBatch, most: int, entry: state.RingEntry
    ) -> tuple[IntArray, Int32Array, Tensor | None]:
        """Return changes of the block tables, places and blocks; as a tensor of their own where too many."""
        places, blocks = self._mirror.changes(batch)
        if len(places) <= most:
            return places, blocks, None
        late = entry.stream.pinned(2 * len(places)).view(2, -1)
        late[0], late[1] = torch.from_numpy(places), torch.from_numpy(blocks)
        return places[:0], blocks[:0], late

    def _graph_of(self, inputs: StepInputs) -> GraphKey | None:
        """Return what a step is replayed by: its rows are alike, and nobody asks for hidden states."""
        lens_R = inputs.attention.query_lens_R
        num_rows, width = len(lens_R), int(lens_R[0])
        sizes = self._sizes.get(width, ())
        if inputs.pooled or num_rows * width != len(inputs.token_ids_T):
            return None
        if width > 1 and not (lens_R == width).all():
            return None
        return next((GraphKey(size, width=width) for size in sizes if size >= num_rows), None)

    def _pack_alike(
        self, inputs: StepInputs, key: GraphKey, entry: state.RingEntry, drawn_N: NDArray[np.bool_] | None
    ) -> PackedStep:
        batch = inputs.attention
        num_rows = len(batch.slots_R)
        num_tokens = num_rows * key.width
        views = entry.views(self.graph_counts(key))
        parts = views.parts
        places, blocks, late = self._changes(batch, key.size, entry)
        num_updates = len(places)
        parts.ids_T[:num_tokens] = inputs.token_ids_T
        parts.positions_T[:num_tokens] = inputs.positions_T
        parts.kv_slots_T[:num_tokens] = batch.slot_mapping_T
        parts.lens_R[:num_rows] = batch.context_lens_R
        parts.update_places_U[:num_updates] = places
        parts.update_blocks_U[:num_updates] = blocks
        self._pad_updates(parts, num_updates)
        if entry.rows is not inputs.sampling_rows or drawn_N is not ALL_DRAWN:
            parts.slots_R[:num_rows] = batch.slots_R
            parts.token_slots_T[:num_tokens] = np.repeat(batch.slots_R, key.width)
            self._pad_rows(parts, num_rows, key.width)
            entry.is_random = self._choose(inputs, parts, inputs.sampling_tokens, drawn_N)
            entry.rows = inputs.sampling_rows if drawn_N is ALL_DRAWN else None
        elif entry.is_random:
            slots_N, positions_N = inputs.sampling_slots, inputs.sampling_positions
            self._settings.write_numbers(parts, inputs.sampling_tokens, slots_N, positions_N)
        return PackedStep(views, key, inputs.sampling_tokens, late, entry.is_random)

    def _pack_eager(
        self, inputs: StepInputs, entry: state.RingEntry, drawn_N: NDArray[np.bool_] | None
    ) -> PackedStep:
        batch = inputs.attention
        num_samples = len(inputs.sampling_tokens)
        places, blocks, late = self._changes(batch, _MOST_EAGER_UPDATES, entry)
        num_tokens = len(inputs.token_ids_T)
        counts = state.StepCounts(self._padded(num_tokens), 0, num_samples, len(places))
        views = entry.views(counts)
        parts = views.parts
        groups = _row_groups(batch, num_tokens)
        order_T, places_T = _token_order(batch.query_lens_R, groups)
        parts.ids_T[:num_tokens] = inputs.token_ids_T[order_T]
        parts.positions_T[:num_tokens] = inputs.positions_T[order_T]
        parts.kv_slots_T[:num_tokens] = batch.slot_mapping_T[order_T]
        parts.token_slots_T[:num_tokens] = np.repeat(batch.slots_R, batch.query_lens_R)[order_T]
        self._pad_tokens(parts, num_tokens)
        parts.sampled_N[:] = places_T[inputs.sampling_tokens]
        entry.rows, is_random = None, self._choose(inputs, parts, np.arange(num_samples), drawn_N)
        parts.update_places_U[:] = places
        parts.update_blocks_U[:] = blocks
        chunks = [ChunkRows.of(batch, self._options.block_size, rows_R) for rows_R in groups]
        pooled_tokens = places_T[inputs.pooled_tokens]
        return PackedStep(views, None, inputs.sampling_tokens, late, is_random, pooled_tokens, chunks)

    def _padded(self, num_tokens: int) -> int:
        """Return the number of tokens of a step that is no step of decodes, padding included."""
        return next((size for size in self._options.piece_sizes if size >= num_tokens), num_tokens)

    def _choose(
        self, inputs: StepInputs, parts: state.StepWords, places: IntArray, drawn_N: NDArray[np.bool_] | None
    ) -> bool:
        """Write for which slots tokens are chosen, and how; return whether any is drawn."""
        parts.write_slots_N[:] = self._options.padding_slot
        if drawn_N is None:
            return False
        if drawn_N is not ALL_DRAWN:
            places = places[: len(drawn_N)]  # tokens of prompts that are scored come behind
        if inputs.waves is None:  # else the host says which token is a row's last
            parts.write_slots_N[places] = inputs.sampling_slots
        return self._settings.write(inputs, parts, places, drawn_N)

    def forget(self) -> None:
        """Know nothing of the device's block tables any more: a step failed, and may have changed none."""
        self._mirror.forget()

    def _pad_rows(self, parts: state.StepWords, num_rows: int, width: int) -> None:
        """Fill the rest of a graph's rows: each sees its own tokens, in a block that nobody else has."""
        self._pad_tokens(parts, num_rows * width)
        parts.lens_R[num_rows:] = width
        parts.slots_R[num_rows:] = self._options.padding_slot
        parts.write_slots_N[num_rows * width :] = self._options.padding_slot

    def _pad_updates(self, parts: state.StepWords, num_updates: int) -> None:
        """Fill the rest of the changes of block tables: they change nothing."""
        parts.update_places_U[num_updates:] = self._mirror.padding_place
        parts.update_blocks_U[num_updates:] = self._options.padding_block

    def _pad_tokens(self, parts: state.StepWords, num_tokens: int) -> None:
        """Fill the rest of a step's tokens: all of them lie in one place that nobody else has."""
        options = self._options
        parts.ids_T[num_tokens:] = 0
        parts.positions_T[num_tokens:] = 0
        parts.kv_slots_T[num_tokens:] = options.padding_kv_slot
        parts.token_slots_T[num_tokens:] = options.padding_slot


def _row_groups(batch: AttentionBatch, num_tokens: int) -> list[IntArray]:
    """Return the rows that attend together: those of one token apart from chunks, where that pays.

    One call takes one width of tiles for all its rows, and a row of one token fills little of a wide one.
    """
    is_single_R = batch.query_lens_R == 1
    singles, chunks = np.flatnonzero(is_single_R), np.flatnonzero(~is_single_R)
    num_read = batch.context_lens_R[singles].sum()
    if len(singles) and len(chunks) and (num_tokens > _MANY_TOKENS or num_read >= _MUCH_CONTEXT):
        return [singles, chunks]
    return [np.arange(len(is_single_R))]


def _token_order(query_lens_R: IntArray, groups: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Return which token comes at each place if groups of rows lie one behind the other, and each's place."""
    rows_R = np.concatenate(groups)
    lens_R = query_lens_R[rows_R]
    shifts_R = (np.cumsum(query_lens_R) - query_lens_R)[rows_R] - (np.cumsum(lens_R) - lens_R)
    order_T = np.arange(lens_R.sum()) + np.repeat(shifts_R, lens_R)
    places_T = np.empty_like(order_T)
    places_T[order_T] = np.arange(len(order_T))
    return order_T, places_T
