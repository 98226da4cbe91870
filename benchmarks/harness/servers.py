"""Servers that a benchmark starts on this machine. Needs nothing but Python."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def end_by_sigterm() -> None:
    """Have SIGTERM leave this program by way of its blocks, which end the servers that they have started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def server(model: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """Run `onbeat serve`; yields its URL."""
    command = [sys.executable, "-m", "onbeat.cli.main", "serve", *model, "--port", "0", "--no-log-requests"]
    command += ["--max-model-len", "2048", *flags]
    end_by_sigterm()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"ready in .*?(http://\S+)", line):
                yield found[1]
                break
        else:
            sys.exit(f"the server did not start: {''.join(lines)}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def free_port() -> int:
    """Return a port that nothing listens on, for a server that must be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
