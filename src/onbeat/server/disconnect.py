"""Notice at once that a client has gone, while work is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what the block awaits when the client closes the connection.

    The request's body must have been read: what arrives after it is the end of the connection.

    Raises
    ------
    ClientGone : instead of the cancellation, when the client was its cause.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
