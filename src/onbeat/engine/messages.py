"""What the engine process and its client say to each other: msgpack over ZeroMQ, one message a step."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from onbeat.core.errors import (
    EngineDead,
    EngineError,
    InvalidRequest,
    OnbeatError,
    Overloaded,
    PromptTooLong,
    RequestRejected,
    SLOUnattainable,
)
from onbeat.core.handover import MoveTask, TaskAnswer
from onbeat.core.protocols import EngineInfo, EnginePulse, StepOutputs
from onbeat.core.request import Adapter, Request, RequestOutput
from onbeat.engine.kv_access import KVLayout, KVSource
from onbeat.scheduler.replica.outputs import Outputs


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    request: Request
    stops: bool = False
    """Whether it stands still after its first token, until it is moved or put back (`reattach`)."""


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    request_ids: list[str]


WINDOW_TOKENS = 128
"""Output of a request that may be on its way, or wait to be sent; with more it sits out."""
TOLD_TOKENS = 32
"""Fetched output of which an engine is told at once: of less it hears with what follows."""


class Fetched(msgspec.Struct, tag="fetched", array_like=True):
    """How far the output of requests has been fetched."""

    num_tokens: dict[str, int]
    """Request -> its output tokens so far."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Stop the loop; whatever is unfinished is dropped."""


class Greet(msgspec.Struct, tag="greet", array_like=True):
    """Drop all requests, and say once more who is there: another keeper begins, which knows of none."""


class OpenKV(msgspec.Struct, tag="open-kv", array_like=True):
    """Let other engines copy KV, and copy theirs."""

    key: bytes
    """Of all engines of the fleet: it keeps strangers from copies."""


class LoadAdapter(msgspec.Struct, tag="load-adapter", array_like=True):
    """Load a LoRA adapter."""

    adapter: Adapter
    others: list[int]
    """Numbers of those that stay."""


class AdapterAnswer(msgspec.Struct, tag="adapter", array_like=True):
    """What came of it."""

    number: int
    error: str | None
    """None: it is loaded."""


class AskMove(msgspec.Struct, tag="move", array_like=True):
    """Do a step of a move."""

    task: MoveTask[KVSource]


class MoveAnswer(msgspec.Struct, tag="moved", array_like=True):
    """What came of it."""

    answer: TaskAnswer[KVSource]


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The first word of an engine's process, the same in all versions: the others may differ."""

    version: str
    """Of onbeat."""


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """One line for the person who waits for the start."""

    text: str


class Ready(msgspec.Struct, tag="ready", array_like=True):
    info: EngineInfo
    kv_layout: KVLayout | None
    """None where other engines could not copy its KV."""


class StartFailed(msgspec.Struct, tag="start-failed", array_like=True):
    """The engine could not start; `is_user_error` says whether the message is the whole story."""

    message: str
    is_user_error: bool


_REJECTIONS: dict[type[OnbeatError], tuple[str, ...]] = {
    InvalidRequest: ("param", "code"),
    PromptTooLong: ("param",),
    Overloaded: ("param", "code", "retry_after", "reason"),
    SLOUnattainable: ("predicted_ttft", "retry_after", "code"),
    RequestRejected: ("param", "code"),
    EngineDead: (),
    EngineError: (),
}
"""What each is made of, beside its message; engines raise those of requests alone."""


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """A request was refused, by an exception that its caller is to get."""

    request_id: str
    kind: str
    """Name of the exception's class."""
    message: str
    details: dict[str, Any]
    """Its other arguments."""

    @classmethod
    def by(cls, request_id: str, error: OnbeatError) -> Rejected:
        """Return the message that says why a request was refused."""
        kind = next(kind for kind in _REJECTIONS if isinstance(error, kind))
        details = {name: getattr(error, name) for name in _REJECTIONS[kind]}
        return cls(request_id, kind.__name__, str(error), details)

    def error(self) -> OnbeatError:
        """Return the exception that the message stands for."""
        kind = next(kind for kind in _REJECTIONS if kind.__name__ == self.kind)
        return kind(self.message, **self.details)


def never_fits(error: RequestRejected) -> bool:
    """Whether the engine would refuse the same request even when idle."""
    return isinstance(error, SLOUnattainable) and error.retry_after is None


class Died(msgspec.Struct, tag="died", array_like=True):
    """The engine's last words: no step can run any more, and its process ends."""

    message: str


class Leaving(msgspec.Struct, tag="leaving", array_like=True):
    """The process was told to end (SIGTERM): it goes on until its requests are elsewhere, or have ended."""


def _array_of(kind: type, **parts: object) -> Any:
    """Return a twin of a dataclass that is an array on the wire, which takes a fifth of the time of a map.

    Parameters
    ----------
    parts : types of fields that are other ones there.
    """
    return msgspec.defstruct(kind.__name__, [*(get_type_hints(kind) | parts).items()], array_like=True)


if TYPE_CHECKING:
    Output = RequestOutput
    _Step = StepOutputs
else:  # their modules know the standard library alone
    Output = _array_of(RequestOutput)
    _Step = _array_of(StepOutputs, outputs=list[Output])
_fields_of = attrgetter(*get_type_hints(RequestOutput))


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    outputs: _Step


_MOST_VALUES = 2**14
"""Log-probabilities of prompts in one message, which takes 2 ms to be read; a single token may have more."""


def in_portions(outputs: StepOutputs) -> Iterator[Stepped]:
    """Yield the messages of a step: log-probabilities of prompts come in parts, before all else of it."""
    of_step = outputs.outputs
    for output in of_step.others if isinstance(of_step, Outputs) else of_step:
        scores = output.prompt_logprobs or ()
        num = max(_MOST_VALUES // (1 + len(scores[0].top_token_ids)), 1) if scores else 1
        for start in range(0, len(scores), num):
            part = RequestOutput(output.request_id, [], prompt_logprobs=[*scores[start : start + num]])
            yield _stepped(StepOutputs(outputs.now, [part]))
            output.prompt_logprobs = []
    yield _stepped(outputs)


_NOTHING_ELSE = _fields_of(RequestOutput("", []))[8:]


def _stepped(step: StepOutputs) -> Stepped:
    outputs = step.outputs
    if isinstance(outputs, Outputs):
        outputs = outputs.each(lambda *fields: Output(*fields, *_NOTHING_ELSE))
    made = [each if isinstance(each, Output) else Output(*_fields_of(each)) for each in outputs]
    return Stepped(_Step(step.now, made, step.stats, step.load))


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """Said where nothing else was for a while, and when requests have been read, before they run."""

    pulse: EnginePulse
    num_taken: int
    """Requests that have been read so far: whoever sent more knows which of them did not arrive."""


ToEngine = AddRequest | AbortRequests | Fetched | Shutdown | Greet | OpenKV | AskMove | LoadAdapter
FromEngine = (
    Hello
    | Progress
    | Ready
    | StartFailed
    | Rejected
    | Stepped
    | Heartbeat
    | Leaving
    | Died
    | MoveAnswer
    | AdapterAnswer
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
