"""Passes of a model that make drafts: one token after another, all rows side by side.

The input of a pass that makes drafts, over the target's block tables.

Legend: T tokens of the pass, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes
from numpy.typing import NDArray

from onbeat.core.request import SamplingParams
from onbeat.engine.attention.base import AttentionBatch, IntArray
from onbeat.engine.forward import StepLogits
from onbeat.engine.input_batch import InputBatch, StepInputs
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow


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
    attention = _attention(batch, slots_R, ends_R, lens_R, (slots_T, positions_T))
    return StepInputs(token_ids_T, positions_T, attention, last_R[samples_R] - 1)


def decode_inputs(
    batch: InputBatch, slots_R: IntArray, positions_R: IntArray, token_ids_R: IntArray
) -> StepInputs:
    """Return the input that runs one draft of each row, whose logits are wanted."""
    ones_R = np.ones(len(slots_R), np.int64)
    attention = _attention(batch, slots_R, positions_R + 1, ones_R, (slots_R, positions_R))
    return StepInputs(token_ids_R, positions_R, attention, np.arange(len(slots_R)))


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
        admissions_S=batch.admissions_S,
    )


class RunPass(Protocol):
    """Runs a model over a pass's tokens; see `ForwardPass.run`."""

    def __call__(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits: ...


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


class DraftSamplingRow(SamplingRow):
    """A request as the sampler sees it when one of its drafts is chosen.

    It draws with the random number that the request will draw the token at this position with.

    Two distributions that are near one another give the same token for the same number far more often than
    for two independent ones, so a draft is accepted as often as the models agree. Penalties, biases and bans
    are left out: they change few tokens, and drafts need not be exact.

    Parameters
    ----------
    row : the request.
    """

    def __init__(self, row: SamplingRow) -> None:
        params = row.params
        plain = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
        )
        super().__init__(plain, (), [])
        self._num_prompt_tokens = len(row.prompt_token_ids)
        self._position = 0

    @property
    def position(self) -> int:
        """Index of the draft among the request's output tokens."""
        return self._position

    def move_to(self, num_tokens: int) -> None:
        """Stand behind so many tokens, prompt and earlier drafts included."""
        self._position = num_tokens - self._num_prompt_tokens


class Guesser:
    """Lets a model guess the next tokens of requests.

    The first pass runs what each row has known for longer than the model, and ends with its first draft; each
    further one runs the rows' newest drafts, where more are wanted.

    Parameters
    ----------
    run : the model.
    sampler : chooses tokens from its logits.
    vocab_size : tokens that the requests' own model knows.
    """

    def __init__(self, run: RunPass, sampler: Sampler, vocab_size: int) -> None:
        self._run = run
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._sampling_rows: dict[int, DraftSamplingRow] = {}

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
        going_on = self._pass(batch, rows, asking, inputs, guesses)
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
            going_on = self._pass(batch, rows, going_on, inputs, guesses)
        return guesses

    def _pass(
        self, batch: InputBatch, rows: list[GuessRow], asking: list[int], inputs: StepInputs, guesses: Guesses
    ) -> list[int]:
        """Run one pass, add a draft to the rows that ask for one, and return those that want another."""
        _hide_unknown(inputs, self._sampler.vocab_size)
        sampling_rows: list[SamplingRow] = []
        for index in asking:
            sampling_row = self._sampling_row(batch, rows[index].slot)
            sampling_row.move_to(rows[index].end + len(guesses.drafts[index]))
            sampling_rows.append(sampling_row)
        inputs = replace(  # a device that draws wants to know; to it these rows have no prompts
            inputs,
            sampling_rows=sampling_rows,
            sampling_slots=np.array([rows[index].slot for index in asking], np.int64),
            sampling_positions=np.array([row.position for row in sampling_rows], np.int64),
        )
        logits = self._run(inputs, wants_logits=self._sampler.needs_logits(sampling_rows))
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

    def _sampling_row(self, batch: InputBatch, slot: int) -> DraftSamplingRow:
        row = self._sampling_rows.get(slot)
        if row is None:
            row = self._sampling_rows[slot] = DraftSamplingRow(batch.sampling_rows[slot])
        return row


def _hide_unknown(inputs: StepInputs, vocab_size: int) -> None:
    """Put token 0 where the model lacks a token of the requests' model: its guesses get worse there."""
    token_ids = inputs.token_ids_T
    if len(token_ids) and token_ids.max() >= vocab_size:
        token_ids[token_ids >= vocab_size] = 0
