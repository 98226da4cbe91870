"""Processes that end as those of `spawn` do, and begin in milliseconds: of one that has imported all."""

from __future__ import annotations

from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from unittest import mock

from onbeat.cluster import local_launcher
from onbeat.cluster.launcher import ReplicaPlace, ReplicaSpec
from onbeat.cluster.local_launcher import LocalLauncher


@cache
def forking() -> ForkServerContext:
    """Return a context in place of `spawn`'s; its processes have the environment of the first one's start."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.fake_runner", "onbeat.engine.process"])
    return context


class QuickLauncher(LocalLauncher):
    """Starts replicas so. Tests of `LocalLauncher` itself, and those of the program, spawn them."""

    async def start(self, spec: ReplicaSpec) -> ReplicaPlace:
        with mock.patch.object(
            local_launcher, "multiprocessing", SimpleNamespace(get_context=lambda _: forking())
        ):
            return await super().start(spec)
