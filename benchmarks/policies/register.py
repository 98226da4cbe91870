"""Importing this module gives the scheduler the policies and routers of this folder, by their names."""

from __future__ import annotations

from benchmarks.policies.fastserve import FASTSERVE
from benchmarks.policies.niyama import NIYAMA
from benchmarks.policies.routers import LeastWork, RandomRouter
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.replica.policies import POLICIES

POLICIES.update(niyama=NIYAMA, fastserve=FASTSERVE)
ROUTERS["random"] = RandomRouter
ROUTERS["least-work"] = LeastWork
