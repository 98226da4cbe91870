"""A replica as the event loop sees it, and what all kinds of it do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf

from onbeat.core.fleet import ReplicaLoad
from onbeat.core.handover import Detached
from onbeat.core.step_time import StepTimeModel
from onbeat.simulator.observer import SimulationObserver
from onbeat.simulator.replica_core import ReplicaCore
from onbeat.simulator.result import ReplicaCounters
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.virtual_clients import OfferedRequest


class VirtualReplica(ABC):
    """A replica as the event loop sees it. At an instant the loop calls `end`, then `add`, then `start`.

    Parameters
    ----------
    name : as records carry it.
    observer : hears of steps.
    """

    def __init__(
        self,
        name: str,
        config: SimulationConfig,
        step_time: StepTimeModel,
        observer: SimulationObserver | None,
    ) -> None:
        self.name = name
        self._core = ReplicaCore(name, config, step_time, observer)
        self.scheduler = self._core.scheduler
        self.next_time = inf
        """When it wants to be called next; infinite while nothing runs."""
        self.started: list[OfferedRequest] = []
        """Requests that got their first token in the last `end`, if there is a router to be told."""
        self._model = step_time
        self._overhead = config.host_overhead
        self._charged = 0.0
        """Seconds by which the next step takes longer."""

    @abstractmethod
    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request.

        Raises
        ------
        RequestRejected : as `Scheduler.add`; the replica goes on as if it had not been asked.
        """

    @abstractmethod
    def interrupt(self, now: float) -> None:
        """Plan anew after the step under way: the scheduler has been told of something."""

    @abstractmethod
    def end(self, now: float) -> list[OfferedRequest]:
        """End what is due; return the requests that ended."""

    @abstractmethod
    def start(self, now: float, next_arrival: float) -> list[OfferedRequest]:
        """Begin a step, if the replica is free and has work; return requests that have waited in vain."""

    @abstractmethod
    def load(self, now: float) -> ReplicaLoad:
        """Return how it stands after `start`, for whoever shares requests out."""

    @abstractmethod
    def settle(self, now: float) -> None:
        """Let the scheduler see all that has been computed by now, and plan anew after the step under way."""

    def withdraw(self, request_id: str, now: float) -> None:
        """Let go of a request with the tokens that it has got by now."""
        self.settle(now)
        self._core.withdraw(request_id)

    def adopt(self, handover_id: str, offered: OfferedRequest, detached: Detached, now: float) -> None:
        """Go on with a request that has come with its KV, after `settle`.

        Raises
        ------
        RequestRejected : as `Handovers.adopt`; then nothing has changed.
        """
        self._core.adopt(handover_id, offered, detached, now)

    def let_go(self, request_id: str) -> None:
        """Forget a request that another replica has adopted."""
        self._core.let_go(request_id)

    def charge(self, seconds: float) -> None:
        """Let the next step take longer."""
        self._charged += seconds

    def abandon(self, now: float) -> list[OfferedRequest]:
        """Die; return the requests that had not ended, with the tokens that they had got by now."""
        self.settle(now)
        self._core.end_work(now)
        self.next_time = inf
        return self._core.deliveries.open_requests

    def counters(self) -> ReplicaCounters:
        """Return what it has done so far."""
        return self._core.counters()
