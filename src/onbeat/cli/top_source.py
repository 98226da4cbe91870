"""Fetch the state of a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp
import orjson

from onbeat.bench.client import why_no_answer
from onbeat.core.errors import ConfigError
from onbeat.report.live_state import State

TIMEOUT = aiohttp.ClientTimeout(total=5.0)
PATH = "/state"


class ServerAway(ConfigError):
    """No server answers at the address, for now."""


class StateSource:
    """The state of one server.

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
            return True  # the state tells whether the server is there

    async def fetch(self) -> State:
        """Return the state as it is.

        Raises
        ------
        ServerAway : no answer, or one of a server that is not well.
        ConfigError : an answer that no onbeat server gives.
        """
        try:
            async with self._session.get(self._url) as response:
                _check_status(self._url, response.status)
                body = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerAway(
                f"no server answers at {self._url} ({why_no_answer(error)}); start one with `onbeat serve`, "
                "or name another: `onbeat top URL`"
            ) from error
        with suppress(ValueError):
            state = orjson.loads(body)
            if isinstance(state, dict) and "server_info" in state:
                return state
        raise ConfigError(
            f"{self._url} is no onbeat server: it answers without server_info; give the address of one"
        )


@asynccontextmanager
async def open_source(root: str, api_key: str | None) -> AsyncIterator[StateSource]:
    """Connect to a server while the block runs; it need not be there yet."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as session:
        yield StateSource(session, root)


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
    return full.rstrip("/").removesuffix(PATH).removesuffix("/metrics").removesuffix("/v1").rstrip("/")


def _check_status(url: str, status: int) -> None:
    if status in (401, 403):
        raise ConfigError(f"{url} answers HTTP {status}: give its key with --api-key")
    if status >= 500:
        raise ServerAway(f"{url} answers HTTP {status}; see that server's log")
    if status != 200:
        raise ConfigError(f"{url} is no onbeat server: it answers HTTP {status}; give the address of one")
