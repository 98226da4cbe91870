"""A foreign process that keeps one core busy whenever it is let."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "while True:\n    pass"


class Neighbour:
    """Suspended unless it is busy. A context manager: it ends the process."""

    def __enter__(self) -> Neighbour:
        self._process = subprocess.Popen([sys.executable, "-c", BUSY])
        self._process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let it take a core."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)
