"""A keeper's lease as an actor of Ray that has a name, runs on the cluster's head, and outlives who made it.

An actor that is started again has lost its record. For as long as a lease lasts it then gives the lease to
nobody but the keeper that had it: by then that has renewed it or has ended.

Another process speaks with Ray for this one. Ray ends a process whose raylet is gone, and lets some calls
wait for the head as long as it takes.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from typing import Any

from onbeat.cluster.lease import CALL_SECONDS, LEASE_SECONDS, LeaseRecord, LeaseTaken
from onbeat.core.extras import require

IDLE_SECONDS = 30
"""The process that speaks with Ray ends when it has been asked nothing, or has waited, for so long."""


class RayLease:
    """Reads and writes the record of an actor, which refuses what is out of date.

    Parameters
    ----------
    name : of the actor.
    """

    def __init__(self, name: str) -> None:
        self._name, self._version, self._pool = name, "", _new_pool()
        self._own: tuple[str, str] | None = None
        """What was written here last, unless somebody else has written since, or it was given back."""

    def read(self) -> LeaseRecord | None:
        record, version, seconds_left = self._call("read")
        if record is None and seconds_left > 0 and (record := self._own) is None:
            raise OSError(f"its actor has just started, and its keeper may live for {seconds_left:.0f} s")
        if record != self._own:
            self._own = None
        self._version = version
        return None if record is None else LeaseRecord(record[0], record[1], version)

    def write(self, record: LeaseRecord) -> None:
        own = record.holder, record.address
        if (version := self._call("write", own, self._version)) is None:
            raise LeaseTaken
        self._version, self._own = version, own if record.holder else None

    def _call(self, *call: Any) -> Any:
        """Return what the actor answers.

        Raises
        ------
        OSError : it does not in time, or Ray says why it cannot.
        MissingExtra : Ray is not installed.
        """
        try:
            asked = self._pool.submit(ask_ray, self._name, *call)
            try:
                return asked.result(CALL_SECONDS)
            finally:
                asked.cancel()
        except (BrokenProcessPool, TimeoutError) as error:
            if isinstance(error, BrokenProcessPool):
                self._pool = _new_pool()
            raise OSError(f"Ray does not answer in {CALL_SECONDS:.0f} s") from error


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def ask_ray(name: str, *call: Any) -> Any:
    """Return what the actor answers to a call: its method, and the arguments."""
    signal.alarm(IDLE_SECONDS)  # it ends this process, whatever Ray does
    ray = require("ray", extra="cluster", purpose="--keeper-lease ray")
    try:
        if not ray.is_initialized():
            ray.init("auto", namespace="onbeat", log_to_driver=False, logging_level=logging.ERROR)
        return ray.get(getattr(_actor(ray, name), call[0]).remote(*call[1:]), timeout=CALL_SECONDS)
    except Exception as error:
        if type(error).__name__ == "ActorDiedError":
            _actor.cache_clear()  # for good: somebody has ended it
        raise OSError(f"{type(error).__name__}: {error}".partition("\n")[0]) from None


@cache
def _actor(ray: Any, name: str) -> Any:
    """Return the actor that has a name; it is made if there is none."""

    class RecordKeeper:  # in here, so that Ray sends all of it: the head may have no onbeat
        def __init__(self) -> None:
            self.record: tuple[str, str] | None = None
            self.version, self.began = secrets.token_hex(8), time.monotonic()

        def read(self) -> tuple[tuple[str, str] | None, str, float]:
            return self.record, self.version, self.began + LEASE_SECONDS - time.monotonic()

        def write(self, record: tuple[str, str], version: str) -> str | None:
            if version != self.version:
                return None
            self.record, self.version = record, secrets.token_hex(8)
            return self.version

    # without the head's machine no cluster goes on anyway
    kept: dict[str, Any] = {"resources": {"node:__internal_head__": 0.001}, "max_restarts": -1, "num_cpus": 0}
    return (
        ray.remote(RecordKeeper).options(name=name, lifetime="detached", get_if_exists=True, **kept).remote()
    )
