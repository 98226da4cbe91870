"""Several machines with one keeper: who decides, by a Lease, and what goes on where one is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cpu.e2e.program import ServerProgram, starting
from tests.cpu.e2e.test_death import STAND_IN_FLAGS, Stream, text_of
from tests.kubernetes_api import LeaseServer, lease_server
from tests.waiting import wait_for

pytest.importorskip("kubernetes", reason="pip install 'onbeat[kubernetes]'")

FLAGS = ("smollm2-135m-instruct", *STAND_IN_FLAGS, "--keeper-lease", "kubernetes:chat/keeper")
ASKED = {"max_tokens": 3500, "temperature": 0}


@dataclass
class Machines:
    """Servers that share a Lease, each as on a machine of its own."""

    api: LeaseServer
    config: Path
    stack: ExitStack
    whole: str = ""
    """The text that nothing has disturbed."""

    def start(self, address: str = "127.0.0.1", *flags: str, prefix: Sequence[str] = ()) -> ServerProgram:
        """Start another one, by a command that goes before it, and wait until it serves.

        Parameters
        ----------
        address : at which the others reach its keeper.
        """
        env = {**os.environ, "KUBECONFIG": str(self.config)}
        server = self.stack.enter_context(
            starting(*FLAGS, *flags, "--keeper-address", address, env=env, prefix=prefix)
        )
        server.wait_until_ready()
        if not self.whole:
            self.whole = text_of(Stream(server.url, **ASKED).end(60))
        return server

    @property
    def holder(self) -> str:
        """The machine that has the Lease; empty where it was given back."""
        return str(self.api.leases["chat/keeper"]["spec"].get("holderIdentity", ""))

    def streams(self, server: ServerProgram) -> list[Stream]:
        """Open some streams that last."""
        found = [Stream(server.url, **ASKED) for _ in range(4)]
        for stream in found:
            stream.wait_until_flowing()
        return found

    def check(self, streams: Sequence[Stream]) -> None:
        """Wait until they have ended as if nothing had been."""
        for stream in streams:
            events = stream.end(90)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert text_of(events) == self.whole


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(*stack.enter_context(lease_server(tmp_path)), stack)


def has_said(server: ServerProgram, words: str) -> bool:
    return any(words in line for line in server.lines)


@pytest.mark.slow  # a lease lasts for 15 s
def test_streams_outlive_the_machine_with_the_keeper(machines: Machines) -> None:
    first, second = machines.start(), machines.start()
    holder = machines.holder
    assert has_said(second, "the keeper is on another machine")
    assert second.fleet()["replicas"][0]["process_id"] not in second.engine_pids
    streams = machines.streams(second)
    for pid in (first.process.pid, *first.keepers):  # all of it at once
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: machines.holder != holder, 60)
    assert time.monotonic() - began > 10
    machines.check(streams)
    assert has_said(second, "another goes on")

    third = machines.start()
    assert machines.holder != holder
    streams = machines.streams(third)
    holder = machines.holder
    second.send_signal(signal.SIGTERM)
    assert second.exit_code(30) == 0
    began = time.monotonic()
    wait_for(lambda: machines.holder not in ("", holder), 30)
    assert time.monotonic() - began < 10  # it was given back
    machines.check(streams)
    third.send_signal(signal.SIGTERM)
    assert third.exit_code(30) == 0
    assert not machines.holder
