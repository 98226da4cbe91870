"""A process that answers questions, with limits of time and memory that only the system can hold code to.

A question that takes too much time, or overflows the stack, ends the process, which is started again for the
next one; whoever asked hears why. Messages go both ways, each behind its length. The module that runs as the
process calls `serve`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from onbeat.core.errors import Overloaded

_LENGTH = struct.Struct("<Q")


class Ended(Exception):
    """The process is gone; says what was done there, as the end of a sentence.

    Parameters
    ----------
    message : what was done.
    was_killed : whether somebody else ended it, so that the question may not be at fault.
    """

    def __init__(self, message: str, *, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


class LimitedProcess:
    """Asks a process, which is started with the first question. Threads may share it.

    Parameters
    ----------
    module : what runs there, as `python -m`.
    opening : the first message, from which it makes what it needs.
    max_seconds : most processor time of a question.
    niceness : added to the process's; 19 is the least important.
    """

    def __init__(self, module: str, opening: bytes, *, max_seconds: float, niceness: int = 0) -> None:
        self._module = module
        self._opening = opening
        self._max_seconds = max_seconds
        self._niceness = niceness
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, Any]:
        """Start the process, and return its answer to the opening.

        Raises
        ------
        Ended : it did not get that far.
        Overloaded : the system starts no process.
        """
        with self._lock:
            return self._start()

    def ask(self, question: bytes) -> dict[str, Any]:
        """Return the answer to a question.

        Raises
        ------
        Ended : the process ended over it.
        Overloaded : the system starts no process.
        """
        with self._lock:
            if self._process is None:
                self._start()
            assert self._process is not None, "it has been started"
            return self._exchange(self._process, question)

    def close(self) -> None:
        """End the process. Being forgotten does the same."""
        if self._process is not None:
            self._end()
            self._process = None

    def _start(self) -> dict[str, Any]:
        # Not only the caller's environment: the package may have been found by other means.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(self._max_seconds), str(self._niceness)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            raise Overloaded(
                f"a process that checks input cannot be started: {error.strerror}. Try again later; the "
                "server's owner can raise its limits of files and processes (`ulimit -n`, `ulimit -u`)",
                code="no_process",
            ) from error
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        return self._exchange(process, self._opening)

    def _exchange(self, process: subprocess.Popen[bytes], message: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, message)
            reply = _receive(process.stdout)
        except OSError:
            reply = None
        if reply is None:
            code = process.wait()
            self.close()
            raise Ended(
                f"takes more than {self._max_seconds:g} s of processor time"
                if code == -signal.SIGPROF
                else f"ended its process (exit code {code})",
                was_killed=code == -signal.SIGKILL,
            )
        content: dict[str, Any] = json.loads(reply)
        return content


Answer = Callable[[bytes], dict[str, Any]]


def serve(open_: Callable[[bytes], tuple[dict[str, Any], Answer | None]], *, max_bytes: int) -> None:
    """Answer questions until nobody asks any more, or one takes too much; called by the process.

    Parameters
    ----------
    open_ : given the opening, returns the answer to it, and what answers questions; None where nothing can.
    max_bytes : most memory beyond what the process takes before the opening is read; `MemoryError` follows.
    """
    max_seconds, niceness = float(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal's; the parent decides when this ends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a parent that was killed reads no answer
    os.nice(niceness)
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    opening = _receive(inbox)
    if opening is None:
        return
    limit_memory(max_bytes)
    reply, answer = open_(opening)
    _send(outbox, json.dumps(reply).encode())
    while answer is not None and (question := _receive(inbox)) is not None:
        with timer(max_seconds):
            reply = answer(question)
        _send(outbox, json.dumps(reply).encode())


@contextmanager
def timer(max_seconds: float) -> Iterator[None]:
    """Have the system end this process after so much of its time inside the block."""
    signal.setitimer(signal.ITIMER_PROF, max_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(max_bytes: int) -> None:
    """Let this process take so much more memory than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + max_bytes
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what nobody has read any more
                pipe.close()


def _send(pipe: BinaryIO | Any, message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> bytes | None:
    """Return a message, or None at the end of all."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    message: bytes = pipe.read(size)
    return message if len(message) == size else None
