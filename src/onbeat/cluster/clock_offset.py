"""What another machine's monotonic clock shows, told by this one's: they start from different points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from onbeat.core.protocols import EnginePulse, StepOutputs
from onbeat.core.request import Request, RequestOutput
from onbeat.engine.messages import FromEngine, Heartbeat, Stepped

_DRIFT = 50e-6
"""Seconds a second by which two clocks may come apart: what a quartz gives. It ages a measurement."""


class ClockOffset:
    """How far another clock is behind this one, as round trips show it.

    The other clock was read somewhere between the sending of a question and the coming of its answer, so half
    the round trip bounds the error: the shortest one counts (Cristian, "Probabilistic clock synchronization",
    1989), until it has grown so old that a later one may be nearer.

    Parameters
    ----------
    seconds : known beforehand, and exact; None where it is to be measured.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds or 0.0
        """This clock's time less the other's."""
        self._error = inf if seconds is None else 0.0
        self._measured = -inf if seconds is None else inf

    def add(self, sent: float, read: float, received: float) -> None:
        """Take a round trip into account.

        Parameters
        ----------
        sent, received : when the question went out and the answer came, by this clock.
        read : what the other clock showed between.
        """
        error = (received - sent) / 2
        if error <= self.error(received):
            self.seconds = (sent + received) / 2 - read
            self._error, self._measured = error, received

    def error(self, now: float) -> float:
        """Return by how many seconds `seconds` may be wrong."""
        return self._error + _DRIFT * max(now - self._measured, 0.0)


def clock_id() -> str:
    """Return what is equal where processes share a monotonic clock: a system's start, and a namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        namespace = Path("/proc/self/ns/time").readlink()
    except OSError:
        return boot  # a kernel without namespaces of time
    return f"{boot} {namespace}"


def by_their_clock(request: Request, offset: float) -> Request:
    """Return a request whose times are those of a replica's clock.

    Parameters
    ----------
    offset : seconds by which that clock is behind this one.
    """
    first = request.first_token_time
    return replace(
        request, arrival=request.arrival - offset, first_token_time=None if first is None else first - offset
    )


def by_our_clock(message: FromEngine, offset: float, received: float) -> FromEngine:
    """Return a replica's message with the times of this clock; it may be changed in place.

    Parameters
    ----------
    offset : seconds by which the replica's clock is behind this one.
    received : when the message came; nothing in it is later.
    """
    match message:
        case Stepped(outputs):
            _shift_outputs(outputs, min(offset, received - outputs.now))
        case Heartbeat(pulse):
            message.pulse = shifted_pulse(pulse, min(offset, received - pulse.time))
    return message


def shifted_pulse(pulse: EnginePulse, offset: float) -> EnginePulse:
    """Return a pulse whose times are so many seconds later."""
    start = pulse.step_start
    return replace(pulse, time=pulse.time + offset, step_start=None if start is None else start + offset)


def _shift_outputs(outputs: StepOutputs, offset: float) -> None:
    outputs.now += offset
    shift_deliveries(outputs.outputs, offset)
    if (stats := outputs.stats) is not None:
        stats.start += offset
        stats.end += offset
    if (load := outputs.load) is not None:
        outputs.load = replace(load, time=load.time + offset)


def shift_deliveries(outputs: Sequence[RequestOutput], offset: float) -> None:
    """Make the times of deliveries so many seconds later."""
    for output in outputs:
        if output.scheduled_time > 0:  # else it was in no step yet
            output.scheduled_time += offset
