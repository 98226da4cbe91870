"""A fake server in a thread of its own, and `onbeat bench serve` against it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import orjson

from onbeat.cli.main import main
from tests.fake_openai import FakeOpenAI, serving

SMALL = ["--random-input-len", "8", "--random-output-len", "4"]


class Background:
    """The fake server in a thread with an event loop of its own."""

    def __init__(self, fake: FakeOpenAI) -> None:
        self.fake = fake
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        self._done = asyncio.Event()
        async with serving(self.fake) as self.url:
            self._ready.set()
            await self._done.wait()

    def __enter__(self) -> Background:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)
        self._loop.close()


def bench(server: Background, *flags: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, "--disable-tqdm", *flags])


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(path.read_bytes())
    return document
