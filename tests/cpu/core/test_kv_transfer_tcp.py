"""KV blocks over TCP: what a lender answers to peers that ask wrongly, slowly or not at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from onbeat.core.errors import KVUnavailable
from onbeat.engine import kv_transfer
from onbeat.engine.kv_access import BlockMemory, KVSource
from tests.cpu.core.kv_engines import (
    LendingProcess,
    make_transfers,
)
from tests.cpu.core.lending import BLOCK_BYTES, WAIT, lending_source, short_pulls


class TestOverTcp:
    def test_another_key(self) -> None:
        _, lending = make_transfers(is_filled=True)
        lending.leases.grant("r", range(8))
        source = lending.summed(lending.leases.source("r", lending.endpoint)).result(WAIT)
        blocks, own = make_transfers(key=b"k" * 32)
        with pytest.raises(KVUnavailable, match="closed"):
            own.pull(source, 0, [1]).result(WAIT)
        assert not any(part.any() for part in blocks.parts)
        lending.close()
        own.close()

    def test_a_source_without_the_key(self) -> None:
        """Who answers in its place cannot make anybody take its bytes."""
        with _answering(
            lambda connection: connection.sendall(b"c" * 16 + b"\x04\0\0\0null" + b"d" * 32)
        ) as port:
            _check_refused(port, "does not have the key")

    @pytest.mark.parametrize("answer", [b"", b"c" * 10, b"c" * 16 + b"\xff\xff\xff\xff"])
    def test_a_source_that_says_nonsense(self, answer: bytes) -> None:
        with _answering(lambda connection: connection.sendall(answer)) as port:
            _check_refused(port, "cannot be had")

    def test_a_lease_that_ends_while_bytes_are_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, lending = make_transfers(is_filled=True)
        lending.leases.grant("r", range(8))
        source = lending.summed(lending.leases.source("r", lending.endpoint)).result(WAIT)
        _, own = make_transfers()
        views = BlockMemory.views

        def end_lease(memory: BlockMemory, block_id: int) -> Iterator[memoryview]:
            if memory is lending.memory:
                lending.leases.revoke("r")
            return views(memory, block_id)

        monkeypatch.setattr(BlockMemory, "views", end_lease)
        with pytest.raises(KVUnavailable, match="ended on"):
            own.pull(source, 0, range(8)).result(WAIT)
        lending.close()
        own.close()

    def test_a_source_that_hangs(self, lender: LendingProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        source = lender.lend()
        short_pulls(monkeypatch, 0.5)
        _, own = make_transfers()
        start = time.monotonic()
        with lender.standing_still(), pytest.raises(KVUnavailable, match=r"too long|timed out"):
            own.pull(source, 0, [1]).result(WAIT)
        assert time.monotonic() - start < 10
        own.close()

    @pytest.mark.parametrize("first_words", [b"", b"n" * 16 + b"\x80\0\0\0" + b"[" * 100])
    def test_strangers_keep_nobody_out(self, first_words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many they are and however long they stay; nor the engine from ending."""
        monkeypatch.setattr(kv_transfer, "_HANDSHAKE_SECONDS", 600.0)
        strangers: list[socket.socket] = []
        with ExitStack() as stack:
            with lending_source() as source:
                address = (source.endpoint.host, source.endpoint.port)
                for _ in range(kv_transfer._MOST_STRANGERS + 50):
                    strangers.append(stack.enter_context(socket.create_connection(address)))
                    with suppress(ConnectionError):
                        strangers[-1].sendall(first_words)
                _, own = make_transfers()
                stack.callback(own.close)
                for _ in range(3):
                    assert own.pull(source, 0, [1, 2]).result(WAIT) == 2 * BLOCK_BYTES
                are_closed = list(map(_is_closed, strangers))
                num_out = 51  # for those that came after, and for the first copy
                assert are_closed == [number < num_out for number in range(len(strangers))]
            assert all(map(_is_closed, strangers))

    def test_strangers_are_put_out_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_transfer, "_HANDSHAKE_SECONDS", 0.3)
        with lending_source() as source:
            silent = socket.create_connection((source.endpoint.host, source.endpoint.port), timeout=WAIT)
            assert len(silent.recv(100)) == 16
            assert silent.recv(100) == b""
            silent.close()

    @pytest.mark.parametrize(
        "words",
        [
            b"n" * 16 + b"\xff\xff\xff\xff",
            b"n" * 16 + b"\x02\0\0\0[]" + b"d" * 32,
            b"n" * 16 + b"\x02\0\0\0[]" + b"d" * 33,
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        ],
    )
    def test_words_without_the_key_close_the_connection(
        self, words: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(kv_transfer, "_HANDSHAKE_SECONDS", 600.0)
        with lending_source() as source, caplog.at_level("INFO"):
            stranger = socket.create_connection((source.endpoint.host, source.endpoint.port), timeout=WAIT)
            for byte in words:
                with suppress(ConnectionError):
                    stranger.sendall(bytes([byte]))
            with suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass
            stranger.close()
        assert caplog.records == []

    def test_more_copies_than_there_are_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_transfer, "_HANDSHAKE_SECONDS", 0.3)
        monkeypatch.setattr(kv_transfer, "_MOST_COPIES", 1)
        send, is_sending, goes_on = kv_transfer._Server._send_block, threading.Event(), threading.Event()

        def send_later(server: kv_transfer._Server, wire: kv_transfer._Wire, block_id: int) -> None:
            is_sending.set()
            goes_on.wait(WAIT)
            send(server, wire, block_id)

        monkeypatch.setattr(kv_transfer._Server, "_send_block", send_later)
        with lending_source() as source:
            _, first = make_transfers()
            _, second = make_transfers()
            copy = first.pull(source, 0, [1])
            assert is_sending.wait(WAIT)
            with pytest.raises(KVUnavailable, match="1 others copy"):
                second.pull(source, 0, [1]).result(WAIT)
            goes_on.set()
            assert copy.result(WAIT) == BLOCK_BYTES
            assert second.pull(source, 0, [1]).result(WAIT) == BLOCK_BYTES
            first.close()
            second.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(100):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


@contextmanager
def _answering(say: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server that says one thing to whoever connects; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            say(connection)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(2)
            with suppress(OSError):
                while connection.recv(1 << 16):
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield int(server.getsockname()[1])
    thread.join(WAIT)
    server.close()


def _check_refused(port: int, reason: str) -> None:
    _, own = make_transfers()
    endpoint = replace(own.endpoint, port=port)
    source = KVSource(endpoint=endpoint, lease_id="r", serial=1, block_ids=(1, 2), checksums=(0, 0))
    with pytest.raises(KVUnavailable, match=reason):
        own.pull(source, 0, [1]).result(WAIT)
    own.close()
