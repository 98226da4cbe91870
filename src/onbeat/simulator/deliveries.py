"""The tokens that a virtual device samples, and what records say of them: deliveries, ends and refusals.

A device that verifies drafts gives each row one token, and one more for each draft that is accepted. As in
the engine, a virtual draft model is never told of prompts. When drafts are asked for, it runs the tokens that
it has no KV of, at most so many in a step. A row that is not through proposes nothing in that step.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from onbeat.core.errors import ConfigError, Overloaded, RequestRejected, SLOUnattainable
from onbeat.core.request import RequestOutput, overdue_error
from onbeat.core.slo import Fate
from onbeat.core.step import BatchShape, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.replica.speculation.verified import correct_shape
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.result import DraftCounts, OnRequests, SimulationObserver
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.speculation import RequestDrafts
from onbeat.simulator.virtual_clients import STOP, OfferedRequest

ORDINARY = STOP + 1
"""A token that ends no request."""
_REPORT_SECONDS = 0.1
_ORDINARY_ROW, _LAST_ROW = [ORDINARY], [STOP]

Keep = Callable[[int, RequestRecord], None]
"""Takes (row of the load, record of a request that ended)."""

REJECTED = "rejected"
"""`RequestRecord.finish_reason` of a request that was refused at its arrival."""

REFUSALS = (Overloaded, SLOUnattainable)
"""What a scheduler raises for want of capacity; other refusals mean that the request could never run."""


class Deliveries:
    """Writes the records of one replica's requests from the outputs of its scheduler.

    Parameters
    ----------
    replica_name : as records carry it.
    has_drafts : whether a delivery may have several tokens.
    """

    def __init__(self, replica_name: str, *, has_drafts: bool = False) -> None:
        self._replica_name = replica_name
        self._has_drafts = has_drafts
        self._open: dict[str, OfferedRequest] = {}

    def open(self, offered: OfferedRequest, *, is_moved: bool = False) -> None:
        """Start to write for a request.

        Parameters
        ----------
        is_moved : another replica has begun it, and its KV has come.
        """
        record = offered.record
        record.replica = f"{record.replica}+{self._replica_name}" if is_moved else self._replica_name
        self._open[offered.request.request_id] = offered
        if self._has_drafts:  # another replica may have delivered to it, and without drafts one by one
            record.delivery_sizes = array("I", record.delivery_sizes or [1] * len(record.delivery_times))
            record.num_output_tokens = sum(record.delivery_sizes)

    def offered(self, request_id: str) -> OfferedRequest:
        """Return an open request; where there are drafts, its record counts the tokens that it has."""
        return self._open[request_id]

    def drop(self, request_id: str) -> OfferedRequest:
        """Write no more for a request, which goes on elsewhere; return it."""
        return self._open.pop(request_id)

    @property
    def open_requests(self) -> list[OfferedRequest]:
        """Requests that have not ended, in the order in which they came."""
        return list(self._open.values())

    def num_left(self, request_id: str) -> int:
        """Return the output tokens that a request has yet to get; many, if it has gone on elsewhere."""
        if request_id not in self._open:
            return sys.maxsize
        record = self._open[request_id].record
        assert record.offered_output_tokens is not None
        num_tokens = record.num_output_tokens if self._has_drafts else len(record.delivery_times)
        return record.offered_output_tokens - num_tokens

    def take(self, outputs: Iterable[RequestOutput], now: float) -> list[OfferedRequest]:
        """Write the outputs of a step that has ended; return the requests that ended with it."""
        finished = []
        is_opened = self._open
        for output in outputs:
            offered = is_opened[output.request_id]
            offered.record.delivery_times.append(now)
            if self._has_drafts:
                offered.record.delivery_sizes.append(len(output.new_token_ids))
                offered.record.num_output_tokens += len(output.new_token_ids)
            if output.predicted_ttft is not None:
                offered.record.predicted_ttft = output.predicted_ttft
            if output.finish_reason is not None:
                del is_opened[output.request_id]
                self._close(offered, output, now)
                finished.append(offered)
        return finished

    def expire(self, outputs: Iterable[RequestOutput], now: float) -> list[OfferedRequest]:
        """Write that requests were ended in the queue; return them."""
        expired = []
        for output in outputs:
            offered = self._open.pop(output.request_id)
            if output.predicted_ttft is not None:
                offered.record.predicted_ttft = output.predicted_ttft
            if output.fate is Fate.OVERDUE:
                offered.refusal = overdue_error(output)
            self._close(offered, output, now)
            expired.append(offered)
        return expired

    def first(self, outputs: Iterable[RequestOutput]) -> list[OfferedRequest]:
        """Return the requests whose first token is in the outputs that are about to be taken."""
        found = []
        for output in outputs:
            offered = self._open[output.request_id]
            offered.record.num_cached_tokens = output.num_cached_tokens
            if offered.record.scheduled is None:  # where it began; it may end on another replica
                offered.record.scheduled = output.scheduled_time
            found.append(offered)
        return [offered for offered in found if not offered.record.delivery_times]

    def _close(self, offered: OfferedRequest, output: RequestOutput, end: float) -> None:
        record, reason = offered.record, output.finish_reason
        assert reason is not None
        if not self._has_drafts:
            count_singles(record)
        if record.scheduled is None and output.scheduled_time >= 0:
            record.scheduled = output.scheduled_time
        record.num_cached_tokens = output.num_cached_tokens
        record.num_preemptions = output.num_preemptions
        record.fate = output.fate
        record.finish_reason = str(reason)
        record.end = end


def count_singles(record: RequestRecord) -> None:
    """Write that each delivery of a request has had one token, or an embedding."""
    num_tokens = len(record.delivery_times)
    size = 0 if record.is_embedding else 1
    record.delivery_sizes = array("B", bytes((size,)) * num_tokens)
    record.num_output_tokens = size * num_tokens


def refuse(offered: OfferedRequest, error: RequestRejected, replica_name: str | None, now: float) -> None:
    """Close the record of a request that a scheduler refused now for want of capacity.

    Parameters
    ----------
    replica_name : of the one that did; None where no replica was asked.

    Raises
    ------
    ConfigError : it was refused because it could never run.
    """
    if not isinstance(error, REFUSALS):
        raise ConfigError(f"request {offered.index} of the load can never run: {error}") from error
    offered.refusal = error
    record = offered.record
    record.replica = replica_name
    record.fate = Fate.REJECTED
    record.finish_reason = REJECTED
    record.end = now
    if isinstance(error, SLOUnattainable):
        record.predicted_ttft = record.predicted_wait = error.predicted_ttft


class Collector:
    """Passes on the records of requests that ended.

    Parameters
    ----------
    keep : takes (row of the load, record).
    num_requests : of the load.
    on_progress : hears how far the run is at most ten times a second, and at its end.
    observer : hears of each request.

    Attributes
    ----------
    virtual_time : end of the last request, virtual seconds.
    """

    def __init__(
        self,
        keep: Keep,
        num_requests: int,
        *,
        on_progress: OnRequests | None = None,
        observer: SimulationObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep, self._observer, self._on_progress = keep, observer, on_progress
        self._num_requests = num_requests
        self._num_finished = 0
        self._clock = clock
        self._next_report = clock() + _REPORT_SECONDS
        self.virtual_time = 0.0

    def on_request(self, offered: OfferedRequest) -> None:
        """Hear of a request that a replica took."""
        if self._observer is not None:
            self._observer.on_request(offered.record)

    def on_finish(self, offered: OfferedRequest, now: float) -> None:
        """Keep the record of a request that ended."""
        self._keep(offered.index, offered.record)
        if self._observer is not None:
            self._observer.on_finish(offered.record)
        self._num_finished += 1
        self.virtual_time = max(self.virtual_time, now)
        if self._on_progress is not None and self._clock() >= self._next_report:
            self._next_report = self._clock() + _REPORT_SECONDS
            self.report()

    def report(self) -> None:
        """Say how far the run is."""
        if self._on_progress is not None:
            self._on_progress(self._num_finished, self._num_requests, self.virtual_time)


class VirtualSampler:
    """Ends each request at the output length that the load says, whatever limit was declared.

    Parameters
    ----------
    deliveries : knows how many tokens each request still gets.
    may_stop : whether requests end before their `max_tokens`.
    """

    counts: DraftCounts | None = None
    """What became of drafts so far; None where nothing is speculated."""

    def __init__(self, deliveries: Deliveries, *, may_stop: bool) -> None:
        self._deliveries = deliveries
        self._may_stop = may_stop
        self._ordinary: dict[int, ModelRunnerOutput] = {}
        """What steps bring in which no request stops, by the number of their rows."""

    def sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Return the tokens of a step; those of the steps before are written."""
        if not self._may_stop:
            num_rows = scheduled.shape.num_lm_head_rows
            if (known := self._ordinary.get(num_rows)) is None:
                known = self._ordinary[num_rows] = ModelRunnerOutput([_ORDINARY_ROW] * num_rows)
            return known
        num_left, rows = self._deliveries.num_left, [row for row in scheduled.rows if row.samples]
        ends = [num_left(row.request_id) == 1 for row in rows]
        return ModelRunnerOutput([_LAST_ROW if is_last else _ORDINARY_ROW for is_last in ends])


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

    def propose(self, rows: Sequence[ScheduledRequest]) -> tuple[list[int], list[tuple[int, int]]]:
        """Run what rows are behind with, those first that are nearest to their ends.

        Returns
        -------
        The drafts of each row, none where it is not through; and (tokens before, tokens run) of each row that
        was far behind.
        """
        num_left = self._most
        num_drafted = [row.num_draft_tokens for row in rows]
        chunks = []
        behind = [row.num_computed_tokens + 1 - self._num_valid.get(row.request_id, 0) for row in rows]
        for place in sorted(range(len(rows)), key=behind.__getitem__):
            row, num_behind = rows[place], behind[place]
            num_known = row.num_computed_tokens + 1
            if num_behind > self._num_near:
                start = num_known - num_behind
                num_taken = min(num_behind, num_left)
                num_left -= num_taken
                if num_taken:
                    chunks.append((start, num_taken))
                if num_taken < num_behind:
                    num_drafted[place] = 0
                    self._num_valid[row.request_id] = start + num_taken
                    continue
            self._num_valid[row.request_id] = num_known
        return num_drafted, chunks

    def confirm(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Count the KV of drafts that became tokens; the last one of a row has none."""
        if num_drafted:
            self._num_valid[request_id] += min(num_drafted - 1, num_accepted)


class VerifyingSampler(VirtualSampler):
    """Gives each row that verifies one token, and one more for each draft that its request accepts.

    Parameters
    ----------
    deliveries : knows the requests, and how many tokens they have got.
    config : of the simulation.
    limits : of the replica, whose scheduler speculates.
    """

    def __init__(self, deliveries: Deliveries, config: SimulationConfig, limits: SchedulerConfig) -> None:
        speculation = limits.speculation
        assert speculation is not None
        super().__init__(deliveries, may_stop=False)
        self._acceptance = config.acceptance
        self._num_speculative_tokens = speculation.num_speculative_tokens
        self._seed = config.seed
        self._last_token = STOP if config.declared_max_tokens is not None else ORDINARY
        self._catch_up = None
        if speculation.max_catch_up_tokens:
            self._catch_up = CatchUp(speculation.max_catch_up_tokens, num_near=limits.block_size)
        self._results: dict[int, ModelRunnerOutput] = {}
        """Of the steps under way: what they bring is settled when they begin."""
        self.counts = self._drafts_so_far = DraftCounts()

    def begin(self, scheduled: SchedulerOutput) -> BatchShape:
        """Settle what a step brings; return what the device computes: no drafts that cannot be proposed."""
        num_drafted, chunks = self._propose(scheduled)
        result = self._results[scheduled.step_id] = self._verify(scheduled, num_drafted)
        computed = scheduled._replace(shape=replace(scheduled.shape))
        correct_shape(computed, result.num_drafted or [])
        shape = computed.shape
        if self._catch_up is not None:
            shape.num_draft_passes = max(num_drafted.values(), default=0)
            shape.num_catch_up_tokens = shape.catch_up_pairs = 0
            for num_read, num_tokens in chunks:
                shape.add_catch_up(num_read, num_tokens)
        return shape

    def sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
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
        asked = [row for row in scheduled.rows if row.num_draft_tokens]
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
            tokens = [ORDINARY] * num_tokens
            if num_tokens == num_left:
                tokens[-1] = self._last_token
            token_ids.append(tokens)
            drafted_of_rows.append(drafted)
            if drafts.num_available is not None:
                num_available.append(drafts.num_available[place + num_tokens])
            if row.num_new_tokens == 1 + row.num_draft_tokens:
                self._drafts_so_far.add(drafted, num_tokens)
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


def make_sampler(config: SimulationConfig, limits: SchedulerConfig, deliveries: Deliveries) -> VirtualSampler:
    """Return what samples on one replica."""
    if limits.speculation is None:
        return VirtualSampler(deliveries, may_stop=config.declared_max_tokens is not None)
    return VerifyingSampler(deliveries, config, limits)
