"""Where a server listens, and what it may open there: known before anything is loaded.

A server opens as many files as its connections need, or says that it may have fewer. What is wrong here is
said without waiting for the frameworks that answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from onbeat.core.errors import ConfigError, counted
from onbeat.server.server_config import ConnectionLimits, ServerConfig

REFUSED_PLACES = 32
"""For connections above the most that there may be: each hears 503. Further ones wait with the kernel."""
OWN_FILES = 64 + REFUSED_PLACES
"""Of a server without connections: some 50, those that it has for a moment, and those that it refuses."""
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


Handler = Callable[[], object]

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048
"""Connections that the kernel takes before the server has."""
HANDSHAKE_SECONDS = 30.0
"""What a client has to begin TLS."""
_TAKEN_AT_ONCE = 16
_FULL_SECONDS = 0.02
"""How often it is looked whether a place has become free."""


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
        # it is noticed within two minutes that a client's machine is gone; connections inherit this
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    except OSError as error:
        sock.close()
        raise cannot_listen(where, error) from error
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
        sock.listen(BACKLOG)
    except OSError as error:
        raise cannot_listen(where, error) from error


def cannot_listen(where: str, error: OSError) -> ConfigError:
    """Return the error that says why, and what to do."""
    cure = (
        "stop the server that has it or choose another --port"
        if error.errno == errno.EADDRINUSE
        else "choose another address"
    )
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}; {cure}")


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


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    """Return the address that a server answers at."""
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"


class Door:
    """Takes connections while there are places for them; others wait with the kernel, which answers for us.

    A connection has its place from the moment when it is taken: a TLS handshake is work, and a file, before
    anything knows that there is a connection. libuv would take all, and drop those without a file.

    Parameters
    ----------
    sock : listens.
    make : returns the protocol of a connection.
    context : of TLS; None without.
    places : returns how many there are, but for those who shake hands.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        places: Callable[[], int],
    ) -> None:
        self._sock, self._make, self._context, self._places = sock, make, context, places
        self._loop = asyncio.get_running_loop()
        self._greeting: set[asyncio.Task[None]] = set()
        self._opening = self._loop.call_soon(self._open)

    def close(self) -> None:
        """Take no further connection."""
        self._opening.cancel()
        self._loop.remove_reader(self._sock)

    def _open(self) -> None:
        self._loop.add_reader(self._sock, self._take)

    def _take(self) -> None:
        """Take some of those who wait, so that on a busy server none waits for many rounds."""
        for _ in range(_TAKEN_AT_ONCE):
            try:
                connection = self._sock.accept()[0] if len(self._greeting) < self._places() else None
            except BlockingIOError:
                return
            except OSError:  # there are no files, whoever has them
                connection = None
            if connection is None:
                self.close()
                self._opening = self._loop.call_later(_FULL_SECONDS, self._open)
                return
            connection.settimeout(0)
            task = self._loop.create_task(self._greet(connection))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: socket.socket) -> None:
        seconds = None if self._context is None else HANDSHAKE_SECONDS
        with contextlib.suppress(OSError):  # a client that speaks no TLS, is too slow, or has left
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )


@contextlib.contextmanager
def on_signals(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Call `handler` in the event loop on signals while the block runs."""
    loop = asyncio.get_running_loop()
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number, what in zip(numbers, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, what)


def on_hangup(end: Handler, otherwise: Handler) -> contextlib.AbstractContextManager[None]:
    """Let SIGHUP call `otherwise` while the block runs, or `end` if it says that the terminal is gone.

    Under `nohup` it does not say so, nor where there was no terminal.
    """
    ends = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return on_signals([signal.SIGHUP], lambda: end() if ends and not _has_terminal() else otherwise())


def _has_terminal() -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return True
    return False
