"""What a model keeps from step to step on the device, and what the host must remember of it.

A step's numbers travel as one piece of pinned memory, copied to the device at once. The words on the device
are the input of a captured graph, which reads them where they are: nothing is unpacked. The order of the
parts depends on their counts alone, so that both sides find them by the same rule.

Legend: S request slots (the last one is for padding), W columns of a block table, V vocabulary, T tokens of
the step, R rows that decode, N rows that sample, U changed entries of the block tables.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.engine.cuda.graphs import GraphKey, graph_sizes, verify_sizes
from onbeat.engine.cuda.stream import DeviceStream
from onbeat.engine.forward import Mark
from onbeat.engine.input_batch import AttentionBatch, IntArray
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.kernels import Int32Array
from onbeat.engine.torch.kv import allocate_kv

_RING_ENTRIES = 3
_DOUBLES = 4
_TOKEN_PARTS, _DECODE_PARTS, _SAMPLE_PARTS, _UPDATE_PARTS = 4, 2, 3, 2


class StepCounts(NamedTuple):
    """How long the parts are."""

    tokens: int
    decodes: int
    samples: int
    updates: int

    @property
    def num_words(self) -> int:
        """Of 32 bits each."""
        return (
            (2 * _DOUBLES + _SAMPLE_PARTS) * self.samples
            + _TOKEN_PARTS * self.tokens
            + _DECODE_PARTS * self.decodes
            + _UPDATE_PARTS * self.updates
        )


class StepWords(NamedTuple):
    """The parts, as NumPy's arrays or torch's tensors over the same words; int32 unless said otherwise."""

    temperatures_N: Any
    """float64, as are the next three; see `DrawParams`."""
    top_ps_N: Any
    min_ps_N: Any
    numbers_N: Any
    ids_T: Any
    """Token ids; `UNKNOWN_TOKEN` where it is the one that was last chosen for the token's slot."""
    positions_T: Any
    kv_slots_T: Any
    token_slots_T: Any
    """Request slot of each token."""
    lens_R: Any
    """Tokens that each decoding row sees."""
    slots_R: Any
    """Request slot of each decoding row, the line of the block tables."""
    sampled_N: Any
    """Token that each sampling row samples behind."""
    write_slots_N: Any
    """Request slot that the chosen token is for; the padding slot where nobody will read it."""
    top_ks_N: Any
    update_places_U: Any
    """Place in the flat block tables."""
    update_blocks_U: Any
    """What is to be there."""


