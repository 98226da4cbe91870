"""Feed a recorded run to the scheduler again and see whether it decides the same.

The decisions of a recorded fleet are made once more, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isclose
from pathlib import Path
from typing import Any, get_args

from onbeat.core import request as core_request
from onbeat.core.errors import ConfigError, Overloaded, RequestRejected, SLOUnattainable, quoted
from onbeat.core.handover import Detached
from onbeat.core.protocols import StepOutputs
from onbeat.core.slo import SLO
from onbeat.core.step import GuidedRows, ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.recording import log
from onbeat.recording.fleet_log import FleetRecording, named
from onbeat.recording.reader import Recording
from onbeat.scheduler.cluster.events import FleetEvent
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetRules
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.typed import revive

STOP_TOKEN_ID = -1
"""Stands for whatever token ended a request; no tokenizer has it."""
OTHER_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that came out differently."""

    call_index: int
    """Counted from 0, the header aside."""
    step_id: int | None
    what: str
    recorded: str
    replayed: str


@dataclass(slots=True)
class ReplayResult:
    """What the comparison of a record with its replay found."""

    num_calls: int = 0
    """Calls that were fed and compared."""
    num_requests: int = 0
    num_rejected: int = 0
    """Requests that were refused for want of capacity."""
    num_expired: int = 0
    """Requests that were ended in the queue."""
    num_aborted: int = 0
    num_failed: int = 0
    num_steps: int = 0
    """Planned steps that were compared."""
    num_rows: int = 0
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    num_predictions: int = 0
    """Recorded step-time predictions that were compared with those of the model, which learns as it goes."""
    difference: Difference | None = None

    @property
    def is_identical(self) -> bool:
        return self.difference is None


def scheduler_config(header: log.RecordHeader) -> SchedulerConfig:
    """Return the configuration that a record was made with.

    Raises
    ------
    ConfigError : this version has no such configuration; names the fields.
    """
    try:
        return revive(SchedulerConfig, header.scheduler, "the record's scheduler configuration")
    except ConfigError as error:
        raise ConfigError(f"{error}; replay it with onbeat {header.onbeat_version}") from error


@contextmanager
def possible(path: Path, number: int) -> Iterator[None]:
    """Run what takes in the call of a line of a record.

    Raises
    ------
    ConfigError : nobody can have been called so: the file was edited.
    """
    try:
        yield
    except (AssertionError, ArithmeticError, LookupError) as error:
        raise ConfigError(
            f"{path}, line {number}: nobody can have been called so ({error or 'it is damaged'}); record the "
            "run again"
        ) from error


