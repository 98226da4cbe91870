"""Which machine's keeper decides for the gates of several machines: that of the machine which holds a lease.

Whoever holds it renews it. Others take it once they have not seen it renewed for long enough, by their own
clocks; the kernel ends a keeper that cannot renew it before that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from onbeat.core.errors import ConfigError

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
