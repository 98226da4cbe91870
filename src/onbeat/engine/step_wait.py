"""Wait for messages and for the end of a step, with an eye on the parent process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

WAKE_SECONDS = 0.5
"""The longest wait without a look around."""


class StepWait:
    """Sleeps until a step has ended, and wakes up for each message that comes meanwhile.

    The thread that runs steps rings by a byte in a pipe, which the poller watches beside the inbox: nothing
    is asked over and over, and neither of the two waits for the other.

    Parameters
    ----------
    inbox : where messages come.
    parent : a file descriptor that can be read once the parent process has ended; None without one.
    on_wake : called every now and then, at least once in `WAKE_SECONDS` of waiting.

    Attributes
    ----------
    is_orphaned : whether the parent process was found to have ended; no wait lasts from then on.
    """

    def __init__(
        self,
        inbox: zmq.Socket[bytes],
        *,
        parent: int | None = None,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_orphaned = False
        self._inbox = inbox
        self._parent = parent
        self._on_wake = on_wake
        self._bell, self._button = os.pipe()
        for end in (self._bell, self._button):
            os.set_blocking(end, False)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)
        if parent is not None:
            self._poller.register(parent, zmq.POLLIN)

    def for_message(self, seconds: float) -> bool:
        """Wait for a message, for a while at most, while no step runs; return whether there is one."""
        return self._inbox in self._poll(seconds)

    def until_done(self, step: Future[Any], read_inbox: Callable[[], None]) -> None:
        """Return once the step has ended, or the parent process.

        Parameters
        ----------
        read_inbox : takes all messages that are there; called whenever there are some.
        """
        if step.done():
            return
        step.add_done_callback(lambda _: self.ring())
        while not (step.done() or self.is_orphaned):
            if self._inbox in self._poll(WAKE_SECONDS):
                read_inbox()

    def _poll(self, seconds: float) -> set[Any]:
        ready = {source for source, _ in self._poller.poll(int(seconds * 1e3))}
        if self._bell in ready:
            os.read(self._bell, 64)  # perhaps of a step before, whose end was seen without it
        if self._parent in ready:
            self.is_orphaned = True
        self._on_wake()
        return ready

    def close(self) -> None:
        """Close the pipe; no step may run any more."""
        os.close(self._bell)
        os.close(self._button)

    def ring(self) -> None:
        """Let a wait look around; any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._button, b"!")
