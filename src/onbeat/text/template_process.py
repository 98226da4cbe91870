"""A chat template in a process of its own, which may take only so much time and memory.

The sandbox counts loops and calls, but one method of a text can ask for ten gigabytes, and a chain of
products for minutes: only the system can stop these. What fails for want of memory is an error; what takes
too long ends the process, which is started again for the next chat.

`python -m onbeat.text.template_process SECONDS` is the process. Messages of JSON, each behind its length, go
both ways.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from onbeat.core.errors import ConfigError, InvalidRequest, OnbeatError
from onbeat.text.template_sandbox import SandboxedTemplate

MAX_SECONDS = 5.0
"""Most processor time of one rendering: a chat of 10 MB takes under one second."""
MAX_BYTES = 2**30
"""Most memory of a rendering."""
_LENGTH = struct.Struct("<Q")


class TemplateProcess:
    """A template that is rendered in its own process; see `SandboxedTemplate`. Threads may share it.

    Parameters
    ----------
    source : Jinja template.
    max_seconds : most processor time of one rendering.

    Raises
    ------
    ConfigError : the template is not valid, or takes too much to be compiled.
    """

    def __init__(self, source: str, max_seconds: float = MAX_SECONDS) -> None:
        self._source = source
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text; see `SandboxedTemplate.render`."""
        request = json.dumps(variables).encode()
        with self._lock:
            reply = self._ask(request)
        if reply.get("is_nested_too_deep"):
            raise RecursionError("the template, or what it is given, is nested too deep")
        if "problem" in reply:
            raise InvalidRequest(reply["problem"], param="messages")
        return str(reply["text"])

    def close(self) -> None:
        """End the process. Being forgotten does the same."""
        if self._process is not None:
            self._end()
            self._process = None

    def _start(self) -> None:
        # Not only the caller's environment: the package may have been found by other means.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "onbeat.text.template_process", str(self._max_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        try:
            reply = self._exchange(process, self._source.encode("utf-8", "surrogatepass"))
        except _Ended as error:
            raise ConfigError(f"the chat template is not valid: compiling it {error}") from error
        if "problem" in reply:
            self.close()
            raise ConfigError(reply["problem"])

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None, "it has been started"
        try:
            return self._exchange(self._process, request)
        except _Ended as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: it {error}", param="messages"
            ) from error

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, request)
            reply = _receive(process.stdout)
        except OSError:
            reply = None
        if reply is None:
            code = process.wait()
            self.close()
            raise _Ended(
                f"takes more than {self._max_seconds:g} s of processor time"
                if code == -signal.SIGPROF
                else f"ended its process (exit code {code})"
            )
        content: dict[str, Any] = json.loads(reply)
        return content


class _Ended(Exception):
    """The process is gone; says what the template did."""


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


def _serve(max_seconds: float) -> None:
    """Compile the template that comes first, then render until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C; the parent decides when this ends
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory()
    source = _receive(inbox)
    if source is None:
        return
    template: SandboxedTemplate | None = None
    try:
        with _timer(max_seconds):
            template = SandboxedTemplate(source.decode("utf-8", "surrogatepass"))
        _send(outbox, b"{}")
    except OnbeatError as error:
        _send(outbox, _problem(error))
    while template is not None and (request := _receive(inbox)) is not None:
        with _timer(max_seconds):
            reply = _rendered(template, request)
        _send(outbox, reply)


def _rendered(template: SandboxedTemplate, request: bytes) -> bytes:
    try:
        return json.dumps({"text": template.render(json.loads(request))}).encode()
    except InvalidRequest as error:
        return _problem(error)
    except RecursionError:
        return b'{"is_nested_too_deep": true}'
    except MemoryError:
        return _problem("the chat template cannot render these messages: it takes too much memory")


def _problem(problem: object) -> bytes:
    return json.dumps({"problem": str(problem)}).encode()


@contextmanager
def _timer(max_seconds: float) -> Iterator[None]:
    """Have the system end this process after so much of its time inside the block."""
    signal.setitimer(signal.ITIMER_PROF, max_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MAX_BYTES
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
