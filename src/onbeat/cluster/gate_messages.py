"""What gates and their keeper say to each other across processes, in msgpack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from onbeat.cluster.clock_offset import by_their_clock, shift_deliveries, shifted_pulse
from onbeat.core.fleet import ReplicaView, ScalingView
from onbeat.core.protocols import EnginePulse
from onbeat.core.request import Adapter, Request
from onbeat.engine.messages import AbortRequests, Fetched, Output, Rejected
from onbeat.metrics.merge import Snapshot
from onbeat.metrics.slo_counts import EndedRequest


class Open(msgspec.Struct, tag="open", array_like=True):
    """The first word of a gate."""

    adapters: dict[str, Adapter] | None = None
    """That requests may ask for, where another keeper has said so."""


class Serving(msgspec.Struct, tag="serving", array_like=True):
    """A gate takes connections."""


class Told(msgspec.Struct, tag="told", array_like=True):
    """A gate has told the keeper what it had open with another one."""


class Left(msgspec.Struct, tag="left", array_like=True):
    """A gate has ended; who passes its messages on says so."""


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Have a request served, or the rest of it."""

    request: Request
    block_hashes: list[bytes]
    token_ids: list[int] = []
    """What its client has got of its output from other keepers."""
    first_token_time: float | None = None

    @property
    def rest(self) -> Request:
        """What is to be served."""
        first, own, resumed = self.first_token_time, self.request, tuple(self.token_ids)
        return replace(own, resumed_token_ids=resumed, first_token_time=first) if resumed else own


class Wish(msgspec.Struct, tag="wish", array_like=True):
    """Have the fleet do something; the answer has the same number."""

    number: int
    verb: str
    """What: a word that the keeper knows."""
    arguments: dict[str, Any]
    is_again: bool = False
    """Whether another keeper has granted it."""


class Greet(msgspec.Struct, tag="greet", array_like=True):
    """Say who you are, and ask again for what is open: another keeper begins, which knows of none of it."""


class Delivered(msgspec.Struct, tag="delivered", array_like=True):
    """What a step brought the gate's requests."""

    now: float
    outputs: list[Output]
    replica: int


class Counted(msgspec.Struct, tag="counted", array_like=True):
    """What a gate has counted since its start; it says so every second, and so that it lives."""

    counts: Snapshot
    ended: dict[str, list[EndedRequest]]
    """Judged requests that have ended since the last such message, by class."""
    num_open: int
    """Requests that have yet to be counted."""


class Granted(msgspec.Struct, tag="granted", array_like=True):
    """What came of a wish."""

    number: int
    error: Rejected | None
    answer: Any = None


class Status(msgspec.Struct, tag="status", array_like=True, kw_only=True):
    """How the fleet stands: the fields are properties of `EngineClient` and `FleetView`."""

    is_alive: bool
    pulse: EnginePulse
    num_waiting: int
    is_ready: bool
    seconds_to_ready: float | None
    scaling: ScalingView | None
    adapters: dict[str, Adapter]
    replicas: list[ReplicaView]
    hashed_block_size: int
    way: float
    """Seconds that the last message of a replica was on its way to the keeper."""
    made: float
    """When this was said."""
    clock: str
    """By which clock: see `clock_id`."""


ToKeeper = Open | Serving | Told | Left | Ask | AbortRequests | Fetched | Wish | Counted
ToGate = Greet | Delivered | Rejected | Status | Granted

decode_to_keeper = msgspec.msgpack.Decoder(ToKeeper).decode
decode_to_gate = msgspec.msgpack.Decoder(ToGate).decode


def by_keepers_clock(message: ToKeeper, offset: float) -> ToKeeper:
    """Return a gate's message with the times of its keeper's clock.

    Parameters
    ----------
    offset : seconds by which that clock is behind the gate's.
    """
    if not offset:
        return message
    match message:
        case Ask(request, _, _, first):
            first = None if first is None else first - offset
            return msgspec.structs.replace(
                message, request=by_their_clock(request, offset), first_token_time=first
            )
        case Counted(_, ended):
            by_class = {
                name: [each._replace(end=each.end - offset) for each in some] for name, some in ended.items()
            }
            return msgspec.structs.replace(message, ended=by_class)
        case Wish(_, "open_call", arguments):
            arguments = {**arguments, "arrival": arguments["arrival"] - offset}
            return msgspec.structs.replace(message, arguments=arguments)
        case Wish(_, "close_call" | "fail_call", arguments):
            end = {**arguments["end"], "end": arguments["end"]["end"] - offset}
            return msgspec.structs.replace(message, arguments={**arguments, "end": end})
    return message


def by_gates_clock(message: Delivered | Status, offset: float) -> None:
    """Give a keeper's message the times of a gate's clock; see `by_keepers_clock`."""
    if not offset:
        return
    if isinstance(message, Status):
        message.made += offset
        message.pulse = shifted_pulse(message.pulse, offset)
        return
    message.now += offset
    shift_deliveries(message.outputs, offset)
