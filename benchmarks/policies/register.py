"""Importing this module gives the scheduler the policies of this folder, by their names."""

from __future__ import annotations

from benchmarks.policies.fastserve import FASTSERVE
from benchmarks.policies.niyama import NIYAMA
from onbeat.scheduler.replica.policies import POLICIES

POLICIES.update(niyama=NIYAMA, fastserve=FASTSERVE)
