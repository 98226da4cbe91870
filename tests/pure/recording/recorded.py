"""A scheduler driver that keeps a record of what it does."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict
from pathlib import Path
from random import Random

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.handover import Detached
from onbeat.core.request import FinishReason, Request
from onbeat.core.step import GuidedRows, ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.recording.log import RecordedAdoption, RecordHeader
from onbeat.recording.writer import RecordWriter, create_record
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig


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
        self.delivered: Counter[str] = Counter()
        """Tokens that requests have got."""
        self.requests: dict[str, Request] = {}
        self.detached: dict[str, Detached] = {}
        self.has_handovers = False
        self.num_adopted = 0

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
            self.requests[request.request_id] = request
            self.writer.add(request, now)

    def abort(self, *request_ids: str) -> None:
        self.note(self.scheduler.abort(request_ids))
        self.writer.abort(request_ids, self.tick())

    def hand_over(self, pick: Random, verb: str) -> None:
        """Ask for a verb of hand-overs, of some request or of one of two rooms."""
        self.has_handovers = True
        handover, note, now = self.scheduler.handover, self.writer.handover, self.tick()
        name = pick.choice([*self.open, *self.detached, "unknown"])
        room = pick.choice(["one", "two"])
        match verb:
            case "hold":
                note("hold", name, now, block_ids=handover.hold(name, now + 30))
            case "unhold":
                handover.release_hold(name)
                note("unhold", name, now)
            case "reserve":
                num_tokens = pick.randrange(1, 120)
                block_ids = handover.reserve(room, num_tokens, now + 30)
                note("reserve", room, now, num_tokens=num_tokens, block_ids=block_ids)
            case "release":
                handover.release_reservation(room)
                note("release", room, now)
            case "detach":
                if name in self.open:
                    handover.detach(name)
                    note("detach", name, now)
            case "reattach":
                note("reattach", name, now, is_out=handover.reattach(name))
                self.detached.pop(name, None)
            case "adopt":
                self.adopt(room, name, now)
        self.take_detached()

    def adopt(self, room: str, name: str, now: float) -> None:
        """Move a request within the scheduler: it leaves, and comes again by a hand-over."""
        if (detached := self.detached.pop(name, None)) is None:
            return
        handover, request = self.scheduler.handover, self.requests[name]
        num_tokens = len(request.prompt_token_ids) + len(detached.output_token_ids)
        block_ids = handover.reserve(room, num_tokens, now + 30)
        self.writer.handover("reserve", room, now, num_tokens=num_tokens, block_ids=block_ids)
        holds_batches = POLICIES[self.scheduler.config.policy].holds_finished
        if block_ids is None or holds_batches:
            self.writer.handover("reattach", name, now, is_out=handover.reattach(name))
            return
        handover.free(name)
        self.writer.handover("free", name, now)
        moved = detached.moved(request)
        handover.adopt(room, moved, detached, now)
        self.writer.add(moved, now, adoption=RecordedAdoption.of(room, detached))
        self.num_adopted += 1

    def take_detached(self) -> None:
        for request_id, detached in self.scheduler.handover.take_detached():
            self.writer.handover("left", request_id, self.tick(), is_out=detached is not None)
            if detached is not None:
                self.detached[request_id] = detached

    def step(self) -> None:
        now, before = self.tick(), self.scheduler.table.num_preemptions
        scheduled = self.scheduler.schedule(now)
        expired = self.scheduler.planner.take_expired()
        self.note(expired)
        model = self.scheduler.step_time_model
        self.writer.schedule(
            scheduled,
            now,
            num_preempted=self.scheduler.table.num_preemptions - before,
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
            result = result._replace(num_drafted=drafted, num_available=available)
        if guided := [row.request_id for row in sampling if self.is_guided(row.request_id)]:
            # by the place of the token, some grammars are complete, and some cannot be followed
            ends = {name: self.num_tokens[name] % 31 for name in guided if name not in failed}
            faults = {name: "lost" for name, end in ends.items() if end == 7}
            completed = [name for name, end in ends.items() if end == 11]
            took = {name: 0.004 * (self.num_tokens[name] % 7) for name in guided}
            rows = GuidedRows(frozenset(completed), faults, seconds=0.001 * len(guided), row_seconds=took)
            result = result._replace(guided=rows)
        outputs = self.scheduler.update(scheduled, result, now)
        self.note(outputs)
        self.writer.update(scheduled, result, outputs, now=now, seconds=seconds)
        self.take_detached()

    def is_guided(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.sampling.grammar is not None

    def note(self, outputs) -> None:
        for output in outputs:
            self.delivered[output.request_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
                del self.open[output.request_id]
                self.detached.pop(output.request_id, None)

    def end_handovers(self) -> None:
        """Let every request go on here, and give everything back."""
        while self.in_flight:
            self.collect(self.in_flight.popleft())
        for name in list(self.detached):
            self.writer.handover("reattach", name, self.tick(), is_out=self.scheduler.handover.reattach(name))
        for room in ("one", "two"):
            self.scheduler.handover.release_reservation(room)
            self.writer.handover("release", room, self.tick())
        for name in self.requests:
            self.scheduler.handover.release_hold(name)
            self.writer.handover("unhold", name, self.tick())

    def finish(self) -> None:
        if self.has_handovers:
            self.end_handovers()
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
