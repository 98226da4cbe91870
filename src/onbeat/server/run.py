"""Run the application: say when ready, drain on the first signal, stop on the second."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI

from onbeat.core.errors import counted
from onbeat.core.fleet import FleetView
from onbeat.core.settled_memory import settled_memory
from onbeat.server import listening
from onbeat.server.connection import BodyRoom, BoundedConnection
from onbeat.server.generation import Lifecycle
from onbeat.server.server_config import ServerConfig

logger = logging.getLogger("onbeat.server")

_ABORT_SECONDS = 2.0
"""What requests that are aborted get to tell their clients."""

_FIRST_REQUEST_SECONDS = 5
"""Whoever has connected to a server that leaves is about to ask, and is not to be turned away."""

_HANGUP = "SIGHUP changes nothing. With --front-ends 2 it would replace front ends; SIGTERM ends the server"

_READ_SECONDS = 3.0
"""What clients get to read the rest of their answers, once all have been made."""

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed while its next request is on the way."""

_M_MMAP_THRESHOLD = -3
_LEAST_MAPPED_BYTES = 256 * 2**10
"""Pieces of memory from this size on go back to the system when they are freed. glibc would learn from the
first large body to keep what it frees, and 300 MB of them would stay with an idle server."""


async def serve(
    app: FastAPI,
    config: ServerConfig,
    sock: socket.socket,
    *,
    on_started: Callable[[str], None],
    has_others: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the terminal is closed, then drain.

    On the first signal `/ready` turns 503, new generations get 503, and running ones finish within
    `config.shutdown_timeout` seconds; those that do not are aborted and say so. A second signal aborts
    at once. Replicas that end meanwhile are started again; while none is ready `/ready` answers 503.

    Parameters
    ----------
    app : from `create_app`.
    config : the same as the application's.
    sock : from `bind`; closed at the end.
    on_started : called with the server's URL once it takes requests.
    has_others : whether others listen on the same socket. Then Ctrl-C does not end it, and after SIGHUP it
        takes no further connection, and ends once the requests of those that it has are answered.

    Raises
    ------
    ConfigError : a TLS file is missing or wrong, or the port was taken meanwhile.
    """
    listening.check_tls(config)
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # not every libc has it
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES)
    listening.listen(sock, f"{config.host}:{config.port}")
    server = _Server(app, config, sock, partial(on_started, listening.url_of(config, sock)))
    ends_on = [signal.SIGTERM] if has_others else listening.END_SIGNALS
    try:
        with (
            settled_memory(),
            listening.on_signals(ends_on, server.on_signal),
            listening.on_hangup(
                server.on_signal, server.on_leave if has_others else partial(logger.warning, _HANGUP)
            ),
        ):
            await server.serve(sockets=[])
    finally:
        sock.close()
        if server.drain is not None:
            await server.drain


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Return how uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=partial(  # type: ignore[arg-type]  # called as the class would be
            BoundedConnection,
            limits=config.connections,
            bodies=BodyRoom(max(config.connections.max_unfinished_bytes, 4 * config.max_body_bytes)),
            on_refused=app.state.telemetry.exporter.server.count_refused_connection,
            origins=config.allowed_origins,
        ),
        backlog=listening.BACKLOG,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        log_config=None,
        log_level="error",  # its warnings are about clients, and anybody could fill the log with them
        access_log=False,  # ours knows tokens and times
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2 * round(_READ_SECONDS),
    )


class _Server(uvicorn.Server):
    """uvicorn's server, which turns signals into an orderly end: the first one does not stop the listening.

    It takes connections by a `Door`: libuv takes more than there are files for.
    """

    def __init__(
        self, app: FastAPI, config: ServerConfig, sock: socket.socket, on_started: Callable[[], None]
    ) -> None:
        super().__init__(uvicorn_config(app, config))
        self._state, self._sock, self._on_started = app.state, sock, on_started
        self._most = config.connections.max_connections + listening.REFUSED_PLACES
        self._lifecycle: Lifecycle = app.state.lifecycle
        self._timeout = config.shutdown_timeout
        self.drain: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        config, state = self.config, self.server_state
        make = partial(  # type: ignore[call-arg]  # the one of `uvicorn_config`
            config.http_protocol_class, config=config, server_state=state, app_state=self.lifespan.state
        )
        self._door = listening.Door(self._sock, make, config.ssl, lambda: self._most - len(state.connections))
        self._on_started()
        self._warming_up = asyncio.create_task(self._state.warm_up())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._door.close()
        closing = asyncio.get_running_loop().call_later(_READ_SECONDS, self._close_unread)
        await super().shutdown(sockets)
        closing.cancel()

    def _close_unread(self) -> None:
        """Close the connections that are left, whose applications then end as if their clients had left."""
        left = list(self.server_state.connections)
        logger.warning("closing %s: the client reads too slowly", counted(len(left), "connection"))
        for connection in left:
            connection.transport.abort()

    def on_signal(self) -> None:
        if self.drain is None:
            num_open = counted(self._lifecycle.num_open, "request")
            logger.info("draining: no new requests; waiting for %s", num_open)
            self._lifecycle.is_draining = True
            fleet: FleetView | None = self._state.fleet
            if fleet is not None:
                fleet.expect_end()
            self.drain = asyncio.create_task(self._stop_when_idle())
        else:
            logger.info("stopping at once")
            self._hurry.set()

    def on_leave(self) -> None:
        if self.drain is None:
            self._door.close()
            self.drain = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        connections = cast(set[BoundedConnection], self.server_state.connections)
        for seconds_left in reversed(range(_FIRST_REQUEST_SECONDS)):
            await asyncio.sleep(1)  # some are not known yet
            for connection in list(connections):
                if connection.cycle or not seconds_left:
                    connection.shutdown()  # now if it is idle, else with its answer
            if all(connection.cycle for connection in connections):
                break
        await self._stop_when_idle()

    async def _stop_when_idle(self) -> None:
        idle = asyncio.create_task(self._lifecycle.idle.wait())
        hurry = asyncio.create_task(self._hurry.wait())
        done, _ = await asyncio.wait(
            {idle, hurry}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if idle not in done:
            logger.warning("aborting %s still running", counted(self._lifecycle.num_open, "request"))
            self._lifecycle.abort()
            await asyncio.wait({idle}, timeout=_ABORT_SECONDS)
        for task in (idle, hurry):
            task.cancel()
        self.should_exit = True
