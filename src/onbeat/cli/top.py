"""`onbeat top`: what a running server does, live in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from contextlib import suppress

import aiohttp
import orjson
from rich.console import Console
from rich.live import Live

from onbeat.bench.client import why_no_answer
from onbeat.cli.args import checked, server_root
from onbeat.core.errors import ConfigError
from onbeat.report.live_frame import State, StateHistory, live_frame

DEFAULT_URL = "http://127.0.0.1:8000"
SHORTEST_INTERVAL = 0.1
TIMEOUT = aiohttp.ClientTimeout(total=5.0)


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
    root = server_root(args.url)
    console = Console(highlight=False)
    is_single = args.once or not console.is_terminal
    asyncio.run(_run(console, root, args.api_key, None if is_single else args.interval))
    return 0


async def _run(console: Console, root: str, api_key: str | None, interval: float | None) -> None:
    """Draw a frame for each look at the server, for ever; a server that is away may come back."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    history = StateHistory()
    async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as session:
        history.add(await fetch_state(session, f"{root}/state"))
        if interval is None:
            console.print(live_frame(history, url=root))
            return
        seen_at = time.localtime()
        with Live(live_frame(history, url=root), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                note = ""
                try:
                    history.add(await fetch_state(session, f"{root}/state"))
                    seen_at = time.localtime()
                except ConfigError as error:
                    note = f"Out of date since {time.strftime('%H:%M:%S', seen_at)}, trying again: {error}"
                live.update(live_frame(history, url=root, note=note), refresh=True)


async def fetch_state(session: aiohttp.ClientSession, url: str) -> State:
    """Return the state of a server as it is.

    Raises
    ------
    ConfigError : no answer, one of a server that is not well, or one that no onbeat server gives.
    """
    try:
        async with session.get(url) as response:
            status, body = response.status, await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise ConfigError(
            f"no server answers at {url} ({why_no_answer(error)}); start one with `onbeat serve`, "
            "or name another: `onbeat top URL`"
        ) from error
    if status in (401, 403):
        raise ConfigError(f"{url} answers HTTP {status}: give its key with --api-key")
    if status >= 500:
        raise ConfigError(f"{url} answers HTTP {status}; see that server's log")
    if status == 200:
        with suppress(ValueError):
            state = orjson.loads(body)
            if isinstance(state, dict) and "server_info" in state:
                return state
    what = f"it answers HTTP {status}" if status != 200 else "it answers without server_info"
    raise ConfigError(f"{url} is no onbeat server: {what}; give the address of one")
