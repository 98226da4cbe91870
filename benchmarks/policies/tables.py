"""What this folder adds to the tables of the scheduler."""

from __future__ import annotations

from typing import Any

from benchmarks.policies.distserve import DistServe
from benchmarks.policies.fastserve import FASTSERVE
from benchmarks.policies.llumnix import FreenessRouter, FreenessScaling, Pairing
from benchmarks.policies.niyama import NIYAMA
from benchmarks.policies.routers import LeastWork, RandomRouter
from benchmarks.policies.scorpio import SCORPIO
from benchmarks.policies.splitwise import Splitwise
from benchmarks.policies.triaged import TRIAGED
from onbeat.scheduler.cluster.migration import MOVE_RULES, POOL_POLICIES
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.cluster.scaling import SCALING_POLICIES
from onbeat.scheduler.replica.policies import POLICIES

ADDED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (POLICIES, {"niyama": NIYAMA, "fastserve": FASTSERVE, "scorpio": SCORPIO, **TRIAGED}),
    (ROUTERS, {"random": RandomRouter, "least-work": LeastWork, "freeness": FreenessRouter}),
    (POOL_POLICIES, {"distserve": DistServe, "splitwise": Splitwise}),
    (MOVE_RULES, {"llumnix": Pairing}),
    (SCALING_POLICIES, {"freeness": lambda _down_seconds: FreenessScaling()}),
)
"""Each table with what is added, by name."""
