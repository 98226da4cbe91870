"""Drafts by a smaller model with the same tokenizer.

It has as many KV blocks as its target and uses the target's block tables, so that nobody manages a second set
of blocks (as vLLM does it). It is never told of prompts: when drafts are asked for, it catches up with what
the request has become since.

Its KV lies in blocks of its own that have the ids of the target's. What the target's prefix cache holds is
new to it, for it may have filled such a block wholly, in part or not at all.

Legend: T tokens of a pass, R rows.
"""

# ruff: noqa: N806 -- tensor names carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onbeat.core.request import SamplingParams
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import InputBatch, StepInputs
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.speculation.proposer import DraftRow, Proposer
from onbeat.engine.state_ends import StateEnds
from onbeat.speculative_config import MAX_CATCH_UP_TOKENS

_DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Fields of a request's `SamplingParams` that its drafts are drawn by."""


@dataclass(slots=True)
class _Guess:
    """A request's share of the passes."""

    slot: int
    start: int
    """Its first tokens, whose KV the model has."""
    end: int
    """Tokens to know before the first draft; those from `start` on are run."""
    num_drafts: int
    """Drafts to make behind them; 0 only runs the tokens."""
    drafts: list[int]
    """Those made: fewer where the model broke off. All but the last have KV once the passes have run."""


