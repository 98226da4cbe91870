"""A real browser, driven by its own debugging protocol: enough to open a page, act on it and look."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-port=0",
    "--disable-dev-shm-usage",
)


class Tab:
    """One page of the browser.

    Attributes
    ----------
    complaints : what the console said as an error, violations of the page's policy included.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == self._number:
                assert "error" not in message, message
                answer: dict[str, Any] = message["result"]
                return answer
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))

    async def js(self, expression: str) -> Any:
        """Return the value of an expression."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not await self.js(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (
                f"{expression} stayed false; the page: {await self.js('document.body.innerText')}"
            )
            await self.js("new Promise((done) => setTimeout(done, 50))")

    async def keys(self, text: str) -> None:
        """Type; a line end is the Enter key."""
        for part in text.splitlines(keepends=True):
            await self.call("Input.insertText", text=part.rstrip("\n"))
            if part.endswith("\n"):
                for kind in ("keyDown", "keyUp"):
                    await self.call(
                        "Input.dispatchKeyEvent",
                        type=kind,
                        key="Enter",
                        code="Enter",
                        text="\r",
                        windowsVirtualKeyCode=13,
                    )

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


class Browser:
    """A browser that listens; starting one takes longer than most of what is done in it."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    @contextlib.asynccontextmanager
    async def tab(
        self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False
    ) -> AsyncIterator[Tab]:
        """Open a page as a visitor who has never been there: nothing is kept of this tab, or of others."""
        async with aiohttp.ClientSession(self._address) as session:
            async with session.get("/json/version") as answer:
                whole = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(whole) as socket:
                browser = Tab(socket)
                visitor = await browser.call("Target.createBrowserContext", disposeOnDetach=True)
                target = await browser.call("Target.createTarget", url="about:blank", **visitor)
                async with session.ws_connect(
                    f"/devtools/page/{target['targetId']}", max_msg_size=0
                ) as socket:
                    tab = Tab(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.call(f"{domain}.enable")
                    await tab.call(
                        "Emulation.setDeviceMetricsOverride",
                        width=width,
                        height=height,
                        deviceScaleFactor=1,
                        mobile=width < 600,
                    )
                    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                    await tab.call("Emulation.setEmulatedMedia", features=[scheme])
                    await tab.call("Page.navigate", url=url)
                    await tab.until("document.readyState === 'complete' && location.href !== 'about:blank'")
                    yield tab


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """Run a browser until the block ends."""
    assert CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Browser(_port(Path(profile) / "DevToolsActivePort"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _port(path: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return int(path.read_text().splitlines()[0])
        time.sleep(0.05)
    raise TimeoutError("the browser does not listen")
