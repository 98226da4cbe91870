"""Run `onbeat top` in a terminal of its own and read its screen."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from struct import pack
from termios import TIOCSWINSZ

from tests.cpu.e2e.program import command_line, environment
from tests.waiting import Patience

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A running program and all that it has drawn."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self.drawn = ""
        """With control sequences."""

    @property
    def text(self) -> str:
        return CONTROL.sub("", self.drawn)

    def wait_for(self, words: str, timeout: float = 20.0) -> None:
        """Read until words are drawn that were not there before."""
        patience = Patience()
        start = len(self.drawn)
        while words not in CONTROL.sub("", self.drawn[start:]):
            assert patience.look() < timeout, f"{words!r} is not in {self.text[-4000:]}"
            self._read(0.1)

    def _read(self, timeout: float) -> None:
        if select.select([self._master], [], [], timeout)[0]:
            try:
                self.drawn += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the program has closed it
                time.sleep(timeout)

    def press_ctrl_c(self) -> int:
        """Interrupt the program; return its exit code."""
        self.process.send_signal(signal.SIGINT)
        patience = Patience()
        while self.process.poll() is None:
            assert patience.look() < 10, "it does not end"
            self._read(0.05)
        self._read(0.05)
        return self.process.returncode


@contextmanager
def in_terminal(*arguments: str, width: int = 80, height: int = 40, **variables: str) -> Iterator[Terminal]:
    """Run the program in a terminal until the block ends."""
    master, slave = pty.openpty()
    ioctl(slave, TIOCSWINSZ, pack("HHHH", height, width, 0, 0))
    changes: dict[str, str | None] = {"COLUMNS": None, "LINES": None, "NO_COLOR": None, "TERM": "xterm"}
    process = subprocess.Popen(
        command_line(*arguments),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(**{**changes, **variables}),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
