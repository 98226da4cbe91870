"""`onbeat top`: what a running server does, live in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

from onbeat.cli.args import checked
from onbeat.core.errors import ConfigError

if TYPE_CHECKING:
    from onbeat.cli.top_source import StateSource
    from onbeat.report.live_state import State

DEFAULT_URL = "http://127.0.0.1:8000"
SHORTEST_INTERVAL = 0.1


def _interval(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= SHORTEST_INTERVAL):
        raise ValueError(text)
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help="the server's address")
    parser.add_argument(
        "--once", action="store_true", help="print one frame and end (default without a terminal)"
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=checked(_interval, f"seconds of at least {SHORTEST_INTERVAL}"),
        default=1.0,
        help="time between two looks at the server",
    )
    parser.add_argument("--api-key", metavar="KEY", help="for a proxy that guards the state")


def run(args: argparse.Namespace) -> int:
    """Watch until interrupted; return the exit code."""
    from onbeat.cli.top_source import server_root

    root = server_root(args.url)
    console = Console(highlight=False)
    is_single = args.once or not console.is_terminal
    asyncio.run(_run(console, root, args.api_key, None if is_single else args.interval))
    return 0


async def _run(console: Console, root: str, api_key: str | None, interval: float | None) -> None:
    from onbeat.cli.top_source import open_source

    async with open_source(root, api_key) as source:
        screen = _Screen(root)
        screen.take(await source.fetch(), has_engine=await source.has_engine())
        if interval is None:
            console.print(screen.frame())
        else:
            await _watch(console, source, screen, interval)


async def _watch(console: Console, source: StateSource, screen: _Screen, interval: float) -> None:
    """Draw a frame for each look at the server, for ever; a server that is away may come back."""
    with Live(screen.frame(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            try:
                screen.take(await source.fetch(), has_engine=await source.has_engine())
            except ConfigError as error:
                screen.miss(error)
            live.update(screen.frame(), refresh=True)


class _Screen:
    """What is drawn: the last good look at the server, and since when there was none."""

    def __init__(self, root: str) -> None:
        from onbeat.report.live_state import StateHistory

        self._root = root
        self._history: StateHistory = StateHistory()
        self._seen_at = 0.0
        self._note = ""

    def take(self, state: State, *, has_engine: bool) -> None:
        self._history.add(state)
        self._seen_at = time.time()
        self._note = "" if has_engine else "No replica takes requests at present: GET /ready says why."

    def miss(self, error: ConfigError) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(self._seen_at))
        self._note = f"Out of date since {since}, trying again: {error}"

    def frame(self) -> RenderableType:
        from onbeat.report.live_frame import live_frame

        return live_frame(self._history, url=self._root, note=self._note)