class Replay:
    """A scheduler that is asked again what a recorded one was asked.

    Parameters
    ----------
    recording : the record.
    step_time_model : told of the recorded step times, as the recorded scheduler told its own.
    """

    def __init__(self, recording: Recording, step_time_model: StepTimeModel | None = None) -> None:
        self._recording = recording
        self.scheduler = Scheduler(scheduler_config(recording.header), step_time_model)
        self.result = ReplayResult()
        self._ids: dict[int, str] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._left: list[tuple[str, Detached | None]] = []
        """Answers of the scheduler that the record has not come to."""

    def run(self) -> ReplayResult:
        """Feed all calls; stop at the first difference."""
        for _ in self.deliveries():
            pass
        return self.result

    def deliveries(self) -> Iterator[StepOutputs]:
        """Feed call after call and yield what requests got; `result` grows meanwhile."""
        feed: dict[type, Callable[[Any], list[core_request.RequestOutput] | None]] = {
            log.AddCall: self._add,
            log.AbortCall: self._abort,
            log.ScheduleCall: self._schedule,
            log.UpdateCall: self._update,
            log.HandoverCall: self._hand_over,
        }
        for call in self._recording.calls():
            with possible(self._recording.path, self.result.num_calls + 2):
                outputs = feed[type(call)](call)
            if self.result.difference is not None:
                return
            self.result.num_calls += 1
            if outputs:
                yield StepOutputs(call.now, outputs)
        self.result.num_preemptions = self.scheduler.table.num_preemptions
        self.result.num_prefix_hits = self.scheduler.table.num_prefix_hits

    def _add(self, call: log.AddCall) -> None:
        self._ids[call.request] = call.request_id
        self.result.num_requests += 1
        request = core_request.Request(
            request_id=call.request_id,
            prompt_token_ids=range(call.num_prompt_tokens),
            resumed_token_ids=range(call.num_resumed_tokens),
            first_token_time=call.first_token_time,
            sampling=core_request.SamplingParams(
                max_tokens=call.max_tokens,
                stop_token_ids=(STOP_TOKEN_ID,),
                grammar=replace(core_request.UNKNOWN_GRAMMAR, seconds=call.guide_seconds)
                if call.is_guided
                else None,
            ),
            block_hashes=self._recording.block_hashes(call.request),
            slo=recorded_slo(call),
            slo_class=call.slo_class,
            tenant=call.tenant,
            whole=None if call.whole is None else core_request.WholeRequest(*call.whole),
            num_prompt_logprobs=0 if call.is_scored else None,
            **{name: getattr(call, name) for name in log.AS_THEY_ARE},
        )
        if call.adoption is not None:
            self._adopt(call, call.adoption, request)
            return
        refusal = None
        try:
            self.scheduler.add(request, call.now)
        except (Overloaded, SLOUnattainable) as error:
            refusal = log.RecordedRefusal.of(error)
        except RequestRejected as error:
            raise ConfigError(
                f"{self._recording.path}: no server can have taken request {quoted(call.request_id)}: {error}"
            ) from error
        self.result.num_rejected += refusal is not None
        if not _is_same_refusal(call.refused, refusal):
            self._compare(None, f"refusal of {call.request_id}", call.refused, refusal)

    def _adopt(
        self, call: log.AddCall, adoption: log.RecordedAdoption, request: core_request.Request
    ) -> None:
        detached = Detached(
            request_id=call.request_id,
            output_token_ids=tuple(request.resumed_token_ids),
            num_kv_tokens=call.num_external_tokens,
            block_ids=(),
            scheduled_time=adoption.scheduled_time,
            num_cached_tokens=adoption.num_cached_tokens,
            num_preemptions=adoption.num_preemptions,
            deadlines=adoption.deadlines,
        )
        try:
            self.scheduler.handover.adopt(adoption.handover_id, request, detached, call.now)
        except RequestRejected as error:
            self._compare(None, f"adoption of {call.request_id}", "done", str(error))

    def _hand_over(self, call: log.HandoverCall) -> None:
        """Ask the scheduler's hand-overs again; leases end where the record released them."""
        handover, name = self.scheduler.handover, call.id
        block_ids: tuple[int, ...] | None = None
        is_out: bool | None = None
        match call.verb:
            case "hold":
                block_ids = handover.hold(name, inf)
            case "unhold":
                handover.release_hold(name)
            case "reserve":
                assert call.num_tokens is not None
                block_ids = handover.reserve(name, call.num_tokens, inf)
            case "release":
                handover.release_reservation(name)
            case "detach":
                handover.detach(name)
            case "left":
                self._left += handover.take_detached()
                is_out = any(left == name and detached is not None for left, detached in self._left)
                self._left = [each for each in self._left if each[0] != name]
            case "reattach":
                is_out = handover.reattach(name)
            case "free":
                handover.free(name)
            case "fetched":
                self.scheduler.on_fetched({name: call.num_tokens or 0}, call.now)
        recorded, replayed = (call.block_ids, call.is_out), (block_ids, is_out)
        self._compare(None, f"answer to {call.verb} of {name} (blocks, is out)", recorded, replayed)

    def _abort(self, call: log.AbortCall) -> list[core_request.RequestOutput]:
        outputs = self.scheduler.abort([self._ids[request] for request in call.requests])
        self.result.num_aborted += len(call.requests)
        aborted = [output.request_id for output in outputs]
        self._compare(None, "aborted requests", [self._ids[request] for request in call.requests], aborted)
        return outputs

    def _schedule(self, call: log.ScheduleCall) -> list[core_request.RequestOutput]:
        scheduled = self.scheduler.schedule(call.now)
        expired = self.scheduler.planner.take_expired()
        self.result.num_expired += len(expired)
        ended = [output.request_id for output in expired]
        self._compare(call.step_id, "expired requests", [self._ids[each] for each in call.expired], ended)
        if scheduled is not None:
            self._in_flight.append(scheduled)
        if call.step_id is None or scheduled is None:
            self._compare(
                call.step_id, "step", call.step_id, None if scheduled is None else scheduled.step_id
            )
        else:
            self._compare_step(call, scheduled)
        return expired

    def _compare_step(self, call: log.ScheduleCall, scheduled: SchedulerOutput) -> None:
        self.result.num_steps += 1
        self.result.num_rows += len(call.rows)
        for what, recorded, replayed in self._sides(call, scheduled):
            self._compare(call.step_id, what, recorded, replayed)
        model = self.scheduler.step_time_model
        if model is not None and call.predicted_seconds is not None:
            self.result.num_predictions += 1
            seconds = model.step_time(scheduled.shape)
            # Logarithms may differ in the last digit from machine to machine.
            if not isclose(seconds, call.predicted_seconds, rel_tol=1e-9):
                self._compare(call.step_id, "predicted seconds", call.predicted_seconds, seconds)

    def _sides(self, call: log.ScheduleCall, scheduled: SchedulerOutput) -> Iterator[tuple[str, Any, Any]]:
        """Yield each part of a step as it was recorded and as it is now."""
        ids = self._ids
        yield "step", call.step_id, scheduled.step_id
        released = [name if isinstance(name, str) else ids[name] for name in call.released]
        yield "released requests", released, list(scheduled.released_ids)
        recorded_rows = [(ids[row.request], *row[1:]) for row in call.rows]
        rows = [(row.request_id, *row[1:3], row.samples, row.num_draft_tokens) for row in scheduled.rows]
        if recorded_rows != rows:
            yield from _row_sides(recorded_rows, rows)
        recorded_blocks = [call.new_block_ids.get(index, ()) for index in range(len(call.rows))]
        yield "new blocks by row", recorded_blocks, [row.new_block_ids for row in scheduled.rows]
        yield (
            "admitted requests (id, output tokens, blocks)",
            [(ids[admission.request], *admission[1:]) for admission in call.admitted],
            [
                (admitted.request.request_id, len(admitted.output_token_ids), admitted.block_ids)
                for admitted in scheduled.admitted
            ],
        )

    def _update(self, call: log.UpdateCall) -> list[core_request.RequestOutput]:
        if not self._in_flight:
            self._compare(call.step_id, "step in flight", call.step_id, None)
            return []
        scheduled = self._in_flight.popleft()
        outputs = self.scheduler.update(scheduled, self._results(call, scheduled), call.now)
        self.result.num_failed += len(call.failed)
        recorded = {self._ids[request]: reason.value for request, reason in call.finished.items()}
        recorded |= {self._ids[request]: core_request.FinishReason.ERROR.value for request in call.failed}
        replayed = {
            output.request_id: output.finish_reason.value
            for output in outputs
            if output.finish_reason is not None
        }
        self._compare(call.step_id, "requests that ended", recorded, replayed)
        return list(outputs)

    def _results(self, call: log.UpdateCall, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Make tokens that do what the recorded ones did: as many, and an end where there was one."""
        stopped = {
            self._ids[request]
            for request, reason in call.finished.items()
            if reason == core_request.FinishReason.STOP.value
        }
        ids = [row.request_id for row in scheduled.rows if row.samples]
        counts = (1,) * len(ids) if call.counts is None else call.counts
        sampled = [
            [OTHER_TOKEN_ID] * (count - 1) + [STOP_TOKEN_ID if request_id in stopped else OTHER_TOKEN_ID]
            if count
            else []
            for request_id, count in zip(ids, counts, strict=True)
        ]
        for row, count in call.undelivered.items():
            sampled[row] += [OTHER_TOKEN_ID] * count
        broken = {self._ids[request]: "failed in the recorded run" for request in call.failed}
        faults = {name: broken.pop(name) for name in map(self._ids.__getitem__, call.faults)}
        guided = None
        if call.guide_seconds is not None:
            took = {self._ids[request]: seconds for request, seconds in call.row_guide_seconds.items()}
            guided = GuidedRows(faults=faults, seconds=call.guide_seconds, row_seconds=took)
        return ModelRunnerOutput(
            sampled,
            failed=broken or None,
            num_drafted=None if call.drafted is None else list(call.drafted),
            num_available=None if call.available is None else list(call.available),
            guided=guided,
        )

    def _compare(self, step_id: int | None, what: str, recorded: object, replayed: object) -> None:
        """Keep the first difference."""
        if recorded != replayed and self.result.difference is None:
            self.result.difference = Difference(
                self.result.num_calls, step_id, what, _shown(recorded), _shown(replayed)
            )


def recorded_slo(call: log.AddCall) -> SLO | None:
    """Return the objectives of a recorded request."""
    if call.slo is None:
        return None
    ttft, tbt, e2e = call.slo
    return SLO(ttft=ttft, tbt=tbt, e2e=e2e)


def _is_same_refusal(recorded: log.RecordedRefusal | None, replayed: log.RecordedRefusal | None) -> bool:
    if recorded is None or replayed is None:
        return recorded is replayed
    return recorded.code == replayed.code and all(
        before == now or (before is not None and now is not None and isclose(before, now, rel_tol=1e-9))
        for before, now in zip(recorded[1:], replayed[1:], strict=True)
    )


def _row_sides(
    recorded: Sequence[tuple[object, ...]], replayed: Sequence[tuple[object, ...]]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the first row that differs, or the numbers of rows."""
    for index, (before, now) in enumerate(zip(recorded, replayed, strict=False)):
        if before != now:
            yield f"row {index} of {len(recorded)} (id, computed, new, samples, drafts)", before, now
            return
    yield "number of rows", len(recorded), len(replayed)


def _shown(value: object) -> str:
    """Return a value as one line of a readable length."""
    match value:
        case None:
            return "nothing"
        case Mapping() if not value:
            return "none"
        case _:
            text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."


_EVENTS = {kind.__name__: kind for kind in get_args(FleetEvent)}


@dataclass(slots=True)
class FleetReplay:
    """What a replay of a fleet found."""

    router: str
    num_calls: int = 0
    num_actions: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """Kind -> how many."""
    actions: Counter[str] = field(default_factory=Counter)
    """Kind, or why a request was sent or refused -> how many."""
    is_complete: bool = True
    difference: FleetDifference | None = None
    """The first; nothing is replayed behind it."""

    @property
    def is_identical(self) -> bool:
        """Whether all decisions were made again."""
        return self.difference is None


@dataclass(frozen=True, slots=True)
class FleetDifference:
    """A call whose actions are others than those recorded."""

    line: int
    event: str
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]


