"""Which requests are hopeless on a configuration that is searched: known in whatever process asks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from onbeat.metrics.record import RequestRecord
from onbeat.planner.grid import ReplicaCase
from onbeat.simulator.idle import IdleReplica


@dataclass(frozen=True, slots=True)
class HopelessOn:
    """Says of a request whether even an idle replica of a case would miss its objectives.

    It can be sent to other processes, as the case can; there the replica is built when it is first asked.
    """

    case: ReplicaCase

    def __call__(self, record: RequestRecord) -> bool:
        return _idle_replica(self.case)(record)


@lru_cache(maxsize=16)
def _idle_replica(case: ReplicaCase) -> IdleReplica:
    built = case.build()
    return IdleReplica(built.step_time, host_overhead=built.config.host_overhead)
