"""The requests that a model runner holds, as arrays, and the model's input made from them.

Legend: T tokens of the step, R rows, S request slots, P positions, B blocks of a table.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from operator import is_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.step import AdmittedRequest, KeptState, NewPages, ScheduledRequest
from onbeat.engine.pooling import PooledPrompt, PooledTokens
from onbeat.engine.sampled import SampledTokens
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.state_ends import StateEnds

IntArray = NDArray[np.int64]
BlockTable = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step, in host memory. Tokens are packed row after row."""

    query_lens_R: IntArray
    """New tokens of each row, at least 1."""
    context_lens_R: IntArray
    """Tokens that the row's last new token sees, itself included."""
    slots_R: IntArray
    """Each row's line of `block_tables_SB`."""
    block_tables_SB: BlockTable
    """Where requests have several tables: the lines of the first ones, then as many of the second."""
    slot_mapping_T: IntArray
    """Where each token's KV goes: block id * block size + offset; [tables, T] where there are several."""
    admissions_S: IntArray | None = None
    """Whose line of `block_tables_SB` it is. As long as a line's number stays, blocks are only added at its
    end. None where nobody asks: only devices remember tables."""
    kept: tuple[tuple[int, int, int], ...] = ()
    """States to be kept: row, after how many of its tokens of the step, and in which slot of states."""
    pending_R: IntArray | None = None
    """Tokens before a row's own that its state has yet to take in: they were drafts. None: none has any."""
    untaken_R: IntArray | None = None
    """Of these and its own, the last ones that it must not take in yet: drafts, which may be rejected."""


UNKNOWN_TOKEN = -1
"""Stands for a token that a step under way will have chosen: the last one of a request."""
ADMISSIONS = count()
"""Number of the next one, in whichever batch."""


def _nothing() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's input in host memory, tokens packed row after row; unless it is said, nothing is sampled."""

    token_ids_T: IntArray
    positions_T: IntArray
    attention: AttentionBatch
    sampling_tokens: IntArray = field(default_factory=_nothing)
    """Index into the packed tokens of each token whose logits are wanted: each sampling row's last one. With
    drafts, wave after wave: each row's last token before its drafts, then each first draft, and so on. Behind
    them those after which a prompt has a token that is scored (`PromptScorer`)."""
    sampling_rows: list[SamplingRow] = field(default_factory=list)
    """The same list as that of an earlier step where the step has the same rows, in the same slots."""
    sampling_request_ids: list[str] = field(default_factory=list)
    sampling_slots: IntArray = field(default_factory=_nothing)
    sampling_positions: IntArray = field(default_factory=_nothing)
    """Position that each row's sampled token, or the first of them, will have."""
    waves: tuple[IntArray, IntArray] | None = None
    """Of each token that is sampled, wave and sampling row (`wave_order`); None: one of each row."""
    pooled: tuple[PooledTokens, ...] = ()
    """The rows whose hidden states are pooled."""
    pooled_tokens: IntArray = field(default_factory=_nothing)
    """Index into the packed tokens of each token whose hidden state is wanted, row by row of `pooled`."""


class _Rows(NamedTuple):
    """What depends on who is in a step, and with how many tokens: steps of decodes have it in common."""

    key: tuple[tuple[str, ...], tuple[int, ...], tuple[bool, ...]]
    """Request, new tokens, and whether it samples, of each row."""
    slots_R: IntArray
    query_lens_R: IntArray
    ends_R: IntArray
    """In the packed tokens."""
    slots_T: IntArray
    places_T: IntArray
    """Of each token in its row."""
    samples_R: NDArray[np.bool_]
    sampling_rows: list[SamplingRow]
    sampling_request_ids: list[str]