def replay_fleet(recording: FleetRecording) -> FleetReplay:
    """Make every call of a record again, and compare the actions.

    Raises
    ------
    ConfigError : the record is damaged or cut short, or names what this onbeat does not know.
    """
    header = recording.header
    try:
        router = make_router(str(header["router"]))
        fleet = Fleet(router, revive(FleetRules, header.get("fleet", {}), "fleet"))
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{recording.path}, line 1: no fleet can be made of its header: {error}") from error
    found = FleetReplay(str(header["router"]))
    for number, call in recording.calls():
        where = f"{recording.path}, line {number}"
        event = _event(call.event, where)
        with possible(recording.path, number):
            replayed = [named(each) for each in fleet.on_event(event, call.now)]
        found.num_calls += 1
        found.num_actions += len(replayed)
        found.events[type(event).__name__] += 1
        for each in replayed:
            found.actions[str(each.get("why") or each.get("reason") or each.get("verb") or each["kind"])] += 1
        if replayed != call.actions:
            found.difference = FleetDifference(number, type(event).__name__, call.actions, replayed)
            break
    found.is_complete = recording.is_complete or found.difference is not None
    return found


def _event(values: Mapping[str, Any], where: str) -> FleetEvent:
    """Return an event from its line."""
    if (kind := _EVENTS.get(str(values.get("kind")))) is None:
        raise ConfigError(
            f"{where}: {quoted(values.get('kind'))} is no event of a fleet; known are {', '.join(_EVENTS)}"
        )
    event: FleetEvent = revive(kind, {key: each for key, each in values.items() if key != "kind"}, where)
    return event