def step_words(words: Int32Array | Tensor, counts: StepCounts) -> StepWords:
    """Return the parts, in host memory or on the device."""
    double: Any = torch.float64 if isinstance(words, Tensor) else np.float64
    parts: list[Any] = []
    start = 2 * _DOUBLES * counts.samples
    doubles = words[:start].view(double)
    parts += [doubles[part * counts.samples : (part + 1) * counts.samples] for part in range(_DOUBLES)]
    for length, num_parts in (
        (counts.tokens, _TOKEN_PARTS),
        (counts.decodes, _DECODE_PARTS),
        (counts.samples, _SAMPLE_PARTS),
        (counts.updates, _UPDATE_PARTS),
    ):
        for _ in range(num_parts):
            parts.append(words[start : start + length])
            start += length
    return StepWords(*parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """Sizes that a forward pass is made for."""

    num_blocks: int
    """KV blocks, ids 0 to `num_blocks` - 1; there is one more, for padding."""
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    has_fp8_kv: bool = False
    piece_sizes: tuple[int, ...] = ()
    """Tokens, rising: steps with prompts are padded to these and replayed in pieces; see `Pieces`."""
    verify_widths: tuple[int, ...] = ()
    """Tokens, at least 2: steps that have just so many of each row are replayed as decodes are."""

    @property
    def graph_keys(self) -> tuple[GraphKey, ...]:
        """What is captured of whole steps: by width, and by rising rows of each."""
        verifies = (
            GraphKey(size, width=width)
            for width in self.verify_widths
            for size in verify_sizes(self.max_num_seqs, self.max_num_batched_tokens, width)
        )
        return (*map(GraphKey, graph_sizes(self.max_num_seqs)), *verifies)

    @property
    def max_row_blocks(self) -> int:
        """Columns of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def padding_slot(self) -> int:
        """The request slot of rows that only fill a graph."""
        return self.max_num_seqs

    @property
    def padding_block(self) -> int:
        """The KV block of such rows."""
        return self.num_blocks

    @property
    def padding_kv_slot(self) -> int:
        """The place of such a row's keys and values."""
        return self.padding_block * self.block_size


class DeviceState:
    """KV cache, block tables, and each slot's last token.

    Parameters
    ----------
    spec : of the KV cache.
    options : sizes.
    device : where all of it lies.
    """

    def __init__(self, spec: KVCacheSpec, options: CudaOptions, device: torch.device) -> None:
        num_slots = options.max_num_seqs + 1
        self.kv = allocate_kv(spec, options.num_blocks + 1, device)
        self.tables_SW = torch.full(
            (num_slots, options.max_row_blocks), options.padding_block, dtype=torch.int32, device=device
        )
        self.tokens_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """What was last chosen for each slot; 0 where the row failed."""


class TableMirror:
    """How much of the block tables the device has once all queued work is done.

    A request's table only grows at its end, so that a step brings what was added, and a slot's whole table
    where the request in it is another one.
    """

    def __init__(self, options: CudaOptions) -> None:
        self._block_size, self._num_columns = options.block_size, options.max_row_blocks
        self._admissions_S = np.zeros(options.max_num_seqs, np.int64)
        self._num_known_S = np.zeros(options.max_num_seqs, np.int64)
        """Columns that the device has of the request of that admission."""
        self.padding_place = (options.max_num_seqs + 1) * self._num_columns - 1
        """A place whose entry is never another than `CudaOptions.padding_block`."""

    def forget(self) -> None:
        """Take nothing for known."""
        self._num_known_S[:] = 0

    def changes(self, batch: AttentionBatch) -> tuple[IntArray, Int32Array]:
        """Return what the device must learn before the rows can run; it counts as learnt.

        Returns
        -------
        Places in the flat tables, and the blocks that are to be there.
        """
        assert batch.admissions_S is not None, "whose the tables are decides what is known of them"
        slots_R = batch.slots_R
        admissions_R = batch.admissions_S[slots_R]
        is_same_R = self._admissions_S[slots_R] == admissions_R
        starts_R = self._num_known_S[slots_R] * is_same_R
        ends_R = -(-batch.context_lens_R // self._block_size)
        grown = np.flatnonzero(ends_R > starts_R)  # all that are not the same, for a row has a block
        slots, starts, ends = slots_R[grown], starts_R[grown], ends_R[grown]
        self._admissions_S[slots], self._num_known_S[slots] = admissions_R[grown], ends
        lens = ends - starts
        columns = np.arange(lens.sum()) + np.repeat(ends - np.cumsum(lens), lens)
        slots = np.repeat(slots, lens)
        return slots * self._num_columns + columns, batch.block_tables_SB[slots, columns]


class EntryViews(NamedTuple):
    """Host memory of one step, by name."""

    counts: StepCounts
    words: Tensor
    """int32 [words]."""
    parts: StepWords
    """`words`, as NumPy's arrays."""
    results: Tensor
    """int32 [2 N]."""
    ids_N: Int32Array
    """`results`, by name."""
    peaks_N: NDArray[np.float32]


@dataclass(slots=True)
class RingEntry:
    """Host memory of one step."""

    stream: DeviceStream
    words: Tensor
    """int32, pinned: what the device reads."""
    results: Tensor
    """int32, pinned: what it writes."""
    mark: Mark | None = field(default=None)
    """Behind the step that used it last."""

    rows: list[SamplingRow] | None = field(default=None)
    """`StepInputs.sampling_rows` of the decodes whose slots and settings are in it; None: others are."""
    is_random: bool = field(default=False)
    """Whether tokens of these are drawn."""
    _last: EntryViews | None = field(default=None)
    """Of the step that used it last: most steps are like the one before, and to cut memory takes its time."""

    def views(self, counts: StepCounts) -> EntryViews:
        """Return the memory as a step uses it; there is room for an uncommonly large one, too."""
        if self._last is not None and self._last.counts == counts:
            return self._last
        num_words, num_results = counts.num_words, 2 * counts.samples
        if len(self.words) < num_words:
            self.words = self.stream.pinned(num_words)
        if len(self.results) < num_results:
            self.results = self.stream.pinned(num_results)
        words, results = self.words[:num_words], self.results[:num_results]
        read = results.numpy()
        self._last = EntryViews(
            counts,
            words,
            step_words(words.numpy(), counts),
            results,
            read[: counts.samples],
            read[counts.samples :].view(np.float32),
        )
        return self._last


class HostRing:
    """Host memory for the steps in flight, in turns: one more than there may be at once."""

    def __init__(self, stream: DeviceStream, num_words: int, num_results: int) -> None:
        self._entries = [
            RingEntry(stream, stream.pinned(num_words), stream.pinned(num_results))
            for _ in range(_RING_ENTRIES)
        ]
        self._next = 0

    def take(self) -> RingEntry:
        """Return the entry for the next step."""
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        assert entry.mark is None or entry.mark.is_passed(), (
            "the device may still read what this would change"
        )
        return entry
