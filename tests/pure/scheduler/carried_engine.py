"""What runs on a replica, as far as moves are concerned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import MoveStep

_CHANCES = {MoveVerb.RESERVE: 0.9, MoveVerb.ADOPT: 0.9}
"""That a replica can do what it is asked for."""


@dataclass
class Engine:
    """Requests by the names that they have here, and what the replica has been asked for."""

    running: set[str] = field(default_factory=set)
    detached: set[str] = field(default_factory=set)
    lent: set[str] = field(default_factory=set)
    stopping: set[str] = field(default_factory=set)
    """Of those that run, the ones that stand still after their next token."""
    rooms: set[str] = field(default_factory=set)
    """Of moves."""
    inbox: list[tuple[MoveStep | None, str]] = field(default_factory=list)
    """(step, name); None takes the request back."""

    @property
    def has_kept(self) -> bool:
        return bool(self.detached or self.lent or self.rooms)

    def do(self, step: MoveStep, name: str, rng: Random, *, is_lent: bool) -> bool | None:
        """Do a step of a move; None where nobody waits for an answer.

        Parameters
        ----------
        is_lent : whether the source has what is to be copied.
        """
        can = rng.random() < _CHANCES.get(step.verb, 0.95)
        doing: dict[MoveVerb, Callable[[], bool | None]] = {
            MoveVerb.RESERVE: lambda: can and _add(self.rooms, step.move),
            MoveVerb.HOLD: lambda: can and name in self.running and _add(self.lent, name),
            MoveVerb.PULL: lambda: can and is_lent and step.move in self.rooms,
            MoveVerb.FREEZE: lambda: (
                name in self.detached or (can and _pass(name, self.running, self.detached))
            ),
            MoveVerb.ADOPT: lambda: can and self._adopt(step.move, name),
            MoveVerb.REATTACH: lambda: self._reattach(name),
            MoveVerb.UNHOLD: lambda: self.lent.discard(name),
            MoveVerb.RELEASE: lambda: self._release(step.move, name),
            MoveVerb.TAKE: lambda: self.drop(name),
        }
        return doing[step.verb]()

    def drop(self, name: str) -> None:
        self.running.discard(name)
        self.detached.discard(name)
        self.lent.discard(name)

    def _adopt(self, move: str, name: str) -> bool:
        has_capacity = move in self.rooms
        if has_capacity:
            self.rooms.remove(move)
            self.running.add(name)
        return has_capacity

    def _reattach(self, name: str) -> None:
        _pass(name, self.detached, self.running)
        self.lent.discard(name)

    def _release(self, move: str, name: str) -> None:
        self.rooms.discard(move)
        self.drop(name)


def _add(names: set[str], name: str) -> bool:
    names.add(name)
    return True


def _pass(name: str, source: set[str], destination: set[str]) -> bool:
    is_there = name in source
    if is_there:
        source.remove(name)
        destination.add(name)
    return is_there
