"""Tells a fleet what happens, and has what it decides carried out: live and simulated alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from onbeat.scheduler.cluster.events import (
    FleetAction,
    FleetEvent,
    MoveStep,
    Refuse,
    Rescale,
    Send,
    Start,
    Stop,
    Withdraw,
)
from onbeat.scheduler.cluster.fleet import Fleet


class Hands(Protocol):
    """Who carries out what a fleet decides: each action has its method, which is given the time, too."""

    def do_send(self, action: Send, now: float) -> None: ...

    def do_withdraw(self, action: Withdraw, now: float) -> None: ...

    def do_refuse(self, action: Refuse, now: float) -> None: ...

    def do_start(self, action: Start, now: float) -> None: ...

    def do_stop(self, action: Stop, now: float) -> None: ...

    def do_move_step(self, action: MoveStep, now: float) -> None: ...

    def do_rescale(self, action: Rescale, now: float) -> None: ...


class Teller:
    """Tells a fleet one event after the other.

    What is carried out may itself be an event, such as a replica that refuses what it is sent: it has its
    turn after all that the event before has led to.
    """

    def __init__(self, fleet: Fleet, hands: Hands) -> None:
        self._fleet = fleet
        self._events: deque[tuple[FleetEvent, float]] = deque()
        self.is_telling = False
        self._calls: dict[type[FleetAction], Callable[[Any, float], None]] = {
            Send: hands.do_send,
            Withdraw: hands.do_withdraw,
            Refuse: hands.do_refuse,
            Start: hands.do_start,
            Stop: hands.do_stop,
            MoveStep: hands.do_move_step,
            Rescale: hands.do_rescale,
        }

    def tell(self, event: FleetEvent, now: float) -> None:
        """Tell the fleet of an event, and carry out what it decides.

        Parameters
        ----------
        now : seconds, not before that of the last call.
        """
        events, calls = self._events, self._calls
        events.append((event, now))
        if self.is_telling:
            return
        self.is_telling = True
        try:
            while events:
                event, now = events.popleft()
                for action in self._fleet.on_event(event, now):
                    calls[type(action)](action, now)
        finally:
            self.is_telling = False
