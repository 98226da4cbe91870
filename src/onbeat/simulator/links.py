"""The links over which KV goes from replica to replica, and what each of several transfers gets of one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
"""Whatever names a transfer."""

_Port = tuple[str, int]
"""One direction of a replica's link."""


@dataclass(slots=True)
class _Flow:
    """A transfer under way."""

    ports: tuple[_Port, _Port]
    """That it leaves by, and that it comes in by."""
    num_left: float
    """Bytes."""
    rate: float = 0.0
    """Bytes per second."""
    end: float = inf
    """At this rate."""


class Links(Generic[K]):
    """Each replica has one link, which takes `bandwidth` out and `bandwidth` in at the same time.

    Transfers share what they have in common so that none can have more without one that has no more than it
    having less (max-min fairness): what flows of equal round-trip times get of a network in the long run, and
    what simulators of networks compute.

    Parameters
    ----------
    bandwidth : bytes per second, in either direction.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._flows: dict[K, _Flow] = {}
        self._now = 0.0
        self.next_time = inf
        """When the next transfer ends, if none begins before."""
        self.num_bytes_moved = 0.0
        """By transfers that have ended, been dropped or are under way, up to the last call."""

    def begin(self, key: K, source: int, destination: int, num_bytes: float, now: float) -> None:
        """Begin a transfer; `end` will name its key."""
        assert key not in self._flows, f"{key} is under way"
        self._advance(now)
        self._flows[key] = _Flow((("out", source), ("in", destination)), num_bytes)
        self._share()

    def end(self, now: float) -> list[K]:
        """Return the transfers that have ended by now, in the order in which they began."""
        if now < self.next_time:
            return []
        ended = [key for key, flow in self._flows.items() if flow.end <= now]
        self._advance(now)
        for key in ended:
            del self._flows[key]
        self._share()
        return ended

    def drop(self, key: K, now: float) -> None:
        """Let a transfer end before its last byte; one that is not under way is ignored."""
        if key in self._flows:
            self._advance(now)
            del self._flows[key]
            self._share()

    def rates(self) -> dict[_Port, float]:
        """Return what goes over each direction of each link, bytes per second."""
        found: dict[_Port, float] = defaultdict(float)
        for flow in self._flows.values():
            for port in flow.ports:
                found[port] += flow.rate
        return found

    def _advance(self, now: float) -> None:
        """Count the bytes that have gone since the last call."""
        for flow in self._flows.values():
            num_bytes = flow.num_left if flow.end <= now else flow.rate * (now - self._now)
            flow.num_left -= num_bytes
            self.num_bytes_moved += num_bytes
        self._now = now

    def _share(self) -> None:
        """Give each transfer its rate: the fullest link is shared first, then what is left of the others."""
        free = {port: self._bandwidth for flow in self._flows.values() for port in flow.ports}
        waiting = dict(self._flows)
        while waiting:
            users = Counter(port for flow in waiting.values() for port in flow.ports)
            share, fullest = min((free[port] / count, port) for port, count in users.items())
            for key in [key for key, flow in waiting.items() if fullest in flow.ports]:
                flow = waiting.pop(key)
                flow.rate = share
                for port in flow.ports:
                    free[port] = max(free[port] - share, 0.0)
                flow.end = self._now + flow.num_left / share
        self.next_time = min((flow.end for flow in self._flows.values()), default=inf)
