"""Drafts by a smaller model with the same tokenizer.

It has as many KV blocks as its target and uses the target's block tables, so that nobody manages a second set
of blocks (as vLLM does it). It is never told of prompts: when drafts are asked for, it catches up with what
the request has become since.

Its KV lies in blocks of its own that have the ids of the target's. What the target's prefix cache holds is
new to it, for it may have filled such a block wholly, in part or not at all.

Passes of a model that make drafts: one token after another, all rows side by side.

The input of a pass that makes drafts, over the target's block tables.

Legend: T tokens of the pass, R rows.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onbeat.core.request import SamplingParams
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import InputBatch, IntArray, StepInputs
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.speculation.proposer import DraftRow, Proposer
from onbeat.engine.state_ends import StateEnds
from onbeat.speculative_config import MAX_CATCH_UP_TOKENS


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
    attention = batch.attention(slots_R, lens_R, ends_R, slots_T, positions_T)
    return StepInputs(token_ids_T, positions_T, attention, last_R[samples_R] - 1)


def decode_inputs(
    batch: InputBatch, slots_R: IntArray, positions_R: IntArray, token_ids_R: IntArray
) -> StepInputs:
    """Return the input that runs one draft of each row, whose logits are wanted."""
    ones_R = np.ones(len(slots_R), np.int64)
    attention = batch.attention(slots_R, ones_R, positions_R + 1, slots_R, positions_R)
    return StepInputs(token_ids_R, positions_R, attention, np.arange(len(slots_R)))


@dataclass(frozen=True, slots=True)
class GuessRow:
    """A request's share of the passes."""

    slot: int
    start: int
    """Its first tokens, whose KV the model has."""
    end: int
    """Tokens to know before the first draft; those from `start` on are run."""
    num_drafts: int
    """Drafts to make behind them; 0 only runs the tokens."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """What came of the passes, parallel to the rows."""

    drafts: list[list[int]]
    """Fewer than were asked for where the model broke off. All but a row's last have KV by now."""
    failed: list[int]
    """Rows whose logits were no numbers."""