class DraftModelProposer(Proposer):
    """Guesses the next tokens of requests with a model of its own.

    The first pass runs what each row has known for longer than the model, and ends with its first draft; each
    further one runs the rows' newest drafts, where more are wanted, all rows side by side.

    A draft is drawn with the random number that the request will draw the token at this position with. Two
    distributions that are near one another give the same token for the same number far more often than for
    two independent ones, so a draft is accepted as often as the models agree. Penalties, biases and bans are
    left out: they change few tokens, and drafts need not be exact.

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
        self._sampler = Sampler(forward.config.vocab_size)
        self._vocab_size = vocab_size
        self._states = StateEnds(max_num_seqs)
        self._sampling_rows: dict[int, SamplingRow] = {}
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
        self._sampling_rows.pop(slot, None)
        self._unconfirmed.pop(slot, None)
        self._broken.discard(slot)

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:
        """Return the drafts of each row; none where the model is still catching up, or out of its context."""
        drafts: list[list[int]] = [[] for _ in rows]
        guesses = self._plan(batch, rows, drafts)
        if not guesses:
            return drafts
        asking = [guess for guess in guesses if guess.num_drafts]
        asking = self._pass(batch, asking, self._known_tokens(batch, guesses))
        while asking:
            asking = self._pass(batch, asking, self._newest_drafts(batch, asking))
        for guess in guesses:
            self._num_valid[guess.slot] = guess.end
            if len(guess.drafts) > 1:
                self._unconfirmed[guess.slot] = (guess.end, guess.drafts[:-1])
        return drafts

    def touch_ahead(self) -> bool:
        """Have a little of the draft model's KV cache provided."""
        return self.forward.touch_ahead()

    def close(self) -> None:
        """Let the draft model's threads and KV cache go."""
        self.forward.close()

    def _plan(self, batch: InputBatch, rows: list[DraftRow], drafts: list[list[int]]) -> list[_Guess]:
        """Return which rows run and how far, those that are nearest to their ends first."""
        starts = [self._confirm(batch, row) for row in rows]
        num_left = self._max_catch_up_tokens
        guesses = []
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
                guesses.append(_Guess(row.slot, start, start + num_behind, num_drafts, drafts[place]))
        return guesses

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

    def _known_tokens(self, batch: InputBatch, guesses: list[_Guess]) -> StepInputs:
        """Return the input that runs what the model has not seen yet; logits are of the rows that draft."""
        rows = [(guess.slot, guess.start, guess.end) for guess in guesses]
        slots_R, starts_R, ends_R = np.array(rows, np.int64).T.copy()
        samples_R = np.array([guess.num_drafts > 0 for guess in guesses], np.bool_)
        lens_R = ends_R - starts_R
        last_R = np.cumsum(lens_R)
        slots_T = np.repeat(slots_R, lens_R)
        positions_T = np.arange(len(slots_T)) + np.repeat(starts_R - (last_R - lens_R), lens_R)
        token_ids_T = batch.token_ids_SP[slots_T, positions_T].astype(np.int64)
        attention = batch.attention(slots_R, lens_R, ends_R, slots_T, positions_T)
        inputs = StepInputs(token_ids_T, positions_T, attention, last_R[samples_R] - 1)
        return self._with_states(inputs, are_drafts=False)

    def _newest_drafts(self, batch: InputBatch, guesses: list[_Guess]) -> StepInputs:
        """Return the input that runs the last draft of each row."""
        rows = [(guess.slot, guess.end + len(guess.drafts) - 1, guess.drafts[-1]) for guess in guesses]
        slots_R, positions_R, token_ids_R = np.array(rows, np.int64).T.copy()
        attention = batch.attention(slots_R, np.ones_like(slots_R), positions_R + 1, slots_R, positions_R)
        inputs = StepInputs(token_ids_R, positions_R, attention, np.arange(len(slots_R)))
        return self._with_states(inputs, are_drafts=True)

    def _with_states(self, inputs: StepInputs, *, are_drafts: bool) -> StepInputs:
        """Say what states take in: neither these drafts nor those before."""
        batch = inputs.attention
        starts_R = batch.context_lens_R - batch.query_lens_R
        untaken_R = None if are_drafts else np.zeros_like(starts_R)
        pending_R, untaken_R = self._states.advance(batch.slots_R, starts_R, batch.context_lens_R, untaken_R)
        return replace(inputs, attention=replace(batch, pending_R=pending_R, untaken_R=untaken_R))

    def _pass(self, batch: InputBatch, asking: list[_Guess], inputs: StepInputs) -> list[_Guess]:
        """Run one pass, add a draft to the rows that ask for one, and return those that want another."""
        _hide_unknown(inputs, self._sampler.vocab_size)
        sampling_rows = [self._sampling_row(batch, guess) for guess in asking]
        inputs = replace(  # a device that draws wants to know; to it these rows have no prompts
            inputs,
            sampling_rows=sampling_rows,
            sampling_slots=np.array([guess.slot for guess in asking], np.int64),
            sampling_positions=np.array([row.position for row in sampling_rows], np.int64),
        )
        logits = self.forward.run(inputs, wants_logits=self._sampler.needs_logits(sampling_rows))
        if not asking:
            return []
        sampled = self._sampler.sample(logits.values_RV, sampling_rows, logits.best)
        going_on = []
        for place, (guess, token_id) in enumerate(zip(asking, sampled.token_ids, strict=True)):
            if place in sampled.errors:
                self._give_up(batch, guess.slot)
            elif token_id < self._vocab_size:  # the model may know more, as padding or as tokens of its own
                guess.drafts.append(token_id)
                if len(guess.drafts) < guess.num_drafts:
                    going_on.append(guess)
        return going_on

    def _sampling_row(self, batch: InputBatch, guess: _Guess) -> SamplingRow:
        """Return what chooses a row's next draft."""
        request, row = batch.sampling_rows[guess.slot], self._sampling_rows.get(guess.slot)
        if row is None:
            plain = SamplingParams(**{name: getattr(request.params, name) for name in _DRAWN_BY})
            row = self._sampling_rows[guess.slot] = SamplingRow(plain, (), [])
        row.num_pending = guess.end + len(guess.drafts) - len(request.prompt_token_ids)
        return row

    def _give_up(self, batch: InputBatch, slot: int) -> None:
        self._broken.add(slot)
        self.forward.scrub(batch.block_ids(slot))  # its blocks will be another request's


def _hide_unknown(inputs: StepInputs, vocab_size: int) -> None:
    """Put token 0 where the model lacks a token of the requests' model: its guesses get worse there."""
    token_ids = inputs.token_ids_T
    if len(token_ids) and token_ids.max() >= vocab_size:
        token_ids[token_ids >= vocab_size] = 0
