"""A front end's own part of a fleet: the streams of its clients, and what they have fetched.

Whoever decides, the keeper, is in this process or in another: a gate asks, and hears of deliveries.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from onbeat.core.errors import InvalidRequest, OnbeatError
from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.protocols import Delivery, StepObserver, StepOutputs
from onbeat.core.request import Request, RequestOutput
from onbeat.engine.messages import TOLD_TOKENS

MOST_AT_ONCE = 32
"""Streams that go on in one round of the event loop: a step may have something for hundreds."""
_BLOCKS_AT_ONCE = 512
"""Blocks that are hashed before others of the event loop have their turn, such as other choices' blocks."""


class Keeper(Protocol):
    """What a gate asks of whoever decides about requests."""

    @property
    def hashed_block_size(self) -> int:
        """Tokens of a block by which a router looks at prompts; 0 where none does."""

    def ask(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        """Have a request served; deliveries come to the gate, the last has a finish reason, or a refusal."""

    def abort(self, request_id: str) -> None:
        """Let go of a request; nothing happens where it has ended."""

    def fetched(self, num_tokens: Mapping[str, int]) -> None:
        """Hear how many output tokens of requests have been taken by their clients."""


class GatePort(Protocol):
    """What a keeper tells a gate."""

    def deliver(self, now: float, outputs: list[RequestOutput], replica: int) -> None:
        """Take what a step that ended at `now` brought the gate's requests, on the replica of that number."""

    def refuse(self, request_id: str, error: OnbeatError) -> None:
        """Hear that a request has ended by an error."""


@dataclass(slots=True)
class ClientStream:
    """What one request's client has yet to take."""

    request_id: str
    caller: str
    queue: asyncio.Queue[Delivery | OnbeatError] = field(default_factory=asyncio.Queue)
    waiting: deque[Delivery | OnbeatError] = field(default_factory=deque)
    """What `HandOut` has yet to put there."""
    since: float = 0.0
    """When it took its place in the line of its caller, seconds."""
    num_fetched: int = 0
    """Output tokens that have been taken out of its stream."""
    tell_at: int = TOLD_TOKENS
    """With so many its replica is to be told."""


class HandOut:
    """Puts into streams what comes for them, in order, for a few streams in each round of the event loop.

    Callers take turns, and so do the streams of each, with one delivery a turn. A first token so waits for at
    most one delivery of each other stream of its caller, however many of theirs wait.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[ClientStream]] = OrderedDict()
        """Callers in the order of their turns, and the streams of each likewise."""
        self._num_put = 0
        self._is_due = False
        self.way = self._due = self._turn = self._round = 0.0
        """Seconds that the last message of a replica was on its way, first of these."""

    @property
    def lag(self) -> float:
        """Seconds from the end of a step until a stream goes on with its delivery, if none of its own waits.

        The way of the last message of a replica, the last turn that a stream waited for, and the last round.
        """
        return self.way + self._turn + self._round

    def hear(self, made: float, now: float) -> None:
        """Hear how long a message of a replica has been on its way; there are two a second at least."""
        self.way = max(now - made, 0.0)
        if not self._is_due:
            self._round = 0.0

    def put(self, stream: ClientStream, item: Delivery | OnbeatError) -> None:
        """Put an item into a request's stream, now or in one of the next rounds."""
        if not self._is_due:
            self._go_on()
        if not self._lines and self._num_put < MOST_AT_ONCE:
            stream.queue.put_nowait(item)
            self._num_put += 1
        else:
            stream.waiting.append(item)
            if len(stream.waiting) == 1:
                self._line_up(stream, self._due)

    def _line_up(self, stream: ClientStream, now: float) -> None:
        stream.since = now
        self._lines.setdefault(stream.caller, deque()).append(stream)

    def _go_on(self) -> None:
        self._is_due, self._due = True, time.monotonic()
        asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_due, self._num_put = False, 0
        now = time.monotonic()
        self._round = now - self._due
        while self._lines and self._num_put < MOST_AT_ONCE:
            caller, line = self._lines.popitem(last=False)
            stream = line.popleft()
            if line:
                self._lines[caller] = line
            if stream.waiting:  # else it has ended since
                self._turn = now - stream.since
                stream.queue.put_nowait(stream.waiting.popleft())
                self._num_put += 1
            if stream.waiting:
                self._line_up(stream, now)
        if not self._lines:
            self._turn = 0.0
        if self._num_put:
            self._go_on()


class Gate:
    """Hands the deliveries of its clients' requests out.

    Parameters
    ----------
    keeper : decides about requests.
    observers : see what steps delivered before the streams do.
    """

    def __init__(self, keeper: Keeper, observers: Sequence[StepObserver] = ()) -> None:
        self._keeper = keeper
        self.observers = list(observers)
        self.hand_out = HandOut()
        self._open: dict[str, ClientStream] = {}

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """Stream a request's deliveries, see `EngineClient.generate`."""
        request_id = request.request_id
        if request.slo is not None:
            # An engine does not know what deliveries wait here: for it the request came sooner.
            request = replace(request, arrival=request.arrival - self.hand_out.lag)
        block_hashes = await prompt_hashes(request, size) if (size := self._keeper.hashed_block_size) else ()
        if request_id in self._open:
            raise id_in_use(request_id)
        stream = self._open[request_id] = ClientStream(request_id, request.caller)
        finished = False
        item: Delivery | OnbeatError | None = None
        try:
            self._keeper.ask(request, block_hashes)
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, OnbeatError):
                    finished = True
                    raise item
                finished = item.output.finish_reason is not None
                stream.num_fetched += len(item.output.new_token_ids)
                if stream.num_fetched >= stream.tell_at:
                    self._keeper.fetched(self._take_fetched())
                yield item
        finally:
            if not finished:
                self._keeper.abort(request_id)
            stream.waiting.clear()
            del self._open[request_id]
            item = None  # an error refers to this frame: both would stay until somebody looks for garbage

    def _take_fetched(self) -> dict[str, int]:
        """Return what replicas have yet to be told, of all streams: so the next time is not soon."""
        told: dict[str, int] = {}
        for each in self._open.values():
            if each.num_fetched + TOLD_TOKENS > each.tell_at:
                each.tell_at = each.num_fetched + TOLD_TOKENS
                told[each.request_id] = each.num_fetched
        return told

    # --- what the keeper tells, see `GatePort` ------------------------------------------------------------

    def deliver(self, now: float, outputs: list[RequestOutput], replica: int) -> None:
        message = StepOutputs(now, outputs)
        for observer in self.observers:
            observer.on_step(message, replica)
        for output in outputs:
            if (stream := self._open.get(output.request_id)) is not None:
                self.hand_out.put(stream, Delivery(now, output))

    def refuse(self, request_id: str, error: OnbeatError) -> None:
        if (stream := self._open.get(request_id)) is not None:
            self.hand_out.put(stream, error)

    def hear(self, made: float, now: float) -> None:
        self.hand_out.hear(made, now)


def id_in_use(request_id: str) -> InvalidRequest:
    """Return why a request is refused whose id an open one has."""
    return InvalidRequest(f"request id {request_id!r} is in use; use a new one", param="request_id")


async def prompt_hashes(request: Request, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, by which a fleet knows where its beginning is cached."""
    hashes: list[bytes] = []
    parent, token_ids = root_hash(request.cache_salt, request.adapter), request.prompt_token_ids
    step = _BLOCKS_AT_ONCE * block_size
    for start in range(0, len(token_ids), step):
        if start:
            await asyncio.sleep(0)
        hashes += hash_blocks(hashes[-1] if hashes else parent, token_ids[start : start + step], block_size)
    return hashes
