"""A server process: ports, TLS, and the way it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from onbeat.core.errors import ConfigError
from onbeat.server.connection import BoundedConnection
from onbeat.server.listening import OWN_FILES, REPLICA_FILES, bind, check_tls, listen
from onbeat.server.run import serve
from onbeat.server.server_config import ServerConfig
from tests.cpu.server.fake_app import make_app
from tests.cpu.server.running import HELLO, parse_events
from tests.fakes_engine import FakeEngine
from tests.waiting import at_most, until

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
SLOW = {"end": False, "seconds_per_step": 0.02}
MESSAGES = {"model": "fake/model", "messages": HELLO, "max_tokens": 2000}
STREAMS: dict[str, tuple[dict[str, Any], bytes]] = {
    CHAT: ({"messages": HELLO, "max_tokens": 2000}, b'"code":"aborted"}}\n\ndata: [DONE]\n\n'),
    "/v1/completions": ({"prompt": "x", "n": 2}, b'"code":"aborted"}}\n\ndata: [DONE]\n\n'),
    "/v1/responses": ({"input": "x", "max_output_tokens": 2000}, b'"status":"failed"'),
    "/v1/messages": (MESSAGES, b'"type":"overloaded_error","param":null,"code":"aborted"}}\n\n'),
}
"""Path -> body, and what stands at the end of a stream that the server gives up."""


@dataclass
class ServerProcess:
    process: asyncio.subprocess.Process
    url: str
    session: aiohttp.ClientSession

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        async with at_most(60):
            return await self.process.wait()

    async def errors(self) -> str:
        """Return what a server that has ended has written to its standard error."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def starts_stream(self, max_tokens: int) -> asyncio.Task[list[Any]]:
        """Return the events of a request whose answer has begun: a load shows it before it is admitted."""
        body = {"messages": HELLO, "stream": True, "max_tokens": max_tokens}
        response = await self.session.post(self.url + CHAT, json=body)
        assert response.status == 200

        async def read() -> list[Any]:
            async with response:
                return parse_events(await response.read())

        return asyncio.create_task(read())

    async def status(self, path: str) -> int:
        async with self.session.get(self.url + path) as response:
            return response.status

    async def starts_to_drain(self) -> None:
        self.send_signal(signal.SIGTERM)
        async with at_most(30):
            while await self.status("/ready") != 503:
                await asyncio.sleep(0.01)

    async def wait_for_load(self) -> None:
        async with at_most(30):
            while True:
                async with self.session.get(self.url + "/load") as response:
                    if (await response.json())["server_load"]:
                        return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def server_process(script: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[ServerProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.cpu.server.serve_fake"),
        *(json.dumps({"port": 0, **fields}), json.dumps(script or {})),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), 120)).decode().strip()
        async with aiohttp.ClientSession() as session:
            yield ServerProcess(process, url, session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with server_process(SLOW) as server:
        running = await server.starts_stream(50)
        await server.starts_to_drain()
        assert await server.status("/health") == 200
        async with server.session.post(server.url + CHAT, json={"messages": HELLO}) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "draining"
            assert int(response.headers["retry-after"]) >= 1
        events = await running
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert await server.exit_code() == 0


async def test_a_hangup_without_a_terminal_that_is_gone_breaks_no_stream_and_an_idle_server_ends() -> None:
    async with server_process(SLOW) as server:
        running = await server.starts_stream(50)
        server.send_signal(signal.SIGHUP)
        assert (await running)[-2]["choices"][0]["finish_reason"] == "length"
        assert await server.status("/ready") == 200
        server.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0


async def test_a_second_signal_ends_running_requests_with_an_error() -> None:
    async with server_process(SLOW) as server:
        running = await server.starts_stream(2000)
        await server.starts_to_drain()
        server.send_signal(signal.SIGINT)
        async with at_most(8):
            events = await running
            assert events[-2]["error"]["code"] == "aborted"
            assert await server.exit_code() == 0


async def test_draining_gives_up_after_its_timeout_also_where_the_engine_answers_nothing() -> None:
    async with server_process({"end": False, "stall_after": 3}, shutdown_timeout=0.3) as server:

        async def read(path: str, body: dict[str, Any]) -> bytes:
            async with server.session.post(server.url + path, json={**body, "stream": True}) as response:
                assert response.status == 200
                begun.append(path)
                return await response.read()

        begun: list[str] = []
        whole = asyncio.create_task(server.session.post(server.url + CHAT, json=STREAMS[CHAT][0]))
        await server.wait_for_load()
        reading = [asyncio.create_task(read(path, body)) for path, (body, _) in STREAMS.items()]
        await until(lambda: len(begun) == len(STREAMS))
        server.send_signal(signal.SIGTERM)
        for task, (_, end) in zip(reading, STREAMS.values(), strict=True):
            assert end in (await task)[-1500:]
        answer = await whole
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "aborted")
        assert await server.exit_code() == 0
        assert "Traceback" not in await server.errors()


async def test_a_client_that_does_not_read_cannot_hold_the_end_up() -> None:
    script = {"end": False, "text": "x" * 1000, "tokens_per_step": 1000}
    async with server_process(script, shutdown_timeout=0.2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"prompt": "x", "stream": True, "n": 16, "max_tokens": 1_000_000}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        await server.wait_for_load()
        await asyncio.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        writer.transport.abort()
        assert "Traceback" not in await server.errors()


