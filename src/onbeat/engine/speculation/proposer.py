"""What proposes draft tokens: the protocol between the model runner and its proposers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from onbeat.core.step import ScheduledRequest
from onbeat.engine.guided_draw import guided_drafts, with_forced
from onbeat.engine.input_batch import InputBatch, StepInputs


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A request that is to get drafts in this step."""

    slot: int
    """Of the input batch."""
    num_tokens: int
    """Its tokens, prompt and output, all of them known; the KV of the last one is not computed yet."""
    num_drafts: int
    """Most drafts to propose, at least 1. The request's KV blocks have room for all of them."""


class Proposer(Protocol):
    """Guesses the next tokens of requests. A wrong guess costs time, never a wrong token.

    It reads tokens, block tables and sampling parameters of the input batch by slot. Calls come in the order
    of the steps: `release`, `propose`, and `num_available` after the step's tokens were appended, where the
    step asks for it. A slot whose request was released, or never asked for, begins anew.

    Those that inherit from it keep nothing of a request, make any number of drafts and take no memory ahead,
    unless they say otherwise.
    """

    def release(self, slot: int) -> None:  # noqa: ARG002
        """Forget a request that ended or was preempted."""
        return

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:
        """Return the drafts of each row: what should follow its last token; possibly fewer, or none."""

    def num_available(
        self,
        batch: InputBatch,  # noqa: ARG002
        slots: Sequence[int],  # noqa: ARG002
        num_tokens: Sequence[int],  # noqa: ARG002
    ) -> list[int] | None:
        """Return how many drafts `propose` would find for some requests now; None where it makes any number.

        Parameters
        ----------
        num_tokens : each request's tokens, the newest included.
        """
        return None

    def touch_ahead(self) -> bool:
        """Take a little of the memory that later steps will need; see `ForwardPass.touch_ahead`."""
        return False

    def close(self) -> None:
        """Let go of what it holds."""
        return


def propose(proposer: Proposer, batch: InputBatch, rows: Sequence[ScheduledRequest]) -> list[list[int]]:
    """Return the drafts of each row of a step, as many as were planned or fewer; nothing where none were.

    Text that a grammar says must come is taken before what is proposed.
    """
    indices = [index for index, row in enumerate(rows) if row.num_draft_tokens]
    if not indices:
        return []
    drafts: list[list[int]] = [[] for _ in rows]
    draft_rows = []
    for index in indices:
        slot = batch.slots[rows[index].request_id]
        draft_rows.append(DraftRow(slot, int(batch.num_tokens_S[slot]), rows[index].num_draft_tokens))
    for index, proposed in zip(indices, proposer.propose(batch, draft_rows), strict=True):
        assert len(proposed) <= rows[index].num_draft_tokens, "KV slots are there for as many as planned"
        drafts[index] = proposed
    if batch.num_guided:
        for index, draft in zip(indices, draft_rows, strict=True):
            drafts[index] = guided_drafts(batch.sampling_rows[draft.slot], drafts[index], draft.num_drafts)
    return drafts


def num_ready(proposer: Proposer, batch: InputBatch, inputs: StepInputs) -> list[int] | None:
    """Return how many drafts each sampling row of a step has ready for the next; None: any number."""
    slots = inputs.sampling_slots
    num_available = proposer.num_available(batch, slots.tolist(), batch.num_tokens_S[slots].tolist())
    if num_available is not None and batch.num_guided:
        return with_forced(inputs.sampling_rows, num_available)
    return num_available
