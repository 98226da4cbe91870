"""What `onbeat serve` does at its front: HTTP in this process, or in several that it looks after."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onbeat.cluster.client import FleetClient, Nursed
from onbeat.cluster.front_ends import FrontEnds
from onbeat.cluster.gate_client import GateClient
from onbeat.cluster.gate_host import GateHost
from onbeat.core.protocols import EngineInfo
from onbeat.metrics.merge import snapshot
from onbeat.server.server_config import ServerConfig

if TYPE_CHECKING:
    from onbeat.core.protocols import Tokenizer
    from onbeat.metrics.tracker import RunListener
    from onbeat.server.telemetry import Telemetry
    from onbeat.text.chat_template import ChatTemplate

logger = logging.getLogger("onbeat.cluster")

SETTLED_SECONDS = 1.0
"""A keeper that has lasted so long is killed by no request that it was asked for again."""
TELL_SECONDS = 1.0
"""How often a front end says what it has counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """How a front end is made; can be pickled."""

    config: ServerConfig
    model_name: str
    """The model's public name."""
    tokenizer: Path
    chat_template: str | None
    traces_endpoint: str | None
    log_level: str
    guardian: int
    """The process that it ends with, where it is one of several."""

    def load_text(self) -> tuple[Tokenizer, ChatTemplate | None]:
        """Load the tokenizer and the chat template.

        Raises
        ------
        ConfigError : they cannot be read.
        """
        from onbeat.text.chat_template import load_chat_template
        from onbeat.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.tokenizer)
        return tokenizer, load_chat_template(tokenizer, self.chat_template)

    def telemetry(self, info: EngineInfo, listeners: Sequence[RunListener] = (), **how: Any) -> Telemetry:
        """Return what counts; `how` is as in `Telemetry`."""
        from onbeat.server.telemetry import Telemetry

        return Telemetry(
            self.config,
            self.model_name,
            listeners,
            policy=info.policy,
            proposer=info.speculation,
            slo_mode=self.config.slo.mode,
            **how,
        )

    async def serve(
        self,
        client: FleetClient | GateClient,
        telemetry: Telemetry,
        sock: socket.socket,
        *,
        text: tuple[Tokenizer, ChatTemplate | None],
        on_started: Callable[[str], None],
        **signals: Sequence[signal.Signals],
    ) -> None:
        """Answer HTTP until told to end; `signals` are as in `serve`."""
        from onbeat.server.app import create_app
        from onbeat.server.run import serve
        from onbeat.server.telemetry import TraceHeaders

        app = create_app(client, *text, self.config, telemetry, fleet=client)
        if self.traces_endpoint:
            app.add_middleware(TraceHeaders)
        await serve(app, self.config, sock, on_started=on_started, **signals)

    def listeners(self, stack: ExitStack) -> list[RunListener]:
        """Open what wants to hear of a front end's requests."""
        if not self.traces_endpoint:
            return []
        from onbeat.server.telemetry import exported_traces

        return [
            stack.enter_context(exported_traces(self.traces_endpoint, self.model_name, self.config.slo.mode))
        ]

    def share(self) -> Front:
        """Return the same for one of several front ends: it may hold its share of what one alone may."""
        config, number = self.config, self.config.front_ends
        connections = replace(
            config.connections,
            max_connections=max(config.connections.max_connections // number, 1),
            max_unfinished_bytes=config.connections.max_unfinished_bytes // number,
        )
        unread = config.max_unread_bytes // number
        return replace(self, config=replace(config, connections=connections, max_unread_bytes=unread))


async def keep(
    front: Front,
    client: FleetClient,
    sock: socket.socket,
    nursed: Nursed,
    *,
    on_started: Callable[[str], None],
) -> None:
    """Look after front ends, and decide for them, until told to end.

    Parameters
    ----------
    client : of the fleet, started.
    sock : where they listen, bound.
    nursed : who looks after this process, and what one before it has left.
    on_started : called with the server's URL once all take requests.

    Raises
    ------
    EngineDead : front ends end again and again before they serve.
    """
    from onbeat.server.run import END_SIGNALS, listen, on_signals, served_url
    from onbeat.server.shared import Desk

    config = front.config
    assert nursed.roster is not None, "there are several front ends"
    listen(sock, f"{config.host}:{config.port}")
    telemetry = front.telemetry(client.info, fleet_counts=client.counts)
    client.add_observer(telemetry.tracker)
    telemetry.exporter.watch(client, client)

    async def show(what: str) -> bytes:
        telemetry.counts.num_open = len(client.streams.open)
        return await telemetry.shown(what)

    front_ends = FrontEnds(
        config.front_ends,
        lambda name: _process(front.share(), host.endpoint, client.info, sock, name),
        nursed.roster,
    )
    host = GateHost(
        client,
        client.folder,
        front_ends,
        telemetry.exporter.others,
        on_ended=telemetry.counts.slo.remember,
        make_desk=lambda: Desk(telemetry.books, show),
    )

    def end() -> None:
        client.expect_end()
        front_ends.terminate()

    async def say_started() -> None:
        if nursed.num_before:
            logger.error("the keeper was killed; another goes on with what it has left")
            await asyncio.sleep(SETTLED_SECONDS)
        else:
            await front_ends.serving.wait()
            on_started(served_url(config, sock))
        nursed.mark.touch()

    started = asyncio.create_task(say_started())
    try:
        async with telemetry.watched_loop(of_keeper=True):
            with on_signals(END_SIGNALS, end), on_signals([signal.SIGHUP], front_ends.roll):
                await front_ends.run()
    finally:
        started.cancel()
        await front_ends.stop()
        await host.close()


def _process(
    front: Front, endpoint: str, info: EngineInfo, sock: socket.socket, name: str
) -> multiprocessing.context.SpawnProcess:
    # spawn: a forked child would inherit the event loop and its sockets
    return multiprocessing.get_context("spawn").Process(
        target=run_front_end, args=(front, endpoint, info, sock, name), name=f"onbeat-{name}", daemon=True
    )


def run_front_end(front: Front, endpoint: str, info: EngineInfo, sock: socket.socket, name: str) -> None:
    """Be a front end, until told to end or left alone."""
    import uvloop

    logging.basicConfig(
        level=front.log_level.upper(), format=f"%(asctime)s %(levelname)s %(name)s {name}: %(message)s"
    )
    uvloop.run(_front_end(front, endpoint, info, sock, name))


async def _front_end(front: Front, endpoint: str, info: EngineInfo, sock: socket.socket, name: str) -> None:
    from onbeat.server.shared import remote_desk

    # who starts keepers is gone: none will come, and all ends
    asyncio.get_running_loop().add_reader(os.pidfd_open(front.guardian), os._exit, 1)
    client = GateClient(endpoint, name, info)
    await client.connect()
    told: dict[str, int] = {}

    def tell() -> None:
        counts, ended = snapshot(telemetry.exporter.samples()), telemetry.counts.slo.take_new(told)
        client.say_counts(counts, ended, telemetry.tracker.num_open)

    async def tell_often() -> None:
        while True:
            tell()
            await asyncio.sleep(TELL_SECONDS)

    with ExitStack() as stack:
        shared = remote_desk(client.wish, tell, client.told)
        telemetry = front.telemetry(info, front.listeners(stack), shared=shared)
        client.add_observer(telemetry.tracker)
        telling = asyncio.create_task(tell_often(), name="onbeat-counts")
        try:
            await front.serve(
                client,
                telemetry,
                sock,
                text=front.load_text(),
                on_started=lambda _: client.say_serving(),
                ends_on=[signal.SIGTERM],
                leaves_on=[signal.SIGHUP],
            )
        finally:
            telling.cancel()
            tell()
            client.close()
