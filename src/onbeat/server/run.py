"""Run the application: listen, say when ready, drain on the first signal, stop on the second.

A server opens as many files as its connections need, or says that it may have fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State

from onbeat.core.errors import ConfigError, counted
from onbeat.core.protocols import FleetView
from onbeat.core.settled_memory import settled_memory
from onbeat.server.connection import BodyRoom, BoundedConnection
from onbeat.server.generation import Lifecycle
from onbeat.server.server_config import ConnectionLimits, ServerConfig

OWN_FILES = 96
"""Of a server without connections: some 50, those that it has for a moment, and a burst that it refuses."""
REPLICA_FILES = 8
"""Of the server, for each replica."""
_HINT = "raise the limit (`ulimit -n`, or LimitNOFILE= in a systemd unit)"


def with_descriptors(limits: ConnectionLimits, num_replicas: int) -> tuple[ConnectionLimits, str]:
    """Let this process open as many files as it may need.

    Parameters
    ----------
    limits : what the server's connections may be.
    num_replicas : most that there will be.

    Returns
    -------
    limits : with as many connections as there are files for: above them clients hear 503, not nothing.
    told : the line that says so; empty where all fit.

    Raises
    ------
    ConfigError : there are too few for a server.
    """
    own = OWN_FILES + REPLICA_FILES * num_replicas
    needed = own + limits.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft <= own:
        raise ConfigError(
            f"this process may open {soft} files, and a server with {counted(num_replicas, 'replica')} needs "
            f"{own + 1} or more; {_HINT}"
        )
    if soft >= needed:
        return limits, ""
    fitting = replace(limits, max_connections=soft - own)
    return fitting, (
        f"connections: at most {fitting.max_connections:,} at once, because this process may open {soft:,} "
        f"files; --max-connections {limits.max_connections} needs {needed:,}: {_HINT}"
    )


logger = logging.getLogger("onbeat.server")

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ABORT_SECONDS = 2.0
"""What requests that are aborted get to tell their clients."""

_FIRST_REQUEST_SECONDS = 5
"""Whoever has connected to a server that leaves is about to ask, and is not to be turned away."""

_READ_SECONDS = 3.0
"""What clients get to read the rest of their answers, once all have been made."""

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed while its next request is on the way."""

_BACKLOG = 2048
"""Connections that the kernel takes before the server has."""

_M_MMAP_THRESHOLD = -3
_LEAST_MAPPED_BYTES = 256 * 2**10
"""Pieces of memory from this size on go back to the system when they are freed. glibc would learn from the
first large body to keep what it frees, and 300 MB of them would stay with an idle server."""

_LISTENERS = 16
"""Sockets that listen on the one address: libuv accepts one connection of each at a time, between all else
that is to be done (libuv#3696), so that on a busy server new clients would wait for many rounds."""


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that has the configured address for itself, not listening yet.

    Call it before the model is loaded: a port that another server has, or is about to have, is then known
    within milliseconds.

    Raises
    ------
    ConfigError : the port is in use, or the address is not one of this machine's.
    """
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {where}: no such host; choose another --host") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        _bind_alone(sock, address)
        _set_keep_alive(sock)
    except OSError as error:
        sock.close()
        raise _cannot_listen(where, error) from error
    return sock


def _bind_alone(sock: socket.socket, address: object) -> None:
    """Bind so that nobody else can, if possible; it is not while old connections of the port fade away."""
    try:
        sock.bind(address)  # type: ignore[arg-type]  # what getaddrinfo returned
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)  # type: ignore[arg-type]


def listen(sock: socket.socket, where: str) -> None:
    """Listen here rather than in uvicorn, whose error would not say what is wrong.

    Raises
    ------
    ConfigError : another server has taken the port since.
    """
    # One that another process has sent does not know that it must not wait: its copies would make all wait.
    sock.settimeout(0)
    try:
        # connections inherit it: those that fade away must not keep the next server from the port
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(where, error) from error


def _set_keep_alive(sock: socket.socket) -> None:
    """Notice within two minutes that a client's machine is gone; connections inherit this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _cannot_listen(where: str, error: OSError) -> ConfigError:
    cure = (
        "stop the server that has it or choose another --port"
        if error.errno == errno.EADDRINUSE
        else "choose another address"
    )
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}; {cure}")


