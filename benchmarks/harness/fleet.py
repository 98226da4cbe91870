"""Commands of onbeat that benchmarks run, and fleets that it serves while something is measured of them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLEET_KEY = "of the benchmarks"
"""Opens `/fleet` of what these serve."""
FLEET_HEADERS = {"Authorization": f"Bearer {FLEET_KEY}"}
ONBEAT = (sys.executable, "-m", "onbeat")
_MOST_SECONDS = 120.0
"""Until all replicas are ready."""


@dataclass(frozen=True)
class Fleet:
    """One that serves."""

    url: str
    process_id: int
    """Of its front end."""

    def fetch(self, path: str) -> dict[str, Any]:
        """Return what it answers to a GET."""
        request = urllib.request.Request(self.url + path, headers=FLEET_HEADERS)
        with urllib.request.urlopen(request, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def summary_of(command: Sequence[str]) -> dict[str, Any]:
    """Run a command of onbeat that saves a summary, and return that."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run([*ONBEAT, *command, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def fleet_parser(description: str | None, *, port: int) -> argparse.ArgumentParser:
    """Return a parser of what benchmarks of the front end have in common: stand-ins, a port, a file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--json", type=Path)
    return parser


def replica_arguments(model: str, device: str, replicas: int, *, load_format: str = "stand-in") -> list[str]:
    """Return the arguments of a server of replicas: stand-ins, unless another load format is wanted."""
    return [model, "--load-format", load_format, "--device", device, "--replicas", str(replicas)]


@contextmanager
def serving(arguments: Sequence[str], port: int, *, log: Path | None = None) -> Iterator[Fleet]:
    """Yield a fleet that `onbeat serve` has started with some arguments, once all its replicas are ready.

    Parameters
    ----------
    log : of the server; None keeps none.

    Raises
    ------
    SystemExit : it does not get ready in two minutes.
    """
    command = [*ONBEAT, "serve", *arguments, "--port", str(port), "--fleet-key", FLEET_KEY]
    fleet_url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") if log else tempfile.TemporaryFile() as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
    ):
        try:
            fleet = Fleet(fleet_url, server.pid)
            _wait_until_ready(server, fleet)
            yield fleet
        finally:
            server.terminate()
            server.wait(30)


def _wait_until_ready(server: subprocess.Popen[bytes], fleet: Fleet) -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{fleet.url}/ready", timeout=1).close()
        except OSError:
            pass
        else:
            if all(each["state"] == "ready" for each in fleet.fetch("/fleet")["replicas"]):
                return
        time.sleep(0.2)
    raise SystemExit("the fleet did not get ready")
