"""The tokens of a virtual device that verifies drafts: one a row, and one more for each accepted draft."""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.replica.rows import correct_shape
from onbeat.simulator.catch_up import AskedRow, CatchUp
from onbeat.simulator.deliveries import Deliveries
from onbeat.simulator.draft_acceptance import RequestDrafts
from onbeat.simulator.result import DraftCounts
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.virtual_clients import STOP, OfferedRequest

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
            token_ids,
            num_drafted=drafted_of_rows,
            num_available=None if has_any_number else num_available,
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
