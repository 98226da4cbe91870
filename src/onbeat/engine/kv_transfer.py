"""Blocks copied over a TCP connection, between any two machines.

One connection a copy, all of it framed and bounded in time:

1. the source sends 16 random bytes;
2. the puller sends 16 of its own, a JSON request, and an HMAC of all three by the key that both were given;
3. the source answers with a JSON header and an HMAC of it and the puller's bytes;
4. where the header has no error: the blocks, and at the end a byte that is 1 if the lease still lasted then.

The key keeps strangers out. The blocks themselves are neither secret nor signed on the way: the network
between replicas must be trusted.

A lease says which blocks others may copy, and until when.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onbeat.core.errors import KVUnavailable
from onbeat.engine.kv_access import BlockMemory, KVEndpoint, KVSource

MOST_LEASES = 4096
"""At once; an engine has fewer requests."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that may be copied."""

    serial: int
    block_ids: tuple[int, ...]
    checksums: dict[int, int] = field(default_factory=dict)
    """Block -> CRC-32, as far as known; what is lent is not written to."""


class Leases:
    """The leases of one engine: its step loop grants and revokes them, other threads look.

    A lease ends when it is revoked, which must come before its blocks are given to anybody else. Nobody is
    waited for: who copies looks once more after the last byte, and throws away what it has if the lease has
    ended meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._num_granted = 0

    def grant(self, lease_id: str, block_ids: Sequence[int]) -> Lease:
        """Let blocks be copied, or further ones under a lease that lasts.

        Raises
        ------
        KVUnavailable : there are as many leases as there can be.
        """
        with self._lock:
            known = self._leases.get(lease_id)
            if known is None:
                if len(self._leases) >= MOST_LEASES:
                    raise KVUnavailable(f"{MOST_LEASES} requests have their KV lent already, as many as may")
                self._num_granted += 1
                known = Lease(self._num_granted, ())
            lease = Lease(known.serial, tuple(block_ids), known.checksums)
            self._leases[lease_id] = lease
            return lease

    def revoke(self, lease_id: str) -> None:
        """End a lease; one that has ended is ignored."""
        with self._lock:
            self._leases.pop(lease_id, None)

    def checksums(self, lease_id: str, serial: int) -> dict[int, int]:
        """Return what is known of a lease's blocks, to be added to; of one that has ended nothing."""
        with self._lock:
            lease = self._leases.get(lease_id)
        return {} if lease is None or lease.serial != serial else lease.checksums

    def block_ids(self, lease_id: str, serial: int) -> tuple[int, ...]:
        """Return the blocks of a lease.

        Raises
        ------
        KVUnavailable : it has ended.
        """
        with self._lock:
            lease = self._leases.get(lease_id)
        if lease is None or lease.serial != serial:
            raise KVUnavailable(f"the lease of the KV of {lease_id!r} has ended")
        return lease.block_ids

    def source(self, lease_id: str, endpoint: KVEndpoint) -> KVSource:
        """Return what another engine needs to copy the blocks of a lease that lasts."""
        with self._lock:
            lease = self._leases[lease_id]
        return KVSource(endpoint=endpoint, lease_id=lease_id, serial=lease.serial, block_ids=lease.block_ids)


logger = logging.getLogger("onbeat.engine")

PULL_SECONDS = 10.0
"""A copy that takes longer is given up: the tokens have been computed by then."""
KEY_BYTES = 32
"""Least length of a key."""
_NONCE_BYTES = 16
_DIGEST_BYTES = 32
_MOST_REQUEST_BYTES = 1 << 16
_HANDSHAKE_SECONDS = 2.0
"""A stranger may keep a connection for as long; one with the key waits as long for a place."""
_MOST_STRANGERS = 256
_MOST_COPIES = 16
_BACKLOG = 1024
_BUFFER_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")


