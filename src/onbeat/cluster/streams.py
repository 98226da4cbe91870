"""The requests that clients still wait for: what each has got, and what replicas say of it, in order."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from onbeat.cluster.gate import GatePort, id_in_use
from onbeat.cluster.life import Life
from onbeat.core import errors
from onbeat.core.fleet import ReplicaId, ReplicaLoad
from onbeat.core.protocols import StepObserver, StepOutputs
from onbeat.core.request import Placement, Request, RequestOutput, TokenLogprobs, overdue_error
from onbeat.core.slo import Fate
from onbeat.engine.messages import Fetched, Rejected, never_fits
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.scheduler.cluster.events import Aborted, Delivered, FleetEvent, Refuse, Refused, Send
from onbeat.scheduler.cluster.fleet import MOST_LIVES


class OutOfPlace(Exception):
    """A delivery that does not go on where the one before has ended."""


class Origin(NamedTuple):
    """Where a request was before it was moved."""

    replica: ReplicaId
    name: str
    """Under which that had it."""
    why: str
    """It was moved, one word."""


@dataclass(slots=True)
class OpenRequest:
    """One request, whichever replicas it has been on."""

    request: Request
    gate: GatePort
    """Who asked for it."""
    token_ids: list[int] = field(default_factory=list)
    """Output tokens that its client has got."""
    first_token_time: float | None = None
    name: str = ""
    """Under which its replica has it; another each time, lest it be mixed up with what an earlier one has."""
    replica: ReplicaId | None = None
    """Where it is; None while nobody has it."""
    has_begun: bool = False
    """Whether this replica, or one that it was moved from, has delivered tokens since it was sent."""
    num_sent: int = 0
    mark: str = ""
    """In its names, where a keeper, perhaps this one, has had it before under others."""
    num_unreported: int = 0
    """Tokens of which the fleet has not been told."""
    sent_time: float = 0.0
    predicted_ttft: float | None = None
    """Predicted as it was sent, seconds from then; None: by nobody, or it has tokens already."""
    last_token_time: float = 0.0
    """When its client got its last tokens."""
    moved_from: float | None = None
    """`last_token_time` before it was moved; None once there were tokens since."""
    placement: Placement | None = None
    """Where it was sent last, until its client is told."""
    rejection: errors.RequestRejected | None = None
    """Why the last replica that refused it did."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """What its present replica has said of them; they come in parts, before its first token."""
    _preemptions: int = 0
    _drafted: int = 0
    _accepted: int = 0
    _last: RequestOutput | None = None

    def next_attempt(self, replica: ReplicaId) -> Request:
        """Return what is sent to a replica: the request, with what its client has got as output so far."""
        self.replica, self.has_begun, self.prompt_logprobs = replica, False, []
        self.name = self._new_name()
        if (last := self._last) is not None:  # the next replica counts from nothing
            self._preemptions, self._drafted = last.num_preemptions, last.num_drafted_tokens
            self._accepted = last.num_accepted_tokens
        if self.num_sent == 1:
            return self.request
        return replace(
            self.request,
            request_id=self.name,
            resumed_token_ids=tuple(self.token_ids),
            first_token_time=self.first_token_time,
        )

    def next_name(self) -> Request:
        """Return the request under the name that it has where it is moved to."""
        return replace(self.request, request_id=self._new_name(), first_token_time=self.first_token_time)

    def _new_name(self) -> str:
        self.num_sent += 1
        request_id = self.request.request_id
        return request_id if self.num_sent == 1 else f"{request_id}{self.mark}~{self.num_sent}"

    def move_to(self, replica: ReplicaId, name: str) -> None:
        """Take tokens from another replica, which goes on with it under another name."""
        self.replica, self.name = replica, name
        self.moved_from = self.last_token_time
        if (last := self._last) is not None:  # drafts are counted anew there, preemptions are not
            self._drafted, self._accepted = last.num_drafted_tokens, last.num_accepted_tokens

    def expect(self, now: float, predicted_ttft: float | None) -> None:
        """Note what was predicted of a request that is sent now."""
        self.sent_time = now
        self.predicted_ttft = None if self.token_ids else predicted_ttft

    def take(self, output: RequestOutput, now: float) -> RequestOutput:
        """Take a delivery of the present replica, and return it as the request's client is to see it.

        Raises
        ------
        OutOfPlace : tokens are missing before it, or it repeats some.
        """
        if output.num_previous_tokens != len(self.token_ids):
            raise OutOfPlace(
                f"tokens of position {output.num_previous_tokens} came where {len(self.token_ids)} are known"
            )
        if output.new_token_ids:
            if self.first_token_time is None:
                self.first_token_time = now
            self.last_token_time = now
            self.token_ids += output.new_token_ids
            self.num_unreported += len(output.new_token_ids)
        if self.num_sent > 1:
            output.request_id = self.request.request_id
            output.num_preemptions += self._preemptions
            output.num_drafted_tokens += self._drafted
            output.num_accepted_tokens += self._accepted
            if len(self.token_ids) > len(output.new_token_ids):
                output.predicted_ttft = None  # of a first token that has come long ago
        output.placement, self.placement = self.placement, None
        self._last = output
        return output


LOSSES = ("replica_lost", "too_many_lives")
"""The reasons of a refusal that are deaths of replicas."""


def refusal(action: Refuse, open_request: OpenRequest) -> errors.OnbeatError:
    """Return what a request's client gets to know."""
    rejection = open_request.rejection
    match action.reason:
        case "overloaded" | "invalid" if rejection is not None:
            if isinstance(rejection, errors.Overloaded | errors.SLOUnattainable) and not never_fits(
                rejection
            ):
                rejection.retry_after = action.retry_after or rejection.retry_after
            return rejection
        case "too_long":
            return errors.PromptTooLong("no replica that is ready takes a prompt as long; shorten it")
        case "unattainable":
            wait = action.retry_after or 0.0
            return errors.SLOUnattainable(
                f"the TTFT objective cannot be met: a replica is starting, which takes another {wait:.0f} s",
                predicted_ttft=wait,
                retry_after=wait,
            )
        case "no_replica" if action.retry_after is not None:
            return errors.Overloaded(
                "no replica takes requests at present; the next one is expected in "
                f"{action.retry_after:.0f} s, later than this request may wait: try again then",
                code="no_replica",
                retry_after=action.retry_after,
            )
        case "no_replica" | "overloaded":
            return errors.Overloaded(
                "no replica takes requests at present; try again later",
                code="no_replica" if action.reason == "no_replica" else "server_overloaded",
                retry_after=action.retry_after,
                reason="no_replica",
            )
        case "replica_lost":
            return not_resumed()
    return errors.EngineError(
        f"{MOST_LIVES} replicas in a row ended while they had the request, before its next token; it may be "
        "the cause, and is not tried again"
    )


