"""A refused request on its way from the engine process to its caller: the exception that was raised there."""

from __future__ import annotations

import msgspec

from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong, RequestRejected, SLOUnattainable

_KINDS: dict[str, type[RequestRejected]] = {
    kind.__name__: kind
    for kind in (InvalidRequest, PromptTooLong, Overloaded, SLOUnattainable, RequestRejected)
}


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """`add` raised `RequestRejected`."""

    request_id: str
    kind: str
    """Name of its class."""
    message: str
    param: str | None
    code: str | None
    predicted_ttft: float = 0.0
    """Seconds; of `SLOUnattainable` alone."""
    retry_after: float | None = None
    """Seconds; of `SLOUnattainable` and `Overloaded`, None as there."""
    reason: str = ""
    """Of `Overloaded` alone."""


def pack_rejection(request_id: str, error: RequestRejected) -> Rejected:
    """Return the message that says why a request was refused."""
    kind = next(name for name, kind in _KINDS.items() if isinstance(error, kind))
    message = Rejected(request_id, kind, str(error), error.param, error.code)
    if isinstance(error, SLOUnattainable):
        message.predicted_ttft, message.retry_after = error.predicted_ttft, error.retry_after
    elif isinstance(error, Overloaded):
        message.retry_after, message.reason = error.retry_after, error.reason
    return message


def unpack_rejection(message: Rejected) -> RequestRejected:
    """Return the exception that the message stands for."""
    kind = _KINDS[message.kind]
    if kind is PromptTooLong:
        return PromptTooLong(message.message, param=message.param)
    if kind is SLOUnattainable:
        return SLOUnattainable(
            message.message,
            predicted_ttft=message.predicted_ttft,
            retry_after=message.retry_after,
            code=message.code or "slo_unattainable",
        )
    if kind is Overloaded:
        return Overloaded(
            message.message,
            param=message.param,
            code=message.code,
            retry_after=message.retry_after,
            reason=message.reason,
        )
    return kind(message.message, param=message.param, code=message.code)


def never_fits(error: RequestRejected) -> bool:
    """Whether the engine would refuse the same request even when idle."""
    return isinstance(error, SLOUnattainable) and error.retry_after is None
