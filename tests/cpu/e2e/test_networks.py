"""Two machines, each with a network of its own, and a cable that is pulled out."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cpu.e2e.program import ServerProgram, is_running
from tests.cpu.e2e.test_death import Stream, text_of
from tests.cpu.e2e.test_machines import ASKED, Machines, has_said
from tests.kubernetes_api import lease_server
from tests.ray.namespace import own_network
from tests.waiting import wait_for

pytest.importorskip("kubernetes", reason="pip install 'onbeat[kubernetes]'")

HUB = "10.77.0.254"
"""Where the API server is. Clients reach each machine by another network, which stays."""


def ip(*arguments: str, within: Sequence[str] = ()) -> None:
    done = subprocess.run([*within, "ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr}")


@dataclass
class Cable:
    """What connects a machine with the others."""

    number: int
    within: list[str] = field(default_factory=list)
    """A command that runs another one there."""

    @property
    def address(self) -> str:
        """For the other machines."""
        return f"10.77.0.{self.number}"

    @property
    def outside(self) -> str:
        """For clients."""
        return f"10.78.{self.number}.1"

    def pull(self) -> None:
        ip("link", "set", f"m{self.number}", "down")

    def plug(self) -> None:
        ip("link", "set", f"m{self.number}", "up")


@contextmanager
def two_networks() -> Iterator[list[Cable]]:
    """Connect two empty networks with this thread's.

    Raises
    ------
    OSError : the system does not permit it.
    """
    ip("link", "add", "hub", "type", "bridge")
    ip("address", "add", f"{HUB}/24", "dev", "hub")
    ip("link", "set", "hub", "up")
    with ExitStack() as stack:
        cables = []
        for number in (1, 2):
            holder = stack.enter_context(subprocess.Popen(["unshare", "--net", "sleep", "600"]))
            stack.callback(holder.kill)
            network = f"/proc/{holder.pid}/ns/net"
            while os.readlink(network) == os.readlink("/proc/thread-self/ns/net"):
                time.sleep(0.01)
            cable = Cable(number, ["nsenter", f"--net={network}"])
            ip("link", "set", "lo", "up", within=cable.within)
            for name, address in ((f"m{number}", cable.address), (f"c{number}", cable.outside)):
                peer = ("type", "veth", "peer", "name", "at", "netns", str(holder.pid))
                ip("link", "add", name, *peer)
                ip("link", "set", "at", "name", f"{name}-at", within=cable.within)
                ip("address", "add", f"{address}/24", "dev", f"{name}-at", within=cable.within)
                ip("link", "set", f"{name}-at", "up", within=cable.within)
            ip("link", "set", f"m{number}", "master", "hub")
            ip("address", "add", f"10.78.{number}.254/24", "dev", f"c{number}")
            ip("link", "set", f"c{number}", "up")
            cable.plug()
            cables.append(cable)
        yield cables


@dataclass
class Networked:
    """Two machines, of which the first has the keeper."""

    machines: Machines
    cables: list[Cable]
    servers: list[ServerProgram]


@pytest.fixture
def networked(tmp_path: Path) -> Iterator[Networked]:
    with ExitStack() as stack:
        try:
            stack.enter_context(own_network())
            cables = stack.enter_context(two_networks())
        except OSError as error:
            pytest.skip(f"two machines are networks of their own: {error}")
        machines = Machines(*stack.enter_context(lease_server(tmp_path, HUB)), stack)
        servers = [
            machines.start(cable.address, "--host", cable.outside, prefix=cable.within) for cable in cables
        ]
        yield Networked(machines, cables, servers)


class Watch:
    """Looks again and again at who has the Lease, and whether the keeper that was cut off lives."""

    def __init__(self, machines: Machines, keeper: int) -> None:
        self.first, self.taken, self.ended = machines.holder, 0.0, 0.0
        self._machines, self._keeper = machines, keeper
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_closing.wait(0.01):
            # the keeper last: what is found ended has ended before somebody takes the Lease
            if not self.taken and self._machines.holder != self.first:
                self.taken = time.monotonic()
            if not self.ended and not is_running(self._keeper):
                self.ended = time.monotonic()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()


@pytest.mark.slow  # a lease lasts for 15 s
def test_streams_of_both_machines_outlive_a_pulled_cable(networked: Networked) -> None:
    machines, cut, (first, second) = networked.machines, networked.cables[0], networked.servers
    assert has_said(second, "the keeper is on another machine")
    streams = [*machines.streams(first), *machines.streams(second)]
    (keeper,) = first.keepers
    watch = Watch(machines, keeper)
    cut.pull()
    pulled = time.monotonic()
    wait_for(lambda: watch.taken, 60)
    assert 0 < watch.ended < watch.taken, "two keepers at a time"
    assert watch.taken - pulled > 12
    watch.close()
    wait_for(lambda: has_said(second, "another goes on"))
    machines.check(streams[4:])
    assert text_of(Stream(second.url, **ASKED).end(60)) == machines.whole  # new ones are served, too

    assert has_said(first, "nothing starts")
    assert all(stream.error is None for stream in streams[:4])
    cut.plug()
    machines.check(streams[:4])  # by the other machine's keeper
    assert text_of(Stream(first.url, **ASKED).end(60)) == machines.whole
    assert len({server.fleet()["replicas"][0]["process_id"] for server in (first, second)}) == 1
    for server in (first, second):
        server.send_signal(signal.SIGTERM)
        assert server.exit_code(30) == 0