class TcpTransport:
    """Copies blocks between engines: plain sockets, and a thread of the source for each connection.

    Parameters
    ----------
    key : `KEY_BYTES` or more, the same at every replica of a fleet.
    host : address to listen at, and to be reached at.
    """

    def __init__(self, key: bytes, *, host: str = "127.0.0.1") -> None:
        assert len(key) >= KEY_BYTES, "a short key can be guessed"
        self._key = key
        self._host = host
        self._server: _Server | None = None

    def serve(self, memory: BlockMemory, leases: Leases) -> KVEndpoint:
        """Let others copy leased blocks; return where they find them.

        Raises
        ------
        OSError : nobody can listen there.
        """
        assert self._server is None
        self._server = _Server(self._key, self._host, memory, leases)
        return KVEndpoint(layout=memory.layout, host=self._host, port=self._server.port)

    def pull(self, source: KVSource, first_block: int, memory: BlockMemory, into: Sequence[int]) -> int:
        """Copy blocks, and return how many bytes that were. Takes `PULL_SECONDS` at most.

        When it returns, or raises, it writes no more.

        Parameters
        ----------
        first_block : counted from the first of `source`.
        memory, into : where to, and the block for each that is copied.

        Raises
        ------
        KVUnavailable : the source is gone, its blocks are not like ours, either side has no such blocks, or
            the lease has ended. What the blocks hold then is not KV. Whether bytes have changed on the way
            is found by `KVTransfers`.
        """
        _check_blocks(source, first_block, memory, into)
        host, port = source.endpoint.host, source.endpoint.port
        end, num_bytes = time.monotonic() + PULL_SECONDS, 0
        try:
            with socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS) as connection:
                wire = _Wire(connection, end)
                self._ask(wire, source, first_block, len(into))
                for block_id in into:
                    for part in memory.views(block_id):
                        wire.receive_into(part)
                        num_bytes += len(part)
                if wire.receive(1) != b"\x01":
                    raise KVUnavailable(f"the lease of the KV of {source.lease_id!r} ended on the way")
        except (OSError, ValueError) as error:
            raise KVUnavailable(
                f"KV cannot be had from {host}:{port}: {error or type(error).__name__}"
            ) from error
        return num_bytes

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.close()

    def _ask(self, wire: _Wire, source: KVSource, first_block: int, num_blocks: int) -> None:
        """Say what is wanted, and check that the answer comes from somebody with the key."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        request = json.dumps([source.lease_id, source.serial, first_block, num_blocks]).encode()
        challenge = wire.receive(_NONCE_BYTES)
        wire.send(
            nonce, _LENGTH.pack(len(request)), request, _digest(self._key, b"ask", challenge, nonce, request)
        )
        answer = wire.receive_text()
        if not hmac.compare_digest(wire.receive(_DIGEST_BYTES), _digest(self._key, b"answer", nonce, answer)):
            raise KVUnavailable(
                "whoever answers for the KV does not have the key; give all replicas the same"
            )
        error = json.loads(answer)
        if error is not None:
            raise KVUnavailable(str(error))


class _Stranger:
    """A connection whose other side has not shown yet that it has the key; nothing waits for it.

    Parameters
    ----------
    connection : just accepted.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.end = time.monotonic() + _HANDSHAKE_SECONDS
        self._challenge = secrets.token_bytes(_NONCE_BYTES)
        self._received = bytearray()
        connection.settimeout(0)
        connection.send(self._challenge)  # finds room in any new connection

    def hear(self, key: bytes) -> _Asked | None:
        """Read what has come; return what is asked for, once it is there whole, from somebody with the key.

        Raises
        ------
        OSError : the other side has left.
        KVUnavailable : it has said something else.
        """
        data = self.connection.recv(_MOST_REQUEST_BYTES)
        if not data:
            raise ConnectionError("somebody has closed the connection")
        self._received += data
        start = _NONCE_BYTES + _LENGTH.size
        if len(self._received) < start:
            return None
        nonce = bytes(self._received[:_NONCE_BYTES])
        (length,) = _LENGTH.unpack_from(self._received, _NONCE_BYTES)
        if length > _MOST_REQUEST_BYTES or len(self._received) > start + length + _DIGEST_BYTES:
            raise KVUnavailable("somebody sent what is no request")
        if len(self._received) < start + length + _DIGEST_BYTES:
            return None
        request = bytes(self._received[start : start + length])
        if not hmac.compare_digest(
            bytes(self._received[start + length :]), _digest(key, b"ask", self._challenge, nonce, request)
        ):
            raise KVUnavailable("somebody without the key asked for it")
        return _Asked(nonce, *json.loads(request))


class _Asked(NamedTuple):
    """What a puller with the key wants."""

    nonce: bytes
    lease_id: str
    serial: int
    first_block: int
    num_blocks: int


