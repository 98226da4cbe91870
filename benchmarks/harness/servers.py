"""Servers that a benchmark starts on this machine. Needs nothing but Python."""

from __future__ import annotations

import signal
import socket
import sys


def end_by_sigterm() -> None:
    """Have SIGTERM leave this program by way of its blocks, which end the servers that they have started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    """Return a port that nothing listens on, for a server that must be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
