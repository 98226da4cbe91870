"""The decisions of a recorded fleet once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from onbeat.core.errors import ConfigError, quoted
from onbeat.recording.fleet_log import FleetRecording, named
from onbeat.scheduler.cluster.events import FleetEvent
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetRules
from onbeat.scheduler.cluster.routers import make_router
from onbeat.typed import revive

_EVENTS = {kind.__name__: kind for kind in get_args(FleetEvent)}


@dataclass(slots=True)
class FleetReplay:
    """What a replay of a fleet found."""

    router: str
    num_calls: int = 0
    num_actions: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """Kind -> how many."""
    actions: Counter[str] = field(default_factory=Counter)
    """Kind, or why a request was sent or refused -> how many."""
    is_complete: bool = True
    difference: FleetDifference | None = None
    """The first; nothing is replayed behind it."""

    @property
    def is_identical(self) -> bool:
        """Whether all decisions were made again."""
        return self.difference is None


@dataclass(frozen=True, slots=True)
class FleetDifference:
    """A call whose actions are others than those recorded."""

    line: int
    event: str
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]


def replay_fleet(recording: FleetRecording) -> FleetReplay:
    """Make every call of a record again, and compare the actions.

    Raises
    ------
    ConfigError : the record is damaged or cut short, or names what this onbeat does not know.
    """
    header = recording.header
    try:
        router = make_router(str(header["router"]))
        fleet = Fleet(router, revive(FleetRules, header.get("fleet", {}), "fleet"))
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{recording.path}, line 1: no fleet can be made of its header: {error}") from error
    found = FleetReplay(str(header["router"]))
    for number, call in recording.calls():
        where = f"{recording.path}, line {number}"
        event = _event(call.event, where)
        try:
            replayed = [named(each) for each in fleet.on_event(event, call.now)]
        except (AssertionError, ArithmeticError) as error:
            raise ConfigError(f"{where}: no fleet can have heard this: {error or 'it is damaged'}") from error
        found.num_calls += 1
        found.num_actions += len(replayed)
        found.events[type(event).__name__] += 1
        found.actions.update(_kind_of(each) for each in replayed)
        if replayed != call.actions:
            found.difference = FleetDifference(number, type(event).__name__, call.actions, replayed)
            break
    found.is_complete = recording.is_complete or found.difference is not None
    return found


def _kind_of(action: Mapping[str, Any]) -> str:
    return str(action.get("why") or action.get("reason") or action.get("verb") or action["kind"])


def _event(values: Mapping[str, Any], where: str) -> FleetEvent:
    """Return an event from its line."""
    if (kind := _EVENTS.get(str(values.get("kind")))) is None:
        raise ConfigError(
            f"{where}: {quoted(values.get('kind'))} is no event of a fleet; known are {', '.join(_EVENTS)}"
        )
    event: FleetEvent = revive(kind, {key: each for key, each in values.items() if key != "kind"}, where)
    return event
