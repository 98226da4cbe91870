"""Passes on what the gates of this machine and a keeper on another one say to each other."""

from __future__ import annotations

import logging
import secrets
import time
from functools import partial
from pathlib import Path

import msgspec

from onbeat.cluster import gate_messages as messages
from onbeat.cluster.front_ends import FrontEnds
from onbeat.cluster.gate_host import gates_endpoint
from onbeat.cluster.lease import LeaseRecord
from onbeat.cluster.local_wire import LocalWire
from onbeat.cluster.wire import Line, shared_keys
from onbeat.engine.link import CurveKeys

logger = logging.getLogger("onbeat.cluster")

SILENT_SECONDS = 5.0
"""With a keeper that says nothing for so long a new connection is made: it speaks ten times a second."""


class GateRelay:
    """Takes the place of a keeper for the gates of a machine that has none.

    A gate begins again with each keeper, and with each connection to one. So nothing is lost, and nothing
    comes twice, whatever was on its way when one broke.

    Parameters
    ----------
    folder : for the socket; nobody but this user can enter it.
    front_ends : hear of their signs of life.
    secret : that all machines of the fleet know.
    """

    def __init__(self, folder: Path, front_ends: FrontEnds, secret: str) -> None:
        self._front_ends = front_ends
        public, own = shared_keys(secret, "gate")
        self._keys = CurveKeys(public, own, server=shared_keys(secret, "keeper")[0])
        self._lines: dict[bytes, Line] = {}
        self._address, self._heard = "", 0.0
        self._wire = LocalWire(
            gates_endpoint(folder),
            lambda name, message: self._on_message(name, messages.decode_to_keeper(message)),
            self._lose,
        )

    def follow(self, found: LeaseRecord) -> None:
        """Connect the gates with a keeper, if they are not; to be called every few seconds."""
        now = time.monotonic()
        if found.address == self._address and (not self._lines or now - self._heard < SILENT_SECONDS):
            return
        logger.info("the keeper on %s decides, at %s", found.holder, found.address or "no address yet")
        self._address, self._heard = found.address, now
        for line in self._lines.values():
            line.close(0)
        self._lines.clear()
        for name in self._wire.writers:
            self._wire.send(name, messages.Greet())

    def _on_message(self, name: bytes, message: messages.ToKeeper) -> None:
        self._front_ends.hear(name.decode())
        match message:
            case messages.Serving():
                self._front_ends.on_serving(name.decode())
            case messages.Open():
                self._connect(name)
        if (line := self._lines.get(name)) is not None:
            line.send(message)

    def _connect(self, name: bytes) -> None:
        if (line := self._lines.pop(name, None)) is not None:
            line.close(0)
        if self._address:
            self._lines[name] = Line(
                self._address,
                b"%b/%b" % (name, secrets.token_hex(4).encode()),  # another for each connection
                partial(self._pass_on, name),
                self._keys,
            )

    def _pass_on(self, name: bytes, message: bytes) -> None:
        self._heard = time.monotonic()
        self._wire.send(name, msgspec.Raw(message))

    def _lose(self, name: bytes) -> None:
        if (line := self._lines.pop(name, None)) is not None:
            line.send(messages.Left())
            line.close()

    def close(self) -> None:
        """Pass on nothing more."""
        for name in list(self._lines):
            self._lose(name)
        self._wire.close()
