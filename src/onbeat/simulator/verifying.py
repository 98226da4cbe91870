"""The tokens of a virtual device that verifies drafts: one a row, and one more for each accepted draft."""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.replica.verification import correct_shape
from onbeat.simulator.acceptance import Acceptance, RequestDrafts
from onbeat.simulator.client import STOP, OfferedRequest
from onbeat.simulator.deliveries import Deliveries
from onbeat.simulator.result import DraftCounts

_ORDINARY = STOP + 1


class VerifyingSampler:
    """Lets each row that verifies have as many tokens as its request's luck says.

    Parameters
    ----------
    deliveries : knows the requests, and how many tokens they have got.
    acceptance : of drafts.
    num_speculative_tokens : most drafts of a row.
    seed : of the luck.
    may_stop : whether requests end before their `max_tokens`.
    """

    def __init__(
        self,
        deliveries: Deliveries,
        acceptance: Acceptance,
        *,
        num_speculative_tokens: int,
        seed: int,
        may_stop: bool,
    ) -> None:
        self._deliveries = deliveries
        self._acceptance = acceptance
        self._num_speculative_tokens = num_speculative_tokens
        self._seed = seed
        self._last_token = STOP if may_stop else _ORDINARY
        self._results: dict[int, ModelRunnerOutput] = {}
        """Of the steps under way: what they bring is settled when they begin."""
        self.counts = DraftCounts()

    def max_steps(self, scheduled: SchedulerOutput) -> int:
        """Return how often the step may be run: a scheduler that plans drafts says once."""
        return scheduled.max_repeats

    def begin(self, scheduled: SchedulerOutput) -> BatchShape:
        """Settle what a step brings; return what the device computes: no drafts that cannot be proposed."""
        result = self._verify(scheduled)
        self._results[scheduled.step_id] = result
        computed = replace(scheduled, shape=replace(scheduled.shape))
        correct_shape(computed, result)
        return computed.shape

    def sample(self, scheduled: SchedulerOutput, num_steps: int) -> ModelRunnerOutput:  # noqa: ARG002
        """Return the tokens of a step that `begin` was told of."""
        return self._results.pop(scheduled.step_id)

    def _verify(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        token_ids: list[list[int]] = []
        num_drafted: list[int] = []
        num_available: list[int] = []
        for row in scheduled.rows:
            if not row.samples:
                continue
            offered = self._deliveries.offered(row.request_id)
            drafts = offered.drafts or self._draw(offered)
            place, num_left = offered.record.num_output_tokens, self._deliveries.num_left(row.request_id)
            drafted = drafts.num_drafted(place, row.num_draft_tokens)
            num_tokens = min(1 + min(drafted, drafts.num_right[place]), num_left)
            tokens = [_ORDINARY] * num_tokens
            if num_tokens == num_left:
                tokens[-1] = self._last_token
            token_ids.append(tokens)
            num_drafted.append(drafted)
            if drafts.num_available is not None:
                num_available.append(drafts.num_available[place + num_tokens])
            if row.num_new_tokens == 1 + row.num_draft_tokens:
                self.counts.add(drafted, num_tokens)
        has_any_number = self._acceptance.hit_rate is None
        return ModelRunnerOutput(
            token_ids, num_drafted=num_drafted, num_available=None if has_any_number else num_available
        )

    def _draw(self, offered: OfferedRequest) -> RequestDrafts:
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
