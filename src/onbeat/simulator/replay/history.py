"""What a record says that happened: its requests and its steps, without asking a scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.request import FinishReason
from onbeat.core.slo import Fate, ShedMode
from onbeat.core.step import BatchShape
from onbeat.metrics.record import RequestRecord
from onbeat.recording.log import AbortCall, AddCall, HandoverCall, ScheduleCall, UpdateCall
from onbeat.recording.reader import Recording
from onbeat.simulator.deliveries import REJECTED
from onbeat.simulator.replay.decisions import possible, recorded_slo
from onbeat.simulator.speculation import Acceptance, KnownDrafts

MOVED = "moved"
"""`RequestRecord.finish_reason` of a request that went on in another engine."""
_AHEAD = 1e-6
"""Seconds by which a request comes before a step ends: virtual times are sums, whose last digits differ."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step. Times are seconds of the recording machine's clock."""

    step_id: int
    shape: BatchShape
    planned: float
    """When it was planned."""
    end: float
    seconds: float
    """How long it ran, without the host's work before and after."""
    follows_idleness: bool
    """Whether nothing was left to do before it."""

    @property
    def start(self) -> float:
        """When it began to run."""
        return self.end - self.seconds


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as the engine saw it."""

    record: RequestRecord
    """Engine-side: `arrival` is the server's, deliveries are the ends of steps."""
    sent: float
    """When it must come to a simulator for that to plan with it as the engine did: just before the step
    before ends, or after idleness at the engine's plan."""
    weight: float = 1.0
    shed: ShedMode = ShedMode.OFF
    drafts: KnownDrafts = field(default_factory=KnownDrafts)
    """What the run found out about its output tokens."""


@dataclass(slots=True)
class RunHistory:
    """A recorded run."""

    requests: list[RecordedRequest] = field(default_factory=list)
    """In the order in which the engine took them; the row is the request's number."""
    steps: list[RecordedStep] = field(default_factory=list)

    @property
    def host_overhead(self) -> float:
        """Mean seconds from the end of a step to the start of the next, where there was work."""
        gaps = [
            after.start - before.end
            for before, after in zip(self.steps, self.steps[1:], strict=False)
            if not after.follows_idleness
        ]
        return max(fmean(gaps), 0.0) if gaps else 0.0


def read_history(recording: Recording) -> RunHistory:
    """Collect the requests and steps of a record; see `possible` for errors."""
    speculation = recording.header.scheduler.get("speculation")
    reader = _HistoryReader(runs_draft_model=speculation is not None and speculation["runs_model"])
    hear: dict[type, Callable[[Any], None]] = {
        AddCall: reader.add,
        AbortCall: reader.abort,
        ScheduleCall: reader.schedule,
        UpdateCall: reader.update,
        HandoverCall: reader.hand_over,
    }
    for number, call in enumerate(recording.calls(), 2):
        with possible(recording.path, number):
            hear[type(call)](call)
    return reader.history()