def not_resumed() -> errors.EngineError:
    """Return why a request ends that does not go on elsewhere."""
    return errors.EngineError(
        "the process that had the request has ended, and the request was not to be resumed; send it again"
    )


logger = logging.getLogger("onbeat.cluster")


class Streams:
    """Hands each request's deliveries to its stream, and tells the fleet of them.

    Parameters
    ----------
    tell : tells the fleet of an event.
    observers : see of every step message what is of no request.

    Attributes
    ----------
    open : the requests that have not ended, by id.
    counts : what the fleet does with requests, for metrics.
    """

    def __init__(self, tell: Callable[[FleetEvent], None], observers: Sequence[StepObserver] = ()) -> None:
        self._tell = tell
        self.observers = list(observers)
        self.open: dict[str, OpenRequest] = {}
        self.by_name: dict[str, OpenRequest] = {}
        """Requests by the names under which replicas have them."""
        self.counts = FleetCounts()
        self._marks = count(1)

    def begin(self, request: Request, gate: GatePort) -> None:
        """Take in a request that a gate asks for.

        Raises
        ------
        InvalidRequest : another one has its id.
        """
        if request.request_id in self.open:
            raise id_in_use(request.request_id)
        open_request = self.open[request.request_id] = OpenRequest(request, gate)
        if request.resumed_token_ids:  # another keeper had it
            open_request.token_ids = list(request.resumed_token_ids)
            open_request.first_token_time, open_request.num_sent = request.first_token_time, 1
            # where a connection breaks twice, what a replica still tells of the first time is none of this
            open_request.mark = f"~{next(self._marks)}"

    def end(self, request_id: str) -> None:
        """Forget a request; nothing happens where that is done."""
        if (open_request := self.open.pop(request_id, None)) is not None:
            self.by_name.pop(open_request.name, None)

    def by_replica(self, num_fetched: Mapping[str, int]) -> dict[ReplicaId, Fetched]:
        """Return what replicas are told, in their own names, where clients have taken so many tokens."""
        told: dict[ReplicaId, Fetched] = defaultdict(lambda: Fetched({}))
        for request_id, num_tokens in num_fetched.items():
            open_request = self.open.get(request_id)
            if open_request is not None and open_request.replica is not None:
                told[open_request.replica].num_tokens[open_request.name] = num_tokens
        return told

    def before_send(self, action: Send, now: float) -> None:
        """Hear where a request goes now."""
        open_request = self.open[action.request_id]
        self.by_name.pop(open_request.name, None)
        self.counts.count_routed(action.replica, action.why, num_sent_tokens=len(open_request.token_ids))
        open_request.expect(now, action.predicted_ttft)
        open_request.placement = Placement(action.replica, action.why)

    def on_sent(self, open_request: OpenRequest) -> None:
        """Hear that a request has its name there."""
        self.by_name[open_request.name] = open_request

    def on_refused(self, action: Refuse) -> None:
        """Hear that nobody will serve a request."""
        open_request = self.open[action.request_id]
        open_request.replica = None
        self.counts.num_failed += action.reason in LOSSES or bool(open_request.token_ids)
        open_request.gate.refuse(action.request_id, refusal(action, open_request))
        self.end(action.request_id)

    def on_moved(self, open_request: OpenRequest, origin: Origin) -> None:
        """Hear that a request goes on elsewhere with its KV."""
        self.by_name.pop(origin.name, None)
        self.by_name[open_request.name] = open_request
        assert open_request.replica is not None
        self.counts.count_move(origin.replica, open_request.replica, origin.why)

    def on_lost(self, replica: ReplicaId) -> None:
        """Hear that a replica was lost."""
        self.counts.lost[replica] += 1

    def before_report(self, replica: ReplicaId, load: ReplicaLoad) -> ReplicaLoad:
        """Hear how a replica stands; return that with the fleet's name of a request in place of its own.

        The fleet must know how far that request is, since it may go elsewhere.
        """
        if not load.blocked:
            return load
        open_request = self.by_name.get(load.blocked)
        if open_request is None or open_request.replica != replica:
            return replace(load, blocked="")
        if open_request.num_unreported:
            self._report(open_request, replica, is_finished=False)
        return replace(load, blocked=open_request.request.request_id)

    def before_loss(self, replica: ReplicaId) -> None:
        """Hear that what a replica has will go elsewhere: the fleet must know how far its requests are."""
        for open_request in list(self.open.values()):
            if open_request.replica == replica and open_request.num_unreported:
                self._report(open_request, replica, is_finished=False)

    def on_stepped(self, life: Life, outputs: StepOutputs) -> None:
        """Hear what a step of a replica delivered."""
        now, replica = outputs.now, life.replica
        deliveries: dict[GatePort, list[RequestOutput]] = defaultdict(list)
        heard: list[tuple[OpenRequest, RequestOutput, bool]] = []
        for output in outputs.outputs:
            open_request = self.by_name.get(output.request_id)
            if open_request is None or open_request.replica != replica:
                continue  # taken back or ended since
            if output.fate is Fate.OVERDUE:
                open_request.rejection = overdue_error(output)
                self._tell_refusal(open_request, replica, is_for_load=True, retry_after=output.retry_after)
                continue
            if (taken := self._take(open_request, output, now)) is not None:
                deliveries[open_request.gate].append(taken)
                is_first = not open_request.has_begun and bool(taken.new_token_ids)
                if is_first or taken.finish_reason is not None:
                    heard.append((open_request, taken, is_first))
        outputs.outputs = []
        for observer in self.observers:
            observer.on_step(outputs, life.replica_number)
        for gate, taken_outputs in deliveries.items():
            gate.deliver(now, taken_outputs, life.replica_number)
        for open_request, output, is_first in heard:
            open_request.has_begun |= is_first
            if is_first and open_request.predicted_ttft is not None:
                self.counts.count_prediction(open_request.predicted_ttft, now - open_request.sent_time)
            is_finished = output.finish_reason is not None
            self._report(open_request, replica, is_finished=is_finished, cached=output.num_cached_tokens)

    def _take(self, open_request: OpenRequest, output: RequestOutput, now: float) -> RequestOutput | None:
        if open_request.moved_from is not None and output.new_token_ids:
            self.counts.move_gap.observe(now - open_request.moved_from)
            open_request.moved_from = None
        if output.prompt_logprobs is not None:
            open_request.prompt_logprobs += output.prompt_logprobs
            output.prompt_logprobs = open_request.prompt_logprobs
            if not output.new_token_ids and output.finish_reason is None:
                return None  # the rest of them follows
        try:
            return open_request.take(output, now)
        except OutOfPlace as error:
            logger.exception("the deliveries of %s do not fit together", open_request.name)
            request_id = open_request.request.request_id
            open_request.gate.refuse(
                request_id, errors.EngineError(f"the deliveries do not fit together: {error}")
            )
            self.abort(request_id)
            return None

    def abort(self, request_id: str) -> None:
        """Let go of a request; nothing happens where it has ended."""
        if request_id in self.open:
            self._tell(Aborted(request_id))
            self.end(request_id)

    def _report(
        self, open_request: OpenRequest, replica: ReplicaId, *, is_finished: bool, cached: int = 0
    ) -> None:
        """Tell the fleet how far a request is: at its first tokens, its end, and before it moves."""
        num_tokens, open_request.num_unreported = open_request.num_unreported, 0
        self._tell(Delivered(replica, open_request.request.request_id, num_tokens, cached, is_finished))
        if is_finished:
            open_request.replica = None
            self.end(open_request.request.request_id)

    def on_rejected(self, life: Life, rejected: Rejected) -> None:
        """Hear that a replica does not take a request."""
        open_request = self.by_name.get(rejected.request_id)
        if open_request is None or open_request.replica != life.replica:
            return
        error = rejected.error()
        assert isinstance(error, errors.RequestRejected)
        if open_request.rejection is None or not never_fits(error):  # another replica may be faster
            open_request.rejection = error
        is_for_load = isinstance(error, errors.Overloaded | errors.SLOUnattainable)
        retry_after = rejected.details.get("retry_after")
        self._tell_refusal(open_request, life.replica, is_for_load=is_for_load, retry_after=retry_after)

    def _tell_refusal(
        self, open_request: OpenRequest, replica: ReplicaId, *, is_for_load: bool, retry_after: float | None
    ) -> None:
        open_request.replica = None
        self._tell(Refused(replica, open_request.request.request_id, is_for_load, retry_after))