class Guesser:
    """Lets a model guess the next tokens of requests.

    The first pass runs what each row has known for longer than the model, and ends with its first draft; each
    further one runs the rows' newest drafts, where more are wanted.

    A draft is drawn with the random number that the request will draw the token at this position with. Two
    distributions that are near one another give the same token for the same number far more often than for
    two independent ones, so a draft is accepted as often as the models agree. Penalties, biases and bans are
    left out: they change few tokens, and drafts need not be exact.

    Parameters
    ----------
    forward : the model.
    sampler : chooses tokens from its logits.
    vocab_size : tokens that the requests' own model knows.
    max_num_seqs : request slots.
    """

    def __init__(self, forward: ForwardPass, sampler: Sampler, vocab_size: int, max_num_seqs: int) -> None:
        self._forward = forward
        self._states = StateEnds(max_num_seqs)
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._sampling_rows: dict[int, SamplingRow] = {}

    def release(self, slot: int) -> None:
        """Forget a request."""
        self._sampling_rows.pop(slot, None)

    def guess(self, batch: InputBatch, rows: list[GuessRow]) -> Guesses:
        """Run the passes; their KV goes to the blocks of the requests' tables."""
        guesses = Guesses([[] for _ in rows], [])
        asking = [index for index, row in enumerate(rows) if row.num_drafts]
        slots = np.array([row.slot for row in rows], np.int64)
        inputs = chunk_inputs(
            batch,
            slots,
            np.array([row.start for row in rows], np.int64),
            np.array([row.end for row in rows], np.int64),
            np.array([row.num_drafts > 0 for row in rows], np.bool_),
        )
        going_on = self._pass(batch, rows, asking, self._with_states(inputs, are_drafts=False), guesses)
        while going_on:
            drafts = [guesses.drafts[index] for index in going_on]
            positions = [
                rows[index].end + len(draft) - 1 for index, draft in zip(going_on, drafts, strict=True)
            ]
            inputs = decode_inputs(
                batch,
                slots[going_on],
                np.array(positions, np.int64),
                np.array([draft[-1] for draft in drafts], np.int64),
            )
            going_on = self._pass(batch, rows, going_on, self._with_states(inputs, are_drafts=True), guesses)
        return guesses

    def _with_states(self, inputs: StepInputs, *, are_drafts: bool) -> StepInputs:
        """Say what states take in: neither these drafts nor those before."""
        batch = inputs.attention
        starts_R = batch.context_lens_R - batch.query_lens_R
        untaken_R = None if are_drafts else np.zeros_like(starts_R)
        pending_R, untaken_R = self._states.advance(batch.slots_R, starts_R, batch.context_lens_R, untaken_R)
        return replace(inputs, attention=replace(batch, pending_R=pending_R, untaken_R=untaken_R))

    def _pass(
        self, batch: InputBatch, rows: list[GuessRow], asking: list[int], inputs: StepInputs, guesses: Guesses
    ) -> list[int]:
        """Run one pass, add a draft to the rows that ask for one, and return those that want another."""
        _hide_unknown(inputs, self._sampler.vocab_size)
        sampling_rows = [
            self._sampling_row(batch, rows[index].slot, rows[index].end + len(guesses.drafts[index]))
            for index in asking
        ]
        inputs = replace(  # a device that draws wants to know; to it these rows have no prompts
            inputs,
            sampling_rows=sampling_rows,
            sampling_slots=np.array([rows[index].slot for index in asking], np.int64),
            sampling_positions=np.array([row.position for row in sampling_rows], np.int64),
        )
        logits = self._forward.run(inputs, wants_logits=self._sampler.needs_logits(sampling_rows))
        if not asking:
            return []
        sampled = self._sampler.sample(logits.values_RV, sampling_rows, logits.best)
        going_on = []
        for place, (index, token_id) in enumerate(zip(asking, sampled.token_ids, strict=True)):
            if place in sampled.errors:
                guesses.failed.append(index)
            elif token_id < self._vocab_size:  # the model may know more, as padding or as tokens of its own
                guesses.drafts[index].append(token_id)
                if len(guesses.drafts[index]) < rows[index].num_drafts:
                    going_on.append(index)
        return going_on

    def _sampling_row(self, batch: InputBatch, slot: int, num_tokens: int) -> SamplingRow:
        """Return what chooses a draft behind so many tokens, prompt and earlier drafts included."""
        request, row = batch.sampling_rows[slot], self._sampling_rows.get(slot)
        if row is None:
            params = request.params
            plain = SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=params.seed,
            )
            row = self._sampling_rows[slot] = SamplingRow(plain, (), [])
        row.num_pending = num_tokens - len(request.prompt_token_ids)
        return row


def _hide_unknown(inputs: StepInputs, vocab_size: int) -> None:
    """Put token 0 where the model lacks a token of the requests' model: its guesses get worse there."""
    token_ids = inputs.token_ids_T
    if len(token_ids) and token_ids.max() >= vocab_size:
        token_ids[token_ids >= vocab_size] = 0


