"""Servers take turns on the machine: suspended while another one runs, or started anew for each turn.

Suspended servers hold their memory and nothing else, so where all fit at once turns can change with every
load, and a drift of the machine meets both sides alike. Where they do not fit, each is started, loaded and
stopped in turn.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.serve.slo_live.servers import Fleet, command_spec

from .client import Target
from .entries import Entry, launch_here
from .machine import available_share, child_sessions, memory_bytes

Turns = Literal["auto", "suspend", "restart"]
TURNS: tuple[Turns, ...] = ("auto", "suspend", "restart")
MEMORY_RESERVE = 0.25
"""Share of the machine's memory that stays free with all servers up; with less they are started in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A server whose turn it is."""

    target: Target
    session: int
    is_first: bool
    """Whether the server has not been loaded before."""


class Stage:
    """Runs one server at a time. A context manager: it stops them all.

    Parameters
    ----------
    keeps_up : whether a server stays up, suspended, after its turn.
    """

    def __init__(self, entries: Sequence[Entry], *, keeps_up: bool) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self.keeps_up = keeps_up
        self.starts: list[dict[str, Any]] = []
        """Of every start: server, seconds until it answered, bytes of memory then."""
        self._fleet = Fleet()
        self._targets: dict[str, Target] = {}
        self._sessions: dict[str, int] = {}
        self._loaded: set[str] = set()

    def __enter__(self) -> Stage:
        self._fleet.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._fleet.__exit__(*error)

    def start(self, name: str) -> None:
        """Start a server and suspend it."""
        entry = self._entries[name]
        launch = launch_here(entry)
        # Where nothing else is called onbeat, the one of this Python is meant.
        path = f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}"
        before, began = child_sessions(), time.monotonic()
        spec = command_spec(name, launch.command, launch.url, {"PATH": path} | dict(launch.environment))
        self._fleet.start(spec)
        seconds = time.monotonic() - began
        (session,) = child_sessions() - before
        self._sessions[name] = session
        self._targets[name] = Target(
            url=launch.url,
            model=launch.model,
            api=entry.api,
            ignore_eos=entry.ignore_eos,
            keeps_alive=entry.keeps_alive,
        )
        self._loaded.discard(name)
        self.starts.append({"server": name, "seconds": seconds, "memory_bytes": memory_bytes(session)})

    @contextmanager
    def turn(self, name: str) -> Iterator[Turn]:
        """Let a server run."""
        if name not in self._fleet.servers:
            self.start(name)
        with self._fleet.servers[name].turn():
            yield Turn(
                target=self._targets[name],
                session=self._sessions[name],
                is_first=name not in self._loaded,
            )
        self._loaded.add(name)
        if not self.keeps_up:
            self._fleet.keep([])


@contextmanager
def open_stage(entries: Sequence[Entry], turns: Turns) -> Iterator[Stage]:
    """Yield a stage, with its servers up if they stay up; `auto` decides by the memory that is left."""
    if turns != "restart":
        with Stage(entries, keeps_up=True) as stage:
            for entry in entries:
                stage.start(entry.name)
                if turns == "auto" and available_share() < MEMORY_RESERVE:
                    print(f"with {entry.name} up memory runs short: servers are started in turn", flush=True)
                    break
            else:
                yield stage
                return
    with Stage(entries, keeps_up=False) as stage:
        yield stage
