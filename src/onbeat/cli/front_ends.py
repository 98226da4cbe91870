"""What `onbeat serve` does at its front: HTTP in this process, or in several that it looks after."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onbeat.cluster.client import FleetClient, Nursed
from onbeat.cluster.front_ends import FrontEnds
from onbeat.cluster.gate_client import GateClient, GateRelay
from onbeat.cluster.gate_host import GateHost, gates_endpoint
from onbeat.cluster.lease import Tenure
from onbeat.cluster.roster import Roster
from onbeat.core.protocols import EngineInfo
from onbeat.metrics.merge import snapshot
from onbeat.server.server_config import ServerConfig

if TYPE_CHECKING:
    from onbeat.core.tokenizer import Tokenizer
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
            **how,
        )

    async def serve(
        self,
        client: FleetClient | GateClient,
        telemetry: Telemetry,
        sock: socket.socket,
        *,
        on_started: Callable[[str], None],
        text: tuple[Tokenizer, ChatTemplate | None] | None = None,
        has_others: bool = False,
    ) -> None:
        """Answer HTTP until told to end; `text` is from `load_text`, `has_others` as in `serve`."""
        from onbeat.server.app import create_app
        from onbeat.server.run import serve
        from onbeat.server.telemetry import TraceHeaders

        app = create_app(client, *(text or self.load_text()), self.config, telemetry, fleet=client)
        if self.traces_endpoint:
            app.add_middleware(TraceHeaders)
        await serve(app, self.config, sock, on_started=on_started, has_others=has_others)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where several front ends are, and what they have of who looks after them."""

    front: Front
    sock: socket.socket
    """Where they listen, bound."""
    nursed: Nursed
    on_started: Callable[[str], None]
    """Called with the server's URL once all take requests."""
    tenure: Tenure | None = None
    """Whether the keeper of several machines is here; None where there is one machine."""
    endpoint: str = ""
    """At which gates of other machines reach it."""

    @property
    def folder(self) -> Path:
        """For sockets; nobody but this user can enter it."""
        assert self.nursed.folder is not None, "there are several front ends"
        return self.nursed.folder.path

    @property
    def roster(self) -> Roster:
        """Who is left of processes before this one."""
        assert self.nursed.roster is not None, "there are several front ends"
        return self.nursed.roster

    @property
    def secret(self) -> str:
        """What all machines know."""
        return self.front.config.fleet_key or ""

    def front_ends(self) -> FrontEnds:
        """Listen, and return those who are to answer."""
        from onbeat.server.listening import listen

        config, spawn = self.front.config, multiprocessing.get_context("spawn")
        listen(self.sock, f"{config.host}:{config.port}")

        def make(name: str) -> multiprocessing.context.SpawnProcess:
            # spawn: a forked child would inherit the event loop and its sockets
            args = self.front.share(), gates_endpoint(self.folder), self.sock, name
            return spawn.Process(target=run_front_end, args=args, name=f"onbeat-{name}", daemon=True)

        return FrontEnds(config.front_ends, make, self.roster)

    async def run(self, front_ends: FrontEnds, on_end: Callable[[], None]) -> None:
        """Look after front ends until told to end; `on_end` is called then.

        Raises
        ------
        EngineDead : front ends end again and again before they serve.
        """
        from onbeat.server.listening import END_SIGNALS, on_hangup, on_signals, url_of

        def end() -> None:
            on_end()
            front_ends.terminate()

        async def say_started() -> None:
            if self.nursed.num_before:
                logger.warning("this keeper follows another, and goes on with what that one has left")
                await asyncio.sleep(SETTLED_SECONDS)
            else:
                await front_ends.serving.wait()
                self.on_started(url_of(self.front.config, self.sock))
            self.nursed.mark.touch()

        started = asyncio.create_task(say_started())
        try:
            with on_signals(END_SIGNALS, end), on_hangup(end, front_ends.roll):
                await front_ends.run()
        finally:
            started.cancel()
            await front_ends.stop()


async def keep(machine: Machine, client: FleetClient) -> None:
    """Look after front ends, and decide for them, until told to end; see `Machine.run`.

    Parameters
    ----------
    client : of the fleet, started.
    """
    from onbeat.server.shared import Desk

    front_ends, tenure = machine.front_ends(), machine.tenure
    telemetry = machine.front.telemetry(client.info, fleet_counts=client.counts)
    client.add_observer(telemetry.tracker)
    telemetry.exporter.watch(client, client)

    async def show(what: str) -> bytes:
        telemetry.counts.num_open = len(client.streams.open)
        return await telemetry.shown(what)

    host = GateHost(
        client,
        machine.folder,
        front_ends,
        telemetry.exporter.others,
        on_ended=telemetry.counts.slo.remember,
        make_desk=lambda: Desk(telemetry.books, show),
    )
    try:
        if tenure is not None:
            tenure.tell(host.open_far(machine.endpoint, machine.secret))
        async with telemetry.watched_loop(of_keeper=True):
            await machine.run(front_ends, client.expect_end)
    finally:
        await host.close()
        if tenure is not None:
            await tenure.close()


async def follow(machine: Machine) -> None:
    """Look after front ends for which a keeper on another machine decides; see `Machine.run`."""
    assert machine.tenure is not None, "another machine has it"
    front_ends = machine.front_ends()
    machine.roster.kill("r")  # replicas of a keeper that was here
    relay = GateRelay(machine.folder, front_ends, machine.secret)
    machine.tenure.on_found = relay.follow
    try:
        await machine.run(front_ends, lambda: None)
    finally:
        relay.close()


def run_front_end(front: Front, endpoint: str, sock: socket.socket, name: str) -> None:
    """Be a front end, until told to end or left alone."""
    import uvloop

    logging.basicConfig(
        level=front.log_level.upper(), format=f"%(asctime)s %(levelname)s %(name)s {name}: %(message)s"
    )
    uvloop.run(_front_end(front, endpoint, sock, name))


async def _front_end(front: Front, endpoint: str, sock: socket.socket, name: str) -> None:
    from onbeat.server.shared import remote_desk

    # who starts keepers is gone: none will come, and all ends
    asyncio.get_running_loop().add_reader(os.pidfd_open(front.guardian), os._exit, 1)
    client = GateClient(endpoint, name)
    await client.connect()
    info = client.info
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
                on_started=lambda _: client.say_serving(),
                has_others=True,
            )
        finally:
            telling.cancel()
            tell()
            client.close()
