"""A request that its client still waits for: what it has got, and where the rest comes from."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from onbeat.core.errors import OnbeatError, RequestRejected
from onbeat.core.fleet import ReplicaId
from onbeat.core.protocols import Delivery
from onbeat.core.request import Request, RequestOutput

MOST_AT_ONCE = 32
"""Streams that go on in one round of the event loop: a step may have something for hundreds."""


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
    stream: asyncio.Queue[Delivery | OnbeatError] = field(default_factory=asyncio.Queue)
    token_ids: list[int] = field(default_factory=list)
    """Output tokens that its client has got."""
    first_token_time: float | None = None
    name: str = ""
    """Under which its present replica has it: another one each time that it is sent, so that what an earlier
    owner still says of it is not taken for its own."""
    replica: ReplicaId | None = None
    """Where it is; None while nobody has it."""
    has_begun: bool = False
    """Whether this replica, or one that it was moved from, has delivered tokens since it was sent."""
    num_sent: int = 0
    num_unreported: int = 0
    """Tokens of which the fleet has not been told."""
    sent_time: float = 0.0
    predicted_ttft: float | None = None
    """As the router predicted when it was sent, seconds from then; None where it did not, and for one that
    has tokens already."""
    is_aborted: bool = False
    """Whether its replica has been told to end it."""
    last_token_time: float = 0.0
    """When its client got its last tokens."""
    moved_from: float | None = None
    """`last_token_time` before it was moved; None once there were tokens since."""
    rejection: RequestRejected | None = None
    """Why the last replica that refused it did."""
    _preemptions: int = 0
    _drafted: int = 0
    _accepted: int = 0
    _last: RequestOutput | None = None

    def next_attempt(self, replica: ReplicaId) -> Request:
        """Return what is sent to a replica: the request, with what its client has got as output so far."""
        self.replica, self.has_begun = replica, False
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
        return request_id if self.num_sent == 1 else f"{request_id}~{self.num_sent}"

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
        self._last = output
        return output


class HandOut:
    """Puts into streams what comes for them, in order, for a few streams in each round of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[OpenRequest, Delivery | OnbeatError]] = deque()
        self._num_put = 0
        self._is_due = False

    def put(self, open_request: OpenRequest, item: Delivery | OnbeatError) -> None:
        """Put an item into a request's stream, now or in one of the next rounds."""
        self._waiting.append((open_request, item))
        self._put_some()

    def _put_some(self) -> None:
        while self._waiting and self._num_put < MOST_AT_ONCE:
            open_request, item = self._waiting.popleft()
            open_request.stream.put_nowait(item)
            self._num_put += 1
        if self._num_put and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_due, self._num_put = False, 0
        self._put_some()
