"""A scheduler driver that keeps a record of what it does."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.request import FinishReason, Request
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.recording.log import RecordHeader
from onbeat.recording.writer import RecordWriter, create_record
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.scheduler import Scheduler


def make_header(config: SchedulerConfig, **changes) -> RecordHeader:
    values = {
        "onbeat_version": "0.0.test",
        "created": "2026-01-01T00:00:00+00:00",
        "scheduler": asdict(config),
        "engine": {"model_name": "none", "device": "none"},
    }
    return RecordHeader(**(values | changes))


class RecordedRun:
    """Steps a scheduler; a token is its position, so that requests of equal start share prefixes.

    Of the drafts, some cannot be proposed, and some are rejected, by the place of the token.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        writer: RecordWriter,
        *,
        depth: int = 1,
        model: StepTimeModel | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, model)
        self.writer = writer
        self.depth = depth
        self.now = 100.0
        self.in_flight: deque[SchedulerOutput] = deque()
        self.steps: list[SchedulerOutput] = []
        self.open: dict[str, None] = {}
        self.failing: set[str] = set()
        self.finished: dict[str, FinishReason] = {}
        self.refused: dict[str, Overloaded | SLOUnattainable] = {}
        self.num_tokens: dict[str, int] = {}

    def tick(self) -> float:
        self.now += 0.1 + 1e-9 * len(self.steps)
        return self.now

    def add(self, request: Request) -> None:
        now = self.tick()
        try:
            self.scheduler.add(request, now)
        except (Overloaded, SLOUnattainable) as error:
            self.refused[request.request_id] = error
            self.writer.add(request, now, refusal=error)
        else:
            self.open[request.request_id] = None
            self.writer.add(request, now)

    def abort(self, *request_ids: str) -> None:
        self.note(self.scheduler.abort(request_ids))
        self.writer.abort(request_ids, self.tick())

    def step(self) -> None:
        now, before = self.tick(), self.scheduler.num_preemptions
        scheduled = self.scheduler.schedule(now)
        expired = self.scheduler.take_expired()
        self.note(expired)
        model = self.scheduler.step_time_model
        self.writer.schedule(
            scheduled,
            now,
            num_preempted=self.scheduler.num_preemptions - before,
            predicted_seconds=model.step_time(scheduled.shape) if model and scheduled else None,
            expired=expired,
        )
        if scheduled is not None:
            self.steps.append(scheduled)
            self.in_flight.append(scheduled)
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            self.collect(self.in_flight.popleft())

    def collect(self, scheduled: SchedulerOutput) -> None:
        self.update(scheduled, self.tick(), seconds=0.05)

    def update(self, scheduled: SchedulerOutput, now: float, *, seconds: float) -> None:
        sampling = [row for row in scheduled.rows if row.samples]
        failed = {row.request_id: "bad" for row in scheduled.rows if row.request_id in self.failing}
        tokens, drafted, available = [], [], []
        for row in sampling:
            first = row.num_computed_tokens + row.num_new_tokens  # of its prompt; only looked at then
            place = self.num_tokens.setdefault(row.request_id, first)
            num_drafted = min(row.num_draft_tokens, place % 5)
            num_tokens = 0 if row.request_id in failed else 1 + min(num_drafted, place % 3)
            tokens.append(list(range(place, place + num_tokens)))
            drafted.append(num_drafted)
            self.num_tokens[row.request_id] += num_tokens
            available.append((place + num_tokens) % 5)
        result = ModelRunnerOutput(tokens, failed=failed or None)
        if self.scheduler.config.speculation is not None:
            result = replace(result, num_drafted=drafted, num_available=available)
        outputs = self.scheduler.update(scheduled, result, now)
        self.note(outputs)
        self.writer.update(scheduled, result, outputs, now=now, seconds=seconds)

    def note(self, outputs) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
                del self.open[output.request_id]

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.open and not self.in_flight:
                break
            self.step()
        else:
            raise AssertionError("the run does not come to an end")
        self.writer.close()


def start_run(
    path: Path, config: SchedulerConfig, *, depth: int = 1, model: StepTimeModel | None = None
) -> RecordedRun:
    step_time = None if model is None else {"model": "of the test"}
    writer = create_record(path)(make_header(config, max_in_flight_steps=depth, step_time=step_time))
    return RecordedRun(config, writer, depth=depth, model=model)
