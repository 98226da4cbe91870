"""What a process prints while it serves: a full disk or a pipe that nobody reads must not stop it."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

MAX_PENDING_CHARS = 2**20
"""Text that waits to be written, some ten thousand lines; more is dropped."""
FINISH_SECONDS = 1.0
"""How long the last lines are waited for."""


class DroppingStream(io.TextIOBase):
    """Takes text at once; a thread of its own writes it to the file of another stream.

    Lines that find no room, or cannot be written, are dropped. When others get through, one says how many.

    Parameters
    ----------
    stream : has a file descriptor. Where that is a pipe, code that writes to the descriptor itself does not
        wait either, until `finish`: what it writes while the pipe is full is lost.
    max_pending : characters that may wait.

    Attributes
    ----------
    num_dropped : lines that are lost.

    Raises
    ------
    OSError : the stream has no file descriptor.
    """

    def __init__(self, stream: TextIO, *, max_pending: int = MAX_PENDING_CHARS) -> None:
        self.num_dropped = 0
        self._stream = stream
        self._max_pending = max_pending
        self._turn = threading.Condition()  # it can be had twice: collecting garbage may print anywhere
        self._begun = ""  # of a line whose end has not come
        self._pending: list[str] = []
        self._num_pending = 0
        self._num_untold = 0
        self._is_finished = False
        self._is_cut = False  # whether the file ends within what could not be written
        # Where this fails, the base class still flushes what was begun: all that it asks for is there.
        self._own_fd = os.dup(stream.fileno())
        _make_pipe_not_wait(stream.fileno())
        self._thread = threading.Thread(target=self._run, name="onbeat-output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Take text, which is written once its line ends, or at a flush."""
        with self._turn:
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            self._take(lines + end)
            if len(self._begun) > self._max_pending:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Take what has come of a line as it is; waits for nothing, since loggers flush after each line."""
        with self._turn:
            text, self._begun = self._begun, ""
            self._take(text)

    def finish(self) -> bool:
        """Take nothing more and let the last lines be written; return whether that was done in time."""
        with self._turn:
            self.flush()
            self._is_finished = True
            self._turn.notify()
        self._thread.join(FINISH_SECONDS)
        return not self._thread.is_alive()

    def _take(self, text: str) -> None:
        if self._is_finished or self._num_pending + len(text) > self._max_pending:
            self._drop(text.count("\n"))
        elif text:
            self._pending.append(text)
            self._num_pending += len(text)
            self._turn.notify()

    def _drop(self, num_lines: int) -> None:
        self.num_dropped += num_lines
        self._num_untold += num_lines

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._pending or self._is_finished)
                if not self._pending:
                    break
                text = "".join(self._pending)
                self._pending.clear()
                self._num_pending = 0
                num_untold = self._num_untold
            self._write_and_tell(text, num_untold)
        os.dup2(self._own_fd, self._stream.fileno())
        os.close(self._own_fd)

    def _write_and_tell(self, text: str, num_untold: int) -> None:
        num_lost = self._write(text)
        if num_untold and not num_lost:
            why = "nobody read them in time, or they could not be written"
            if self._write(f"onbeat: {num_untold:,} lines before this one are missing: {why}\n"):
                num_untold = 0
        else:
            num_untold = 0
        with self._turn:
            self._num_untold -= num_untold
            self._drop(num_lost)

    def _write(self, text: str) -> int:
        """Write text, however long that takes; return how many of its lines could not be written."""
        whole = data = text.encode(self.encoding, "backslashreplace")
        try:
            if self._is_cut:
                self._write_some(b"\n")
                self._is_cut = False
            while data:
                data = data[self._write_some(data) :]
        except OSError:
            self._is_cut = self._is_cut or len(data) < len(whole)
            return data.count(b"\n") or 1
        return 0

    def _write_some(self, data: bytes) -> int:
        while True:
            try:
                return os.write(self._own_fd, data)
            except BlockingIOError:  # whoever gave us the file wants its writers to wait by themselves
                writable = select.poll()
                writable.register(self._own_fd, select.POLLOUT)
                writable.poll()


def _make_pipe_not_wait(fd: int) -> None:
    """Let writes to a descriptor fail where they would wait, in this process and its children alone."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        with suppress(OSError):  # it is another user's, or nobody reads it any more
            opened = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
            os.dup2(opened, fd)
            os.close(opened)


@contextmanager
def unblocked_output() -> Iterator[None]:
    """Let nothing that is printed in the block wait for whoever reads it; what they do not take is dropped.

    That holds for `print`, warnings, logs and tracebacks, and for libraries that write to a pipe. The end
    waits for `FINISH_SECONDS` at most; a stream that is stuck then stays as it is in the block.
    """
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stack.enter_context(_unblocked(name))
        yield


@contextmanager
def _unblocked(name: str) -> Iterator[None]:
    before = getattr(sys, name)
    try:
        stream = DroppingStream(before)
    except (AttributeError, OSError, ValueError):  # there is none, or it is no file
        yield
        return
    setattr(sys, name, stream)
    try:
        yield
    finally:
        if stream.finish():
            setattr(sys, name, before)


def num_dropped_lines() -> int:
    """Return how many lines this process has dropped of what it printed."""
    streams = (sys.stdout, sys.stderr)
    return sum(stream.num_dropped for stream in streams if isinstance(stream, DroppingStream))