class _HistoryReader:
    def __init__(self, *, runs_draft_model: bool) -> None:
        self._runs_draft_model = runs_draft_model
        self._records: list[RequestRecord] = []
        self._drafts: list[KnownDrafts] = []
        self._adds: list[AddCall] = []
        self._first_steps: list[int] = []
        """For each request, the first step that was planned with it in the queue, counted from 0."""
        self._steps: list[RecordedStep] = []
        self._open: set[int] = set()
        self._came_with_kv: set[int] = set()
        """Requests that a hand-over has put in the batch, and no step has named yet."""
        self._in_flight: deque[tuple[ScheduleCall, bool]] = deque()
        self._was_idle = True

    def history(self) -> RunHistory:
        # A request that came after the last plan has no step.
        first_steps = self._first_steps + [len(self._steps)] * (len(self._records) - len(self._first_steps))
        requests = [
            RecordedRequest(record, self._sent(record, index), call.weight, call.shed, drafts)
            for record, index, call, drafts in zip(
                self._records, first_steps, self._adds, self._drafts, strict=True
            )
        ]
        return RunHistory(requests, self._steps)

    def _sent(self, record: RequestRecord, index: int) -> float:
        """Return when a request must be sent to be in the queue when step `index` is planned."""
        if index >= len(self._steps):
            return record.arrival
        step = self._steps[index]
        return step.planned if step.follows_idleness else self._steps[index - 1].end - _AHEAD

    def add(self, call: AddCall) -> None:
        record = RequestRecord(
            request_id=call.request_id,
            arrival=call.arrival,
            num_prompt_tokens=call.num_prompt_tokens + call.num_resumed_tokens,
            request_class=call.slo_class,
            slo=recorded_slo(call),
            tenant=call.tenant,
            is_embedding=call.pooling is not None,
        )
        self._adds.append(call)
        self._records.append(record)
        self._drafts.append(KnownDrafts())
        if (adoption := call.adoption) is not None:
            record.scheduled = adoption.scheduled_time
            record.num_cached_tokens = adoption.num_cached_tokens
            record.num_preemptions = adoption.num_preemptions
            self._came_with_kv.add(call.request)
        if call.refused is None:
            self._open.add(call.request)
            return
        record.fate, record.finish_reason, record.end = Fate.REJECTED, REJECTED, call.now
        record.predicted_ttft = record.predicted_wait = call.refused.predicted_ttft

    def abort(self, call: AbortCall) -> None:
        for request in call.requests:
            self._end(request, call.now, FinishReason.ABORT)

    def hand_over(self, call: HandoverCall) -> None:
        """Close the record of a request that has gone on elsewhere, or note that it is back in the batch."""
        comes_back = call.verb == "reattach" and call.is_out
        if call.verb != "free" and not comes_back:
            return
        for request in [each for each in self._open if self._records[each].request_id == call.id]:
            if comes_back:
                self._came_with_kv.add(request)
            else:
                self._end(request, call.now, MOVED)

    def schedule(self, call: ScheduleCall) -> None:
        for request in call.expired:
            self._end(request, call.now, FinishReason.EXPIRED)
            self._records[request].fate = Fate.EXPIRED  # or overdue: the file does not tell
        if call.step_id is None:
            return
        index = len(self._steps) + len(self._in_flight)
        self._first_steps += [index] * (len(self._records) - len(self._first_steps))
        computed = {row.request: row.num_computed_tokens for row in call.rows}
        for admission in call.admitted:
            record = self._records[admission.request]
            if admission.request in self._came_with_kv:
                self._came_with_kv.remove(admission.request)  # it may have no row
            elif record.scheduled is None:
                record.scheduled = call.now
                record.num_cached_tokens = computed[admission.request]
            else:
                record.num_preemptions += 1
        self._in_flight.append((call, self._was_idle))
        self._was_idle = False

    def update(self, call: UpdateCall) -> None:
        planned, follows_idleness = self._in_flight.popleft()
        shape = self._shape(planned, call)
        self._steps.append(
            RecordedStep(call.step_id, shape, planned.now, call.now, call.seconds, follows_idleness)
        )
        sampling = [row.request for row in planned.rows if row.samples]
        counts = (1,) * len(sampling) if call.counts is None else call.counts
        self._note_drafts(call, sampling, counts)
        for request, count in zip(sampling, counts, strict=True):
            if count and request in self._open and request not in call.failed:
                record = self._records[request]
                record.delivery_times.append(call.now)
                record.delivery_sizes.append(count)
                record.num_output_tokens += count
        for request, reason in call.finished.items():
            if self._records[request].is_embedding:
                self._records[request].delivery_times.append(call.now)
                self._records[request].delivery_sizes.append(0)
            self._end(request, call.now, FinishReason(reason))
        for request in call.failed:
            self._end(request, call.now, FinishReason.ERROR)

    def _shape(self, planned: ScheduleCall, call: UpdateCall) -> BatchShape:
        """Return what the device computed: of drafts, those that could be proposed."""
        shape = BatchShape()
        drafted = iter(() if call.drafted is None else call.drafted)
        for row in planned.rows:
            num_drafted = next(drafted, 0) if row.samples else 0
            if row.num_draft_tokens:
                shape.add_verify(row.num_computed_tokens, num_drafted)
            else:
                samples = row.num_new_tokens if self._is_scored(row.request) else row.samples
                shape.add(row.num_computed_tokens, row.num_new_tokens, samples=samples)
            shape.num_guided_rows += row.samples > 0 and self._adds[row.request].is_guided
        if self._runs_draft_model:
            shape.num_draft_passes = max((row.num_draft_tokens for row in planned.rows), default=0)
        return shape

    def _is_scored(self, request: int) -> bool:
        """Whether each token of a request's prompt has logits: until it has a token of its answer."""
        call = self._adds[request]
        return call.is_scored and not call.num_resumed_tokens and not self._records[request].num_output_tokens

    def _note_drafts(self, call: UpdateCall, sampling: Sequence[int], counts: Sequence[int]) -> None:
        """Note by the place of output tokens which drafts were right, and how many there were."""
        for index, (request, count) in enumerate(zip(sampling, counts, strict=True)):
            if not count or request not in self._open or request in call.failed:
                continue
            place, drafts = self._records[request].num_output_tokens, self._drafts[request]
            if call.drafted is not None:
                for token in range(min(call.drafted[index], count)):
                    # The last token is the target's own: in its place a draft was rejected, unless all were
                    # accepted, or the request ended.
                    if token < count - 1 or request not in call.finished:
                        drafts.is_right[place + token] = token < count - 1
            if call.available is not None:
                drafts.num_available[place + count] = call.available[index]

    def _end(self, request: int, now: float, reason: str) -> None:
        record = self._records[request]
        record.end, record.finish_reason = now, str(reason)
        self._open.discard(request)
        self._was_idle = self._was_idle or not self._open


def read_acceptance(path: Path) -> Acceptance:
    """Return the rates that a record of `onbeat serve --record FILE` shows, over all and by class.

    Raises
    ------
    ConfigError : no readable record, or no draft was verified in it.
    """
    requests = read_history(Recording(path)).requests
    if not any(request.drafts.is_right for request in requests):
        raise ConfigError(
            f"{path} records no verified draft; record a run with --speculative-config, or give rates"
        )
    return measured_acceptance(requests)


def measured_acceptance(requests: Sequence[RecordedRequest]) -> Acceptance:
    """Return the rates of recorded requests; the usual one where no draft was verified.

    A rate is the share of accepted drafts among those whose predecessors in the row were all accepted: of a
    row, the accepted ones and the first that was rejected. It does not depend on how many were planned.
    """
    rate = _mean(requests)
    classes = {request.record.request_class for request in requests} - {None}
    rates = {
        str(name): _mean(each for each in requests if each.record.request_class == name) for name in classes
    }
    found = [num > 0 for request in requests for num in request.drafts.num_available.values()]
    return Acceptance(
        rate=Acceptance().rate if rate is None else rate,
        rates=tuple(sorted((name, own) for name, own in rates.items() if own is not None)),
        hit_rate=sum(found) / len(found) if found else None,
    )


def _mean(requests: Iterable[RecordedRequest]) -> float | None:
    """Return the share of right drafts; None where none was verified."""
    outcomes = [is_right for request in requests for is_right in request.drafts.is_right.values()]
    return sum(outcomes) / len(outcomes) if outcomes else None
