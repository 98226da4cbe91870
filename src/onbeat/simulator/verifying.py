"""The tokens of a virtual device that verifies drafts: one a row, and one more for each accepted draft.

A virtual draft model that has to read what its requests have become before it can go on with them.

As in the engine: the draft model is never told of prompts. When drafts are asked for, it runs the tokens that
it has no KV of, at most so many in a step; a row that is not through proposes nothing in that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.replica.rows import correct_shape
from onbeat.simulator.deliveries import Deliveries
from onbeat.simulator.draft_acceptance import RequestDrafts
from onbeat.simulator.result import DraftCounts
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.virtual_clients import STOP, OfferedRequest


class AskedRow(NamedTuple):
    """A decode row with drafts."""

    request_id: str
    num_tokens: int
    """Known ones, its last included."""
    num_drafts: int


class CatchUp:
    """Keeps count of the draft model's KV. What the prefix cache holds is new to it.

    Parameters
    ----------
    most : tokens that it reads in a step, over all rows that are far behind.
    num_near : rows no further behind than this are not held back, and cost nothing more than a decode.
    """

    def __init__(self, most: int, *, num_near: int) -> None:
        self._most = most
        self._num_near = num_near
        self._num_valid: dict[str, int] = {}
        """Leading tokens of each request that have KV."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let the KV of requests go that ended, were preempted, or come back."""
        for request_id in request_ids:
            self._num_valid.pop(request_id, None)

    def propose(self, rows: Sequence[AskedRow]) -> tuple[list[int], list[tuple[int, int]]]:
        """Run what rows are behind with, those first that are nearest to their ends.

        Returns
        -------
        The drafts of each row, none where it is not through; and (tokens before, tokens run) of each row that
        was far behind.
        """
        num_left = self._most
        num_drafted = [row.num_drafts for row in rows]
        chunks = []
        behind = [row.num_tokens - self._num_valid.get(row.request_id, 0) for row in rows]
        for place in sorted(range(len(rows)), key=behind.__getitem__):
            row, num_behind = rows[place], behind[place]
            if num_behind > self._num_near:
                start = row.num_tokens - num_behind
                num_taken = min(num_behind, num_left)
                num_left -= num_taken
                if num_taken:
                    chunks.append((start, num_taken))
                if num_taken < num_behind:
                    num_drafted[place] = 0
                    self._num_valid[row.request_id] = start + num_taken
                    continue
            self._num_valid[row.request_id] = row.num_tokens
        return num_drafted, chunks

    def confirm(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Count the KV of drafts that became tokens; the last one of a row has none."""
        if num_drafted:
            self._num_valid[request_id] += min(num_drafted - 1, num_accepted)


_ORDINARY = STOP + 1


class VerifyingSampler:
    """Gives each row that verifies one token, and one more for each draft that its request accepts.

    Parameters
    ----------
    deliveries : knows the requests, and how many tokens they have got.
    config : of the simulation; its scheduler speculates.
    """

    def __init__(self, deliveries: Deliveries, config: SimulationConfig) -> None:
        speculation = config.scheduler.speculation
        assert speculation is not None
        self._deliveries = deliveries
        self._acceptance = config.acceptance
        self._num_speculative_tokens = speculation.num_speculative_tokens
        self._seed = config.seed
        self._last_token = STOP if config.declared_max_tokens is not None else _ORDINARY
        self._catch_up = None
        if speculation.max_catch_up_tokens:
            self._catch_up = CatchUp(speculation.max_catch_up_tokens, num_near=config.scheduler.block_size)
        self._results: dict[int, ModelRunnerOutput] = {}
        """Of the steps under way: what they bring is settled when they begin."""
        self.counts = DraftCounts()

    def begin(self, scheduled: SchedulerOutput) -> BatchShape:
        """Settle what a step brings; return what the device computes: no drafts that cannot be proposed."""
        num_drafted, chunks = self._propose(scheduled)
        result = self._results[scheduled.step_id] = self._verify(scheduled, num_drafted)
        computed = replace(scheduled, shape=replace(scheduled.shape))
        correct_shape(computed, result)
        shape = computed.shape
        if self._catch_up is not None:
            shape.num_draft_passes = max(num_drafted.values(), default=0)
            shape.num_catch_up_tokens = shape.catch_up_pairs = 0
            for num_read, num_tokens in chunks:
                shape.add_catch_up(num_read, num_tokens)
        return shape

    def sample(self, scheduled: SchedulerOutput, num_steps: int) -> ModelRunnerOutput:  # noqa: ARG002
        """Return the tokens of a step that `begin` was told of."""
        return self._results.pop(scheduled.step_id)

    def _propose(self, scheduled: SchedulerOutput) -> tuple[dict[str, int], list[tuple[int, int]]]:
        """Return the drafts of each row that gets any, and what a draft model catches up with."""
        found = {}
        for row in scheduled.rows:
            if row.num_draft_tokens:
                offered = self._deliveries.offered(row.request_id)
                place = offered.record.num_output_tokens
                found[row.request_id] = self._drafts(offered).num_drafted(place, row.num_draft_tokens)
        if self._catch_up is None:
            return found, []
        self._catch_up.forget(scheduled.released_ids)
        self._catch_up.forget(each.request.request_id for each in scheduled.admitted)
        asked = [
            AskedRow(row.request_id, row.num_computed_tokens + 1, row.num_draft_tokens)
            for row in scheduled.rows
            if row.num_draft_tokens
        ]
        num_drafted, chunks = self._catch_up.propose(asked)
        return dict(zip(found, num_drafted, strict=True)), chunks

    def _verify(self, scheduled: SchedulerOutput, num_drafted: dict[str, int]) -> ModelRunnerOutput:
        token_ids: list[list[int]] = []
        drafted_of_rows: list[int] = []
        num_available: list[int] = []
        for row in scheduled.rows:
            if not row.samples:
                continue
            offered = self._deliveries.offered(row.request_id)
            drafts, drafted = self._drafts(offered), num_drafted.get(row.request_id, 0)
            place, num_left = offered.record.num_output_tokens, self._deliveries.num_left(row.request_id)
            num_tokens = min(1 + min(drafted, drafts.num_right[place]), num_left)
            tokens = [_ORDINARY] * num_tokens
            if num_tokens == num_left:
                tokens[-1] = self._last_token
            token_ids.append(tokens)
            drafted_of_rows.append(drafted)
            if drafts.num_available is not None:
                num_available.append(drafts.num_available[place + num_tokens])
            if row.num_new_tokens == 1 + row.num_draft_tokens:
                self.counts.add(drafted, num_tokens)
            if self._catch_up is not None:
                self._catch_up.confirm(row.request_id, drafted, num_tokens - 1)
        has_any_number = self._acceptance.hit_rate is None
        return ModelRunnerOutput(
            token_ids, num_drafted=drafted_of_rows, num_available=None if has_any_number else num_available
        )

    def _drafts(self, offered: OfferedRequest) -> RequestDrafts:
        """Return which drafts a request accepts; drawn when it is first asked for."""
        if offered.drafts is None:
            num_output_tokens = offered.record.offered_output_tokens
            assert num_output_tokens is not None
            offered.drafts = self._acceptance.draw(
                offered.index,
                num_output_tokens,
                request_class=offered.request.slo_class,
                seed=self._seed,
                num_speculative_tokens=self._num_speculative_tokens,
            )
        return offered.drafts
