"""What the engine process and its client say to each other: msgpack over ZeroMQ, one message a step."""

from __future__ import annotations

import msgspec

from onbeat.core.protocols import EngineInfo, EnginePulse
from onbeat.core.request import Request
from onbeat.core.step import StepOutputs
from onbeat.engine.rejection import Rejected


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    request: Request


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Stop the loop; whatever is unfinished is dropped."""


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """One line for the person who waits for the start."""

    text: str


class Ready(msgspec.Struct, tag="ready", array_like=True):
    info: EngineInfo


class StartFailed(msgspec.Struct, tag="start-failed", array_like=True):
    """The engine could not start; `is_user_error` says whether the message is the whole story."""

    message: str
    is_user_error: bool


class Died(msgspec.Struct, tag="died", array_like=True):
    """The engine's last words: no step can run any more, and its process ends."""

    message: str


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    outputs: StepOutputs


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """Said where nothing else was for a while."""

    pulse: EnginePulse


ToEngine = AddRequest | AbortRequests | Shutdown
FromEngine = Progress | Ready | StartFailed | Rejected | Stepped | Heartbeat | Died

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
