"""Which machine's keeper decides for the gates of several machines: that of the machine which holds a lease.

Whoever holds it renews it. Others take it once they have not seen it renewed for long enough, by their own
clocks; the kernel ends a keeper that cannot renew it before that.

A lease is an object of Kubernetes. Not by the library's own `leaderelection`: its renewals wait for an answer
as long as it takes, and go by time of day, so that they cannot end a keeper in time; and it tells nobody
where the keeper is.

Or it is an actor of Ray that has a name, runs on the cluster's head, and outlives who made it. An actor that
is started again has lost its record. For as long as a lease lasts it then gives the lease to nobody but the
keeper that had it: by then that has renewed it or has ended. Another process speaks with Ray for this one.
Ray ends a process whose raylet is gone, and lets some calls wait for the head as long as it takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from onbeat.core.errors import ConfigError
from onbeat.core.extras import require

logger = logging.getLogger("onbeat.cluster")

LEASE_SECONDS = 15.0
"""Others take a lease that they have not seen renewed for so long."""
RENEW_SECONDS = 10.0
"""Who has not renewed it for so long ends at once."""
RETRY_SECONDS = 2.0
CALL_SECONDS = 3.0
"""What one call of whoever keeps the lease may take."""


class LeaseRecord(NamedTuple):
    """What a lease says."""

    holder: str
    """A machine; empty where it was given back."""
    address: str
    """Where gates reach the keeper there; empty until it serves."""
    version: str = ""
    """Another one each time that it is written."""


class Lease(Protocol):
    """A record outside of all machines. Its calls return or fail within `CALL_SECONDS`."""

    def read(self) -> LeaseRecord | None:
        """Return what it says; None where it was never written.

        Raises
        ------
        ConfigError : this machine may not read it.
        """

    def write(self, record: LeaseRecord) -> None:
        """Write it, if nobody else has since it was read here.

        Raises
        ------
        LeaseTaken : somebody has.
        ConfigError : this machine may not write it.
        """


class LeaseTaken(Exception):
    """Another machine was quicker."""


def keeper_endpoint(address: str | None) -> str:
    """Return the ZeroMQ endpoint at which other machines reach a keeper here.

    Parameters
    ----------
    address : HOST or HOST:PORT, as `--keeper-address` has it; None is the host name, and any free port.

    Raises
    ------
    ConfigError : the host has no address, or its name means this machine alone.
    """
    try:
        parts = urlsplit(f"//{address or socket.gethostname()}")
        found = str(socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)[0][4][0])
        port = parts.port or "*"
    except (OSError, ValueError) as error:
        where = address or f"the host name {socket.gethostname()}"
        raise ConfigError(
            f"{where} is no address ({error}); give --keeper-address HOST or HOST:PORT"
        ) from error
    if address is None and found.startswith(("127.", "::1")):
        raise ConfigError(
            f"the host name {parts.hostname} means {found}, which others cannot reach; give --keeper-address"
        )
    return f"tcp://{f'[{found}]' if ':' in found else found}:{port}"


class Tenure:
    """The part that this machine has in an election.

    Parameters
    ----------
    name : of this machine, which no other has and all keepers here have.

    Attributes
    ----------
    address : of the keeper here, for others, once it serves.
    found : what the lease said last.
    on_found : is called with it.
    """

    def __init__(self, lease: Lease, name: str) -> None:
        self.name, self.address = name, ""
        self.found: LeaseRecord | None = None
        self.on_found: Callable[[LeaseRecord], None] = lambda _: None
        self._lease = lease
        self._seen = -float("inf")
        self._task: asyncio.Task[None] | None = None
        self._is_due, self._is_closing = asyncio.Event(), False

    @property
    def is_mine(self) -> bool:
        """Whether this machine has the lease."""
        return self.found is not None and self.found.holder == self.name

    async def begin(self) -> None:
        """Find out who has the lease, or take it; from then on it is looked after.

        Raises
        ------
        ConfigError : this machine may not use it.
        """
        while self.found is None:
            try:
                await self.look()
            except ConfigError:
                raise
            except Exception as error:
                logger.warning("the keeper's lease cannot be read, and nothing starts: %s", error)
            if self.found is None:
                await asyncio.sleep(RETRY_SECONDS)
        self._task = asyncio.create_task(self._hold(), name="onbeat-lease")

    async def _hold(self) -> None:
        was_mine = self.is_mine
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), RETRY_SECONDS)
            self._is_due.clear()
            if self._is_closing:
                return
            try:
                await self.look()
            except Exception as error:
                end = "; this keeper ends if that lasts" if was_mine else ""
                logger.warning("the keeper's lease cannot be renewed or read: %s%s", error, end)
            if self.is_mine != was_mine:
                assert self.found is not None
                logger.error("the keeper's lease is now held by %s", self.found.holder)
                # the next process here is what this one is not: a keeper, or none
                os.kill(os.getpid(), signal.SIGKILL)

    async def look(self) -> None:
        """Read the lease; renew it if it is this machine's, and take it if nobody has it any more."""
        asked = time.monotonic()
        read = await asyncio.to_thread(self._lease.read)
        if read is None or self.found is None or read.version != self.found.version:
            self._seen = time.monotonic()
        is_left = read is None or not read.holder or time.monotonic() - self._seen > LEASE_SECONDS
        if is_left or (read is not None and read.holder == self.name):
            read = LeaseRecord(self.name, self.address)
            try:
                await asyncio.to_thread(self._lease.write, read)
            except LeaseTaken:
                return  # the next look tells by whom
            # not a task of this loop, which may stand still, or wake up late
            signal.setitimer(signal.ITIMER_REAL, max(asked + RENEW_SECONDS - time.monotonic(), 1e-3))
        assert read is not None
        self.found = read
        self.on_found(read)

    def tell(self, address: str) -> None:
        """Tell other machines by the lease where the keeper here is, as soon as that can be written."""
        self.address = address
        self._is_due.set()

    async def close(self) -> None:
        """Give the lease back, so that another machine need not wait."""
        self._is_closing = True
        self._is_due.set()
        if self._task is not None:
            await self._task  # what it writes is not to come after what is written here
        if self.is_mine:
            try:
                found = await asyncio.to_thread(self._lease.read)
                if found is not None and found.holder == self.name:
                    await asyncio.to_thread(self._lease.write, LeaseRecord("", ""))
            except Exception as error:
                logger.warning("the keeper's lease is not given back, and others wait for it: %s", error)
        signal.setitimer(signal.ITIMER_REAL, 0)