class InputBatch:
    """Token ids and block tables of every live request, one slot each.

    Nothing here grows with the context of a request: a step gathers its input by index.

    Parameters
    ----------
    max_num_seqs : most requests at once.
    max_model_len : most tokens of one request.
    block_size : tokens of a KV block.
    tables : block tables of a request, and the blocks that there are for each of them.
    num_states : slots of states, the requests' first, of a model that keeps states.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        tables: tuple[int, int] = (1, 0),
        num_states: int = 0,
    ) -> None:
        self.block_size, (self._num_tables, num_blocks) = block_size, tables
        self._first_ids: BlockTable = num_blocks * np.arange(self._num_tables, dtype=np.int32)[:, None]
        # One position more than is ever run: the last sampled token.
        self.token_ids_SP: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        shape = self._num_tables * max_num_seqs, -(-max_model_len // block_size)
        self.block_tables_SB: BlockTable = np.zeros(shape, np.int32)
        self.num_blocks_S: IntArray = np.zeros(max_num_seqs, np.int64)
        self.num_tokens_S: IntArray = np.zeros(max_num_seqs, np.int64)
        """Known tokens: drafts lie behind them."""
        self.sampling_rows: dict[int, SamplingRow] = {}
        self.max_num_seqs = max_num_seqs
        self.pooled: dict[str, PooledPrompt] = {}
        """Requests with pooling, by id."""
        self.num_guided = 0
        """Requests under a grammar."""
        self.slots: dict[str, int] = {}
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.admissions_S: IntArray = np.zeros(max_num_seqs, np.int64)
        """Number of the admission of the request that is in the slot, or was last; no other has the same."""
        self.states = StateEnds(num_states)
        self._last_rows: _Rows | None = None
        """Of the last step, where each of its requests is still in its slot."""

    def admit(self, admitted: AdmittedRequest) -> int:
        """Take in a request: its tokens so far and its block table. Return its slot."""
        request = admitted.request
        assert request.request_id not in self.slots, f"request {request.request_id} is already running"
        slot = self.free_slots.pop()
        self.slots[request.request_id] = slot
        self.admissions_S[slot] = next(ADMISSIONS)
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + len(admitted.output_token_ids)
        self.token_ids_SP[slot, :num_prompt_tokens] = request.prompt_token_ids
        self.token_ids_SP[slot, num_prompt_tokens:num_tokens] = admitted.output_token_ids
        self.num_tokens_S[slot] = num_tokens
        self.num_blocks_S[slot] = 0
        snapshot = admitted.snapshot
        self.states.begin(slot, None if snapshot is None else self.max_num_seqs + snapshot)
        self._append_blocks(slot, admitted.block_ids)
        if request.pooling is not None:
            self.pooled[request.request_id] = PooledPrompt(request.pooling, num_prompt_tokens)
        row = SamplingRow(request.sampling, request.prompt_token_ids, list(admitted.output_token_ids))
        self.sampling_rows[slot] = row
        self.num_guided += row.is_guided
        return slot

    def release(self, request_id: str) -> int:
        """Forget a request and return the slot it had."""
        slot = self.slots.pop(request_id)
        self._last_rows = None
        self.pooled.pop(request_id, None)
        self.num_guided -= self.sampling_rows.pop(slot).is_guided
        self.free_slots.append(slot)
        return slot

    def take_blocks(self, rows: Sequence[ScheduledRequest]) -> None:
        """Append the rows' new blocks to the tables; comes before `prepare`."""
        for row in rows:
            if row.new_block_ids:
                self._append_blocks(self.slots[row.request_id], row.new_block_ids)

    def take_pages(self, new_pages: Iterable[NewPages]) -> None:
        """Put blocks of layers with windows into the tables of who is here; after `take_blocks`."""
        for request_id, num_passed, first, page_ids in new_pages:
            if (slot := self.slots.get(request_id)) is not None:
                pages = np.array(page_ids, np.int32).reshape(-1, self._num_tables - 1).T
                lines = self.block_tables_SB[self.max_num_seqs + slot :: self.max_num_seqs]
                lines[:, first : first + pages.shape[1]] = pages
                # Where no window reaches, its own: what is read for nothing must be finite.
                lines[:, :num_passed] = lines[:, num_passed : num_passed + 1]

    def prepare(
        self,
        rows: Sequence[ScheduledRequest],
        drafts: Sequence[Sequence[int]] | None = None,
        kept_states: Sequence[KeptState] = (),
    ) -> StepInputs:
        """Gather the step's input.

        Parameters
        ----------
        drafts : of each row, as many as were planned or fewer. A sampling row then starts where its known
            tokens say: it may have been planned as if drafts before it were all accepted. Empty: none were
            planned for any row. None: rows are as planned.
        kept_states : those of the step; they lie behind the states of the requests in their slots.
        """
        request_ids, starts, lens, _, samples, planned = zip(*rows, strict=True)
        starts_R = np.array(starts, np.int64)
        if drafts:
            pairs = zip(lens, planned, drafts, strict=True)
            lens = tuple(num_new - num_planned + len(ids) for num_new, num_planned, ids in pairs)
        step = self._rows(request_ids, lens, samples)
        sampling_slots, sampling_tokens = step.slots_R[step.samples_R], step.ends_R[step.samples_R] - 1
        waves, num_drafts_R = None, np.zeros_like(starts_R)
        if drafts is not None:
            num_drafts_R = np.array([len(ids) for ids in drafts] or planned, np.int64)
            num_tokens_R = self.num_tokens_S[step.slots_R]
            starts_R = np.where(step.samples_R, num_tokens_R + num_drafts_R - step.query_lens_R, starts_R)
            if drafts:
                self._write(step.slots_R, num_tokens_R, drafts)
                waves_N, rows_N = waves = wave_order(num_drafts_R[step.samples_R])
                sampling_tokens = (sampling_tokens - num_drafts_R[step.samples_R])[rows_N] + waves_N
        positions_T = np.repeat(starts_R, step.query_lens_R) + step.places_T
        pooled = self._pooled_tokens(rows, step.ends_R) if self.pooled else ()
        attention = self.attention(
            step.slots_R, step.query_lens_R, starts_R + step.query_lens_R, step.slots_T, positions_T
        )
        if len(self.states):
            kept = tuple([(row, num, self.max_num_seqs + snapshot) for row, num, snapshot in kept_states])
            pending_R, untaken_R = self.states.advance(
                step.slots_R, starts_R, attention.context_lens_R, num_drafts_R, kept
            )
            attention = replace(attention, kept=kept, pending_R=pending_R, untaken_R=untaken_R)
        return StepInputs(
            token_ids_T=self.token_ids_SP[step.slots_T, positions_T].astype(np.int64),
            positions_T=positions_T,
            attention=attention,
            sampling_tokens=sampling_tokens,
            sampling_rows=step.sampling_rows,
            sampling_request_ids=step.sampling_request_ids,
            sampling_slots=sampling_slots,
            sampling_positions=self.num_tokens_S[sampling_slots],
            waves=waves,
            pooled=pooled,
            pooled_tokens=np.array([token for each in pooled for token in each.tokens], np.int64),
        )

    def attention(
        self,
        slots_R: IntArray,
        query_lens_R: IntArray,
        context_lens_R: IntArray,
        slots_T: IntArray,
        positions_T: IntArray,
    ) -> AttentionBatch:
        """Return what attention must know of rows; `slots_T` and `positions_T` are where each token is."""
        columns_T, offsets_T = np.divmod(positions_T, self.block_size)
        if self._num_tables > 1:
            slots_T = slots_T + self.max_num_seqs * np.arange(self._num_tables)[:, None]
        blocks_T = self.block_tables_SB[slots_T, columns_T].astype(np.int64)
        return AttentionBatch(
            query_lens_R=query_lens_R,
            context_lens_R=context_lens_R,
            slots_R=slots_R,
            block_tables_SB=self.block_tables_SB,
            slot_mapping_T=blocks_T * self.block_size + offsets_T,
            admissions_S=self.admissions_S,
        )

    def _rows(self, request_ids: tuple[str, ...], lens: tuple[int, ...], samples: tuple[bool, ...]) -> _Rows:
        """Return what holds of rows wherever they stand; for those of the last step it is known."""
        key = request_ids, lens, samples
        if self._last_rows is not None and self._last_rows.key == key:
            return self._last_rows
        slots_R = np.array([self.slots[request_id] for request_id in request_ids], np.int64)
        lens_R, samples_R = np.array(lens, np.int64), np.array(samples, np.bool_)
        ends_R, slots_T = np.cumsum(lens_R), np.repeat(slots_R, lens_R)
        places_T = np.arange(len(slots_T)) - np.repeat(ends_R - lens_R, lens_R)
        sampling_rows = [self.sampling_rows[slot] for slot in slots_R[samples_R].tolist()]
        sampling_ids = list(compress(request_ids, samples))
        self._last_rows = _Rows(
            key, slots_R, lens_R, ends_R, slots_T, places_T, samples_R, sampling_rows, sampling_ids
        )
        return self._last_rows

    def _pooled_tokens(self, rows: Sequence[ScheduledRequest], ends_R: IntArray) -> tuple[PooledTokens, ...]:
        """Return the tokens of rows with pooling whose hidden states are wanted."""
        found = []
        for row, end in zip(rows, ends_R.tolist(), strict=True):
            prompt = self.pooled.get(row.request_id)
            if prompt is not None and not row.samples:
                wanted = prompt.tokens(row.num_computed_tokens, range(end - row.num_new_tokens, end))
                found.append(PooledTokens(row.request_id, prompt, wanted))
        return tuple(found)

    def append_unknown(self, inputs: StepInputs) -> None:
        """Count each sampling row's new token, which is not known yet; `fill` comes later."""
        self.token_ids_SP[inputs.sampling_slots, inputs.sampling_positions] = UNKNOWN_TOKEN
        self.num_tokens_S[inputs.sampling_slots] = inputs.sampling_positions + 1
        for row in inputs.sampling_rows:
            row.num_pending += 1

    def fill(self, inputs: StepInputs, sampled: SampledTokens) -> list[bool]:
        """Tell the tokens that `append_unknown` counted; return whether each row is still here.

        A slot may have been given to another request while the step ran. A failed row gets token 0.
        """
        rows, token_ids = inputs.sampling_rows, np.maximum(np.array(sampled.token_ids, np.int64), 0)
        for row, token_id in zip(rows, token_ids.tolist(), strict=True):
            row.output_token_ids.append(token_id)
            row.num_pending -= 1
        is_here = list(map(is_, map(self.sampling_rows.get, inputs.sampling_slots.tolist()), rows))
        here = np.array(is_here, np.bool_)
        self.token_ids_SP[inputs.sampling_slots[here], inputs.sampling_positions[here]] = token_ids[here]
        return is_here

    def append_verified(self, inputs: StepInputs, token_ids: Sequence[Sequence[int]]) -> None:
        """Add tokens to the request of each sampling row, whose `output_token_ids` has them already."""
        self._write(inputs.sampling_slots, inputs.sampling_positions, token_ids)
        self.num_tokens_S[inputs.sampling_slots] = inputs.sampling_positions + [len(ids) for ids in token_ids]

    def block_ids(self, slot: int) -> IntArray:
        """Return the blocks of all tables of a request."""
        lines = self.block_tables_SB[slot :: self.max_num_seqs, : self.num_blocks_S[slot]]
        return lines.astype(np.int64).ravel()

    def _write(self, slots_R: IntArray, positions_R: IntArray, token_ids: Sequence[Sequence[int]]) -> None:
        """Put each row's tokens in its slot, from a position on."""
        lens_R = np.array([len(ids) for ids in token_ids], np.int64)
        if not lens_R.any():
            return
        offsets = np.arange(lens_R.sum()) - np.repeat(np.cumsum(lens_R) - lens_R, lens_R)
        positions = np.repeat(positions_R, lens_R) + offsets
        self.token_ids_SP[np.repeat(slots_R, lens_R), positions] = list(chain.from_iterable(token_ids))

    def _append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        start = self.num_blocks_S[slot]
        end = start + len(block_ids)
        # Of tables beyond the first, what a measurement uses: a scheduler says which blocks they have.
        self.block_tables_SB[slot :: self.max_num_seqs, start:end] = self._first_ids + np.array(block_ids)
        self.num_blocks_S[slot] = end


def wave_order(num_drafts_R: IntArray) -> tuple[IntArray, IntArray]:
    """Return the wave and the row of each token that is sampled, wave after wave.

    Wave 0 holds one token of each row; wave j the token behind its j-th draft, of the rows that have one.
    """
    waves = np.arange(num_drafts_R.max(initial=0) + 1)
    places, rows = np.nonzero(waves[:, None] <= num_drafts_R)
    return places.astype(np.int64, copy=False), rows.astype(np.int64, copy=False)
