"""Importing this module gives the scheduler the policies and routers of this folder, by their names."""

from __future__ import annotations

from benchmarks.policies.fastserve import FASTSERVE
from benchmarks.policies.niyama import NIYAMA
from benchmarks.policies.routers import LeastWork, RandomRouter
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.replica.policies import POLICIES

POLICIES.update(niyama=NIYAMA, fastserve=FASTSERVE)
ROUTERS["random"] = lambda num_replicas, seed: RandomRouter(num_replicas, seed=seed)
ROUTERS["least-work"] = lambda num_replicas, seed: LeastWork(num_replicas)  # noqa: ARG005