class _Server:
    """Listens, and sends leased blocks to whoever has the key.

    One thread hears all who have not shown the key; each copy has a thread and one of few places. Strangers
    take none: there are at most `_MOST_STRANGERS` of them, and a newcomer puts out the one that came first.
    """

    def __init__(self, key: bytes, host: str, memory: BlockMemory, leases: Leases) -> None:
        self._key = key
        self._memory = memory
        self._leases = leases
        self._room = threading.Semaphore(_MOST_COPIES)
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self._socket.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        self._is_closed = False
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._listen, name="onbeat-kv", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        self._thread.join(PULL_SECONDS)
        for _ in range(_MOST_COPIES):  # nobody may read memory that is about to go
            self._room.acquire(timeout=PULL_SECONDS)

    # --- strangers ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._is_closed:
            first = next(iter(self._strangers.values()), None)
            wait = None if first is None else max(first.end - time.monotonic(), 0.0)
            for ready, _ in self._selector.select(wait):
                if ready.fileobj is self._socket:
                    self._accept()
                elif ready.data.connection in self._strangers:  # it may have been put out meanwhile
                    self._hear(ready.data)
            now = time.monotonic()
            while self._strangers and (oldest := next(iter(self._strangers.values()))).end <= now:
                self._put_out(oldest.connection)
        for connection in list(self._strangers):
            self._put_out(connection)
        self._selector.close()
        self._socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            if self._strangers:
                self._put_out(next(iter(self._strangers)))
            elif not self._is_closed:
                time.sleep(0.05)  # out of file descriptors: there may be some again
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._put_out(next(iter(self._strangers)))
        try:
            stranger = _Stranger(connection)
        except OSError:
            connection.close()
            return
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: _Stranger) -> None:
        try:
            asked = stranger.hear(self._key)
        except (OSError, ValueError, TypeError, KVUnavailable) as error:
            logger.debug("a connection for KV was closed: %s", error)
            self._put_out(stranger.connection)
            return
        if asked is not None:
            connection = stranger.connection
            del self._strangers[connection]
            self._selector.unregister(connection)
            threading.Thread(
                target=self._serve, args=(connection, asked), name="onbeat-kv", daemon=True
            ).start()

    def _put_out(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)
        connection.close()

    # --- those with the key ---------------------------------------------------------------------------

    def _serve(self, connection: socket.socket, asked: _Asked) -> None:
        wire = _Wire(connection, time.monotonic() + PULL_SECONDS)
        has_place = self._room.acquire(timeout=_HANDSHAKE_SECONDS)
        try:
            with connection:
                self._answer(wire, asked, has_place=has_place)
        except (OSError, ValueError, KVUnavailable) as error:
            logger.info("a copy of KV was not served: %s", error or type(error).__name__)
        finally:
            if has_place:
                self._room.release()

    def _answer(self, wire: _Wire, asked: _Asked, *, has_place: bool) -> None:
        error: str | None = None
        block_ids: tuple[int, ...] = ()
        try:
            block_ids = self._lent(asked)
        except KVUnavailable as unavailable:
            error = str(unavailable)
        if not has_place:
            error = f"{_MOST_COPIES} others copy from there; try again later"
        answer = json.dumps(error).encode()
        wire.send(_LENGTH.pack(len(answer)), answer, _digest(self._key, b"answer", asked.nonce, answer))
        if error is not None:
            return
        for block_id in block_ids:
            self._send_block(wire, block_id)
        try:
            self._leases.block_ids(asked.lease_id, asked.serial)
        except KVUnavailable:
            wire.send(b"\x00")
        else:
            wire.send(b"\x01")

    def _send_block(self, wire: _Wire, block_id: int) -> None:
        wire.send(*self._memory.views(block_id))

    def _lent(self, asked: _Asked) -> tuple[int, ...]:
        lent = self._leases.block_ids(asked.lease_id, asked.serial)
        block_ids = lent[asked.first_block : asked.first_block + asked.num_blocks]
        if len(block_ids) != asked.num_blocks:
            raise KVUnavailable(
                f"{asked.num_blocks} blocks from {asked.first_block} on were asked for of {len(lent)}"
            )
        return block_ids


class _Wire:
    """A socket, on which nothing takes longer than until a given time.

    Parameters
    ----------
    end : seconds of the monotonic clock; a `TimeoutError` afterwards.
    """

    def __init__(self, connection: socket.socket, end: float) -> None:
        self.end = end
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)

    def send(self, *parts: Any) -> None:
        """Send bytes-like parts one after the other."""
        for start in range(0, len(parts), _MOST_PARTS):
            self._send_some(parts[start : start + _MOST_PARTS])

    def _send_some(self, parts: Sequence[Any]) -> None:
        views = [memoryview(part) for part in parts]
        while views:
            self._set_timeout()
            num_sent = self._socket.sendmsg(views)
            while views and num_sent >= len(views[0]):
                num_sent -= len(views.pop(0))
            if num_sent:
                views[0] = views[0][num_sent:]

    def receive(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        self.receive_into(memoryview(buffer))
        return bytes(buffer)

    def receive_text(self) -> bytes:
        """Return text behind its length.

        Raises
        ------
        ValueError : it is longer than any that is ever sent.
        """
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if length > _MOST_REQUEST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        return self.receive(length)

    def receive_into(self, view: memoryview) -> None:
        while view:
            self._set_timeout()
            num_bytes = self._socket.recv_into(view)
            if not num_bytes:
                raise ConnectionError("the other side has closed the connection")
            view = view[num_bytes:]

    def _set_timeout(self) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        self._socket.settimeout(left)


_MOST_PARTS = 512
"""That one call sends; the system allows 1,024."""


def _check_blocks(source: KVSource, first_block: int, memory: BlockMemory, into: Sequence[int]) -> None:
    """Raise KVUnavailable where the layouts differ, or the source or this engine has no such blocks."""
    memory.layout.check_same(source.endpoint.layout)
    memory.check_ids(into)
    end = first_block + len(into)
    if not 0 <= first_block <= end <= len(source.ids):
        raise KVUnavailable(
            f"blocks {first_block} to {end} of {source.lease_id!r} were asked for, but "
            f"{len(source.ids)} of them are lent"
        )


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")