ADDRESS = "onbeat/keeper-address"
"""The annotation that says where the keeper is."""


class KubernetesLease:
    """Reads and writes a Lease of `coordination.k8s.io/v1`; the API server refuses what is out of date.

    Parameters
    ----------
    namespace, name : of the object.

    Raises
    ------
    ConfigError : there is no configuration of a cluster.
    MissingExtra : the library is not installed.
    """

    def __init__(self, namespace: str, name: str) -> None:
        self._namespace, self._name = namespace, name
        config, self._client = (
            require(f"kubernetes.{part}", extra="kubernetes", purpose="--keeper-lease kubernetes")
            for part in ("config", "client")
        )
        try:
            try:
                config.load_incluster_config()  # of a pod
            except config.ConfigException:
                config.load_kube_config()  # as kubectl does
        except config.ConfigException as error:
            raise ConfigError(f"--keeper-lease kubernetes finds no cluster: {error}") from error
        settings = self._client.Configuration.get_default_copy()
        settings.retries = 0  # what fails is tried again, in time
        self._api = self._client.CoordinationV1Api(self._client.ApiClient(settings))
        self._last: Any = None

    def read(self) -> LeaseRecord | None:
        self._last = self._call(404, self._api.read_namespaced_lease, self._name, self._namespace)
        if self._last is None:
            return None
        about = self._last.metadata
        address = (about.annotations or {}).get(ADDRESS, "")
        return LeaseRecord(self._last.spec.holder_identity or "", address, about.resource_version)

    def write(self, record: LeaseRecord) -> None:
        now = datetime.now(UTC)
        last = None if self._last is None else self._last.spec
        is_new = last is None or last.holder_identity != record.holder
        spec = self._client.V1LeaseSpec(
            holder_identity=record.holder,
            lease_duration_seconds=round(LEASE_SECONDS),
            acquire_time=now if last is None or is_new else last.acquire_time,
            renew_time=now,
            lease_transitions=0 if last is None else (last.lease_transitions or 0) + is_new,
        )
        about = self._client.V1ObjectMeta(name=self._name, annotations={ADDRESS: record.address})
        body = self._client.V1Lease(metadata=about, spec=spec)
        if self._last is None:
            written = self._call(409, self._api.create_namespaced_lease, self._namespace, body)
        else:
            about.resource_version = self._last.metadata.resource_version
            replace = self._api.replace_namespaced_lease
            written = self._call(409, replace, self._name, self._namespace, body)
        if written is None:
            raise LeaseTaken

    def _call(self, absent: int, call: Any, *arguments: Any) -> Any:
        """Return what the API server answers; None where that is a certain status."""
        try:
            return call(*arguments, _request_timeout=CALL_SECONDS)
        except self._client.ApiException as error:
            if error.status == absent:
                return None
            what = f"the Lease {self._namespace}/{self._name}"
            if error.status in (401, 403):
                raise ConfigError(
                    f"this machine may not use {what} ({error.reason}): let its service account get, create "
                    "and update leases of coordination.k8s.io there"
                ) from error
            raise OSError(f"{what}: the API server answers {error.status} {error.reason}") from error


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


def open_lease(text: str) -> Lease:
    """Return the lease that `--keeper-lease` names.

    Raises
    ------
    ConfigError : it names none, or its kind cannot be used here.
    """
    kind, _, name = text.partition(":")
    namespace, _, own = name.partition("/")
    if kind == "kubernetes" and namespace and own:
        return KubernetesLease(namespace, own)
    if kind == "ray" and name:
        return RayLease(name)
    raise ConfigError(f"--keeper-lease {text} names no lease; give kubernetes:NAMESPACE/NAME or ray:NAME")