async def test_the_memory_of_bodies_that_do_not_end_is_bounded_and_goes_back() -> None:
    async with server_process() as server:
        assert await server.status("/health") == 200
        before = resident_megabytes(server.process.pid)
        num_bytes = 10_300_000
        writers = await asyncio.gather(*(send_unfinished_body(server, num_bytes) for _ in range(40)))
        assert await server.status("/health") == 200
        assert resident_megabytes(server.process.pid) - before < 200
        for writer in writers:
            writer.transport.abort()
        await until(lambda: resident_megabytes(server.process.pid) - before < 40, 20)
        assert await server.status("/health") == 200


async def send_unfinished_body(server: ServerProcess, num_bytes: int) -> asyncio.StreamWriter:
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode())
    writer.write(b"content-length: %d\r\n\r\n" % (num_bytes + 1))
    with suppress(ConnectionError):  # it may be given up for others
        for start in range(0, num_bytes, 2**16):
            writer.write(b" " * min(2**16, num_bytes - start))
            await writer.drain()
    return writer


def resident_megabytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def test_a_busy_port_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*in use.*--port"):
            bind(ServerConfig(port=port))


def test_a_port_that_another_server_is_about_to_have_is_busy_too() -> None:
    with bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*in use.*--port"):
            bind(ServerConfig(port=port))


async def test_a_port_that_was_taken_meanwhile_is_told_as_such() -> None:
    with bind(ServerConfig(port=0)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as after a server whose connections fade
        config = ServerConfig(port=sock.getsockname()[1])
        with bind(config) as other:
            other.listen()
            with pytest.raises(ConfigError, match=f":{config.port}: .*in use.*--port"):
                await serve(make_app(FakeEngine(), config), config, sock, on_started=lambda _: None)


def test_a_socket_of_another_process_goes_on_not_to_wait() -> None:
    with bind(ServerConfig(port=0)) as sock:
        listen(sock, "here")
        assert sock.gettimeout() == 0
        # as multiprocessing makes a socket that it has sent; all three share what is known of waiting
        with socket.socket(sock.family, sock.type, sock.proto, fileno=os.dup(sock.fileno())) as sent:
            listen(sent, "here")
            sent.dup().close()
            assert not os.get_blocking(sock.fileno())


async def test_the_port_of_a_server_that_has_ended_is_free_at_once() -> None:
    port = 0
    for _ in range(2):
        async with server_process(port=port) as server:
            port = int(server.url.rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            server.send_signal(signal.SIGTERM)  # the server closes first: its end of the connection fades
            assert await server.exit_code() == 0
            writer.close()


def test_many_new_connections_do_not_wait_for_a_round_of_the_loop_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round of a busy server takes long, and libuv accepts one connection of a listener in each."""
    made: list[asyncio.Transport] = []
    connection_made = BoundedConnection.connection_made

    def counted(connection: BoundedConnection, transport: asyncio.Transport) -> None:
        made.append(transport)
        connection_made(connection, transport)

    monkeypatch.setattr(BoundedConnection, "connection_made", counted)

    async def num_rounds(num_connections: int) -> int:
        config, started = ServerConfig(port=0), asyncio.Event()
        with bind(config) as sock:
            app = make_app(FakeEngine(), config)
            serving = asyncio.create_task(serve(app, config, sock, on_started=lambda _: started.set()))
            await started.wait()
            clients = [socket.create_connection(sock.getsockname()) for _ in range(num_connections)]
            rounds = 0
            while len(made) < num_connections:
                await asyncio.sleep(0)
                rounds += 1
            for client in clients:
                client.close()
            signal.raise_signal(signal.SIGTERM)
            await serving
        return rounds

    assert uvloop.run(num_rounds(64)) <= 16


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 70])
def test_an_address_that_is_not_ours_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"listen on {host}"):
        bind(ServerConfig(host=host))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    command = ("openssl", "req", "-x509", *keys, "-keyout", key, "-out", cert, "-days", "2", *subject)
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


@pytest.mark.parametrize("is_tls", [True, False])
async def test_more_clients_than_there_are_files_all_hear_something(
    certificate: tuple[Path, Path], is_tls: bool
) -> None:
    files: dict[str, Any] = {}
    if is_tls:
        files = {"ssl_keyfile": str(certificate[0]), "ssl_certfile": str(certificate[1])}
    context = ssl.create_default_context(cafile=certificate[1]) if is_tls else None
    async with server_process(num_files=OWN_FILES + REPLICA_FILES + 16, **files) as server:
        address = server.url.rpartition("/")[2].split(":")
        answered = asyncio.Event()
        statuses: list[bytes] = []

        async def ask() -> None:
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            statuses.append((await reader.readline()).split()[1])
            if statuses[-1] == b"200":
                await answered.wait()
            writer.close()

        clients = [asyncio.create_task(ask()) for _ in range(150)]
        await until(lambda: len(statuses) == len(clients))
        answered.set()
        await asyncio.gather(*clients)
        assert (statuses.count(b"200"), statuses.count(b"503")) == (16, 134)


async def test_clients_that_never_begin_tls_are_not_waited_for_at_the_end(
    certificate: tuple[Path, Path],
) -> None:
    key, cert = certificate
    async with server_process(ssl_keyfile=str(key), ssl_certfile=str(cert)) as server:
        address = server.url.rpartition("/")[2].split(":")
        silent = [await asyncio.open_connection(*address) for _ in range(3)]
        silent[0][1].write(b"GET / HTTP/1.1\r\n\r\n")
        assert await silent[0][0].read() == b""
        server.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        for _, writer in silent:
            writer.close()


def test_tls_files_are_checked_at_the_start(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    key, cert = certificate
    for keyfile, certfile in ((tmp_path / "none.pem", cert), (cert, cert), (key, key)):
        with pytest.raises(ConfigError, match=f"TLS certificate.*{re.escape(str(certfile))}"):
            check_tls(ServerConfig(ssl_keyfile=keyfile, ssl_certfile=certfile))