class DraftModelProposer(Proposer):
    """Guesses with a model of its own.

    Parameters
    ----------
    forward : the draft model, with as many KV blocks as the target.
    block_size, max_num_seqs : of the target's KV cache and batch.
    vocab_size : of the target.
    max_catch_up_tokens : see `MAX_CATCH_UP_TOKENS`.
    """

    def __init__(
        self,
        forward: ForwardPass,
        *,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        max_catch_up_tokens: int = MAX_CATCH_UP_TOKENS,
    ) -> None:
        self.forward = forward
        self._guesser = Guesser(forward, Sampler(forward.config.vocab_size), vocab_size, max_num_seqs)
        self._num_valid: dict[int, int] = {}
        """Leading tokens of each request that have KV; none where it was not asked for."""
        self._near = block_size
        """Rows no further behind than this are not held back: they are so after any step with drafts."""
        self._max_catch_up_tokens = max_catch_up_tokens
        self._unconfirmed: dict[int, tuple[int, list[int]]] = {}
        """Drafts of each request's last proposal that have KV, and the position of the first."""
        self._broken: set[int] = set()
        """Requests on which the model gave no numbers; they get no more drafts."""

    def release(self, slot: int) -> None:
        """Forget a request; see `Proposer.release`."""
        self._num_valid.pop(slot, None)
        self._guesser.release(slot)
        self._unconfirmed.pop(slot, None)
        self._broken.discard(slot)

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:
        """Return the drafts of each row; none where the model is still catching up, or out of its context."""
        places, guess_rows = self._guess_rows(batch, rows)
        drafts: list[list[int]] = [[] for _ in rows]
        if not guess_rows:
            return drafts
        guesses = self._guesser.guess(batch, guess_rows)
        for place, guess_row, found in zip(places, guess_rows, guesses.drafts, strict=True):
            self._num_valid[guess_row.slot] = guess_row.end
            if len(found) > 1:
                self._unconfirmed[guess_row.slot] = (guess_row.end, found[:-1])
            drafts[place] = found
        for index in guesses.failed:
            self._give_up(batch, guess_rows[index].slot)
        return drafts

    def touch_ahead(self) -> bool:
        """Have a little of the draft model's KV cache provided."""
        return self.forward.touch_ahead()

    def close(self) -> None:
        """Let the draft model's threads and KV cache go."""
        self.forward.close()

    def _guess_rows(self, batch: InputBatch, rows: list[DraftRow]) -> tuple[list[int], list[GuessRow]]:
        """Return which rows run and how far, those that are nearest to their ends first."""
        starts = [self._confirm(batch, row) for row in rows]
        num_left = self._max_catch_up_tokens
        places, guess_rows = [], []
        for place in sorted(range(len(rows)), key=lambda place: rows[place].num_tokens - starts[place]):
            row, start = rows[place], starts[place]
            num_behind = row.num_tokens - start
            num_drafts = self._num_in_context(row)
            if not num_drafts:
                continue
            if num_behind > self._near:
                num_taken = min(num_behind, num_left)
                num_left -= num_taken
                if num_taken < num_behind:
                    num_behind, num_drafts = num_taken, 0
            if num_behind:
                places.append(place)
                guess_rows.append(GuessRow(row.slot, start, start + num_behind, num_drafts))
        return places, guess_rows

    def _confirm(self, batch: InputBatch, row: DraftRow) -> int:
        """Return how many tokens need not be run: at most all but the last one, whose logits are wanted.

        Of the drafts before, those that became tokens of the request have KV already.
        """
        slot = row.slot
        num_valid = self._num_valid.get(slot, 0)
        if slot in self._unconfirmed:
            start, drafts = self._unconfirmed.pop(slot)
            token_ids = batch.token_ids_SP[slot, start : row.num_tokens].tolist()
            num_same = 0
            while num_same < min(len(drafts), len(token_ids)) and drafts[num_same] == token_ids[num_same]:
                num_same += 1
            if num_same:
                num_valid = start + num_same
        return min(num_valid, row.num_tokens - 1)

    def _num_in_context(self, row: DraftRow) -> int:
        """Return how many of the drafts the model can make within the context that it was made for."""
        if row.slot in self._broken:
            return 0
        limit = self.forward.config.max_position_embeddings
        return max(0, min(row.num_drafts, limit - row.num_tokens + 1))

    def _give_up(self, batch: InputBatch, slot: int) -> None:
        self._broken.add(slot)
        self.forward.scrub(batch.block_ids(slot))  # its blocks will be another request's
