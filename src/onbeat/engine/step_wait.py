"""Wait for the end of a step with an open ear for messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq


class StepWait:
    """Sleeps until a step has ended, and wakes up for each message that comes meanwhile.

    The thread that runs steps rings by a byte in a pipe, which the poller watches beside the inbox: nothing
    is asked over and over, and neither of the two waits for the other.

    Parameters
    ----------
    inbox : where messages come.
    """

    def __init__(self, inbox: zmq.Socket[bytes]) -> None:
        self._bell, self._button = os.pipe()
        for end in (self._bell, self._button):
            os.set_blocking(end, False)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def until_done(self, step: Future[Any], read_inbox: Callable[[], None]) -> None:
        """Return once the step has ended.

        Parameters
        ----------
        read_inbox : takes all messages that are there; called whenever there are some.
        """
        if step.done():
            return
        step.add_done_callback(self._ring)
        while not step.done():
            for source, _ in self._poller.poll():
                if source == self._bell:
                    os.read(self._bell, 64)  # perhaps of the step before, whose end was seen without it
                else:
                    read_inbox()

    def close(self) -> None:
        """Close the pipe; no step may run any more."""
        os.close(self._bell)
        os.close(self._button)

    def _ring(self, _step: Future[Any]) -> None:
        os.write(self._button, b"!")
