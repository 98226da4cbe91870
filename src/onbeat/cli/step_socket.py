"""Hears forward-pass metrics of a running engine, and writes them down as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.step_log import StepOrder, read_forward_pass

if TYPE_CHECKING:
    import zmq

SCHEMES = ("tcp://", "ipc://")
SILENCE = 10.0
"""Seconds without any message after which the address must be wrong: an idle engine sends one each second, or
one as it becomes idle."""


def is_address(source: str) -> bool:
    """Return whether a source is the address of an engine, not a file."""
    return source.startswith(SCHEMES)


def record_steps(address: str, path: Path, *, seconds: float, on_step: Callable[[int], None]) -> int:
    """Write down what an engine tells of its steps; Ctrl-C ends it early, with what is there.

    Each message is checked as it comes, and written as it came.

    Parameters
    ----------
    address : where the engine publishes, such as `tcp://127.0.0.1:20380`.
    seconds : to listen.
    on_step : hears of the number of steps so far.

    Returns
    -------
    Steps.

    Raises
    ------
    ConfigError : a wrong address, silence, a message that is not as it must be, or a file that cannot be
        written.
    """
    import msgspec
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 200)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen to {address}: {error}; give tcp://HOST:PORT") from error
        decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode
        return _Recorder(socket, decode, address).record(path, seconds, on_step)
    finally:
        socket.close(linger=0)
        context.term()


class _Recorder:
    def __init__(self, socket: zmq.Socket[bytes], decode: Callable[[bytes], Any], address: str) -> None:
        self._socket = socket
        self._decode = decode
        self._address = address
        self._num_messages = self._num_steps = 0

    def record(self, path: Path, seconds: float, on_step: Callable[[int], None]) -> int:
        try:
            with path.open("w", encoding="utf-8", buffering=1) as file:
                order, start = StepOrder(), time.monotonic()
                try:
                    while time.monotonic() < start + seconds:
                        if (line := self._next(order)) is not None:
                            file.write(line + "\n")
                            on_step(self._num_steps)
                        elif not self._num_messages and time.monotonic() >= start + SILENCE:
                            break
                    if not self._num_messages:
                        raise ConfigError(
                            f"nothing came from {self._address} in {min(SILENCE, seconds):g} s; start the "
                            "engine with its forward-pass metrics on, send it requests, and give the address "
                            "that its log names"
                        )
                except KeyboardInterrupt:
                    pass
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        return self._num_steps

    def _next(self, order: StepOrder) -> str | None:
        """Return the next message as a line; None where none came for a moment."""
        import zmq

        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return None
        received, where = time.monotonic(), f"{self._address}, message {self._num_messages + 1}"
        try:
            message = self._decode(frames[-1])
        except Exception as error:  # of msgspec, whatever it finds
            raise ConfigError(
                f"{where} is not msgpack ({error}); is this the port of forward-pass metrics?"
            ) from error
        self._num_messages += 1
        step = order.take(read_forward_pass(message, where), received, where)
        self._num_steps += step is not None
        return json.dumps({"received": received, "fpm": message})