async def serve(
    app: FastAPI,
    config: ServerConfig,
    sock: socket.socket,
    *,
    on_started: Callable[[str], None],
    ends_on: Sequence[signal.Signals] = END_SIGNALS,
    leaves_on: Sequence[signal.Signals] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    On the first signal `/ready` turns 503, new generations get 503, and running ones finish within
    `config.shutdown_timeout` seconds; those that do not are aborted and say so. A second signal aborts
    at once. Replicas that end meanwhile are started again; while none is ready `/ready` answers 503.

    Parameters
    ----------
    app : from `create_app`.
    config : the same as the application's.
    sock : from `bind`; closed at the end.
    on_started : called with the server's URL once it takes requests.
    ends_on : the signals that end it.
    leaves_on : the signals after which it takes no further connection, since others listen on the same
        socket, and ends once the requests of those that it has are answered.

    Raises
    ------
    ConfigError : a TLS file is missing or wrong, or the port was taken meanwhile.
    """
    check_tls(config)
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # not every libc has it
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES)
    app.openapi()  # kept: the first who asks for it would hold up all others
    listen(sock, f"{config.host}:{config.port}")
    started = partial(on_started, served_url(config, sock))
    server = _Server(uvicorn_config(app, config), started, app.state.warm_up)
    stopper = _Stopper(app.state, server, config.shutdown_timeout)
    listeners = [sock, *(sock.dup() for _ in range(_LISTENERS - 1))]
    try:
        with (
            settled_memory(),
            on_signals(ends_on, stopper.on_signal),
            on_signals(leaves_on, stopper.on_leave),
        ):
            await server.serve(sockets=listeners)
    except OSError as error:
        raise _cannot_listen(f"{config.host}:{config.port}", error) from error
    finally:
        for each in listeners:
            each.close()
        await stopper.close()


def check_tls(config: ServerConfig) -> None:
    """Check that the TLS files can be used.

    Raises
    ------
    ConfigError : a file is missing, damaged, or the key does not belong to the certificate.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"cannot use the TLS certificate {config.ssl_certfile} with the key {config.ssl_keyfile}: {error}"
            "; give PEM files that belong together"
        ) from error


def served_url(config: ServerConfig, sock: socket.socket) -> str:
    """Return the address that a server answers at."""
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"


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
        backlog=_BACKLOG,
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
    """uvicorn's server without its signal handlers: the first signal must not stop the listening."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        warm_up: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._warm_up = warm_up

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()
        self._warming_up = asyncio.create_task(self._warm_up())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.get_running_loop().call_later(_READ_SECONDS, self._close_unread)
        await super().shutdown(sockets)
        closing.cancel()

    def _close_unread(self) -> None:
        """Close the connections that are left, whose applications then end as if their clients had left."""
        left = list(self.server_state.connections)
        logger.warning("closing %s: the client reads too slowly", counted(len(left), "connection"))
        for connection in left:
            connection.transport.abort()


class _Stopper:
    """Turns signals into an orderly end."""

    def __init__(self, state: State, server: uvicorn.Server, timeout: float) -> None:
        self._lifecycle: Lifecycle = state.lifecycle
        self._fleet: FleetView | None = state.fleet
        self._server = server
        self._timeout = timeout
        self._drain: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def on_signal(self) -> None:
        if self._drain is None:
            num_open = counted(self._lifecycle.num_open, "request")
            logger.info("draining: no new requests; waiting for %s", num_open)
            self._lifecycle.is_draining = True
            if self._fleet is not None:
                self._fleet.expect_end()
            self._drain = asyncio.create_task(self._stop_when_idle())
        else:
            logger.info("stopping at once")
            self._hurry.set()

    def on_leave(self) -> None:
        if self._drain is None:
            for listening in self._server.servers:
                listening.close()
            self._drain = asyncio.create_task(self._leave())

    async def close(self) -> None:
        if self._drain is not None:
            await self._drain

    async def _leave(self) -> None:
        connections = cast(set[BoundedConnection], self._server.server_state.connections)
        for seconds_left in reversed(range(_FIRST_REQUEST_SECONDS)):
            await asyncio.sleep(1)  # some are not known yet
            for connection in list(connections):
                if connection.has_asked or not seconds_left:
                    connection.shutdown()  # now if it is idle, else with its answer
            if all(connection.has_asked for connection in connections):
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
        self._server.should_exit = True


@contextlib.contextmanager
def on_signals(numbers: Sequence[signal.Signals], handler: Callable[[], None]) -> Iterator[None]:
    """Call `handler` in the event loop on signals while the block runs."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
