"""Fetch the metrics of a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp

from onbeat.bench.client import why_no_answer
from onbeat.core.errors import ConfigError
from onbeat.metrics.exposition import Scrape, read_exposition
from onbeat.report.live_view import is_onbeat

TIMEOUT = aiohttp.ClientTimeout(total=5.0)
PATH = "/metrics"


class ServerAway(ConfigError):
    """No server answers at the address, for now."""


class MetricsSource:
    """The metrics of one server.

    Parameters
    ----------
    session : with the headers to send.
    root : the server's address without a path.
    """

    def __init__(self, session: aiohttp.ClientSession, root: str) -> None:
        self._session = session
        self._root = root
        self._url = root + PATH

    async def has_engine(self) -> bool:
        """Return whether the server takes requests, as far as it says so."""
        try:
            async with self._session.get(self._root + "/ready") as response:
                return response.status != HTTPStatus.SERVICE_UNAVAILABLE
        except (TimeoutError, aiohttp.ClientError, OSError):
            return True  # the metrics tell whether the server is there

    async def fetch(self) -> Scrape:
        """Return the metrics as they stand.

        Raises
        ------
        ServerAway : no answer, or one of a server that is not well.
        ConfigError : an answer that no onbeat server gives.
        """
        try:
            async with self._session.get(self._url) as response:
                _check_status(self._url, response.status)
                text = await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise ServerAway(
                f"no server answers at {self._url} ({why_no_answer(error)}); start one with `onbeat serve`, "
                "or name another: `onbeat top URL`"
            ) from error
        try:
            scrape = read_exposition(text)
        except ValueError as error:
            raise ConfigError(
                f"{self._url} is no onbeat server: it shows no metrics ({error}); give the address of one"
            ) from error
        if not is_onbeat(scrape):
            raise ConfigError(
                f"{self._url} is no onbeat server: its metrics lack onbeat_requests_running; give the "
                "address of one"
            )
        return scrape


@asynccontextmanager
async def open_source(root: str, api_key: str | None) -> AsyncIterator[MetricsSource]:
    """Connect to a server while the block runs; it need not be there yet."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as session:
        yield MetricsSource(session, root)


def server_root(url: str) -> str:
    """Return a server's address from what a person gives for it: a host and port, or one of its URLs.

    Raises
    ------
    ConfigError : it is no address.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
    return full.rstrip("/").removesuffix(PATH).removesuffix("/v1").rstrip("/")


def _check_status(url: str, status: int) -> None:
    if status in (401, 403):
        raise ConfigError(f"{url} answers HTTP {status}: give its key with --api-key")
    if status >= 500:
        raise ServerAway(f"{url} answers HTTP {status}; see that server's log")
    if status != 200:
        raise ConfigError(f"{url} is no onbeat server: it answers HTTP {status}; give the address of one")
