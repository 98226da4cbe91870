"""Server-sent events, as bytes."""

from __future__ import annotations

from typing import Any

import orjson

from onbeat.server.answer_head import Extras
from onbeat.server.errors import error_reply

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would collect events otherwise
    "x-accel-buffering": "no",
}

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_event(error: Exception) -> bytes:
    """Return the event that ends a stream which cannot go on."""
    return b"data: " + error_reply(error).body + b"\n\n"


class ChunkTemplate:
    """The bytes around what changes from chunk to chunk of one stream.

    A stream has a chunk for each delivery, so chunks are joined from bytes, not built as objects.

    Parameters
    ----------
    head : the fields that are the same in all chunks, such as `id` and `model`.
    has_usage : whether each chunk carries a `usage` field, null but for the last.
    """

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        self._start = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._has_usage = has_usage

    def chunk(self, choice: bytes, extras: Extras) -> bytes:
        """Return the event of one choice's JSON."""
        parts = [self._start, choice, b"]"]
        if extras.usage is not None:
            parts += (b',"usage":', orjson.dumps(extras.usage))
        elif self._has_usage:
            parts.append(b',"usage":null')
        if extras.slo is not None:
            parts += (b',"slo":', orjson.dumps(extras.slo))
        if extras.prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', orjson.dumps(extras.prompt_token_ids))
        parts.append(b"}\n\n")
        return b"".join(parts)
