"""Hears forward-pass metrics of a running engine, and writes them down as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.step_log import HINT, ForwardPassMetrics, StepOrder
from onbeat.typed import convert

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
    import zmq

    num_steps = 0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 200)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        socket.connect(address)
        with path.open("w", encoding="utf-8", buffering=1) as file:
            for num_steps, line in _messages(socket, address, seconds):
                file.write(line + "\n")
                on_step(num_steps)
    except KeyboardInterrupt:
        pass
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen to {address}: {error}; give tcp://HOST:PORT") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        socket.close(linger=0)
        context.term()
    return num_steps


def _messages(socket: zmq.Socket[bytes], address: str, seconds: float) -> Iterator[tuple[int, str]]:
    """Yield each message as a line, with the number of steps so far."""
    import msgspec
    import zmq

    decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode
    order, start, num_messages, num_steps = StepOrder(), time.monotonic(), 0, 0
    while time.monotonic() < start + (seconds if num_messages else min(SILENCE, seconds)):
        try:
            frames = socket.recv_multipart()
        except zmq.Again:
            continue
        received, where = time.monotonic(), f"{address}, message {num_messages + 1}"
        try:
            message = decode(frames[-1])
        except Exception as error:  # of msgspec, whatever it finds
            raise ConfigError(
                f"{where} is not msgpack ({error}); is this the port of forward-pass metrics?"
            ) from error
        num_messages += 1
        step = order.take(convert(ForwardPassMetrics, message, where, hint=HINT), received, where)
        num_steps += step is not None
        yield num_steps, json.dumps({"received": received, "fpm": message})
    if not num_messages:
        raise ConfigError(
            f"nothing came from {address} in {min(SILENCE, seconds):g} s; start the engine with its "
            "forward-pass metrics on, send it requests, and give the address that its log names"
        )
