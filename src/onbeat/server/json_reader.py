"""The one way in which the server reads JSON: what takes time in it is counted before it is read.

The reader of JSON holds the interpreter until it is done, in a thread as well as in the event loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from onbeat.server.errors import ApiError
from onbeat.server.server_config import MAX_JSON_PARTS, MAX_JSON_VALUES

_MOST_MARKS = (
    (b",", MAX_JSON_VALUES, "values"),
    (b"{[:", MAX_JSON_PARTS, "objects, arrays and fields"),
)
"""What JSON is counted by, with the most of it: what takes time in JSON is not text."""

Raw = bytes | bytearray


class JsonReader:
    """Reads the JSON of one request, or of one part of it, all of which together is bounded.

    Parameters
    ----------
    what : it is, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_bytes = 0
        self._nums = [0] * len(_MOST_MARKS)

    def read(self, text: str | Raw) -> Any:
        """Return the value that one more text holds.

        Raises
        ------
        ApiError : with those before it has more than is read in a request (413).
        orjson.JSONDecodeError : it is not valid JSON.
        """
        raw = text.encode() if isinstance(text, str) else text
        self._num_bytes += len(raw)
        if self._num_bytes > MAX_JSON_PARTS:  # fewer bytes hold no more marks
            self.count(raw)
        return orjson.loads(raw)

    def count(self, raw: Raw) -> None:
        """Count a text, mostly without the interpreter lock: inside of its strings nothing counts.

        Raises
        ------
        ApiError : as `read`.
        """
        plain = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        is_inside = np.bitwise_xor.accumulate((plain == ord('"')).view(np.uint8)).view(np.bool_)
        for index, (marks, most, name) in enumerate(_MOST_MARKS):
            self._nums[index] += sum(int(np.count_nonzero((plain == mark) & ~is_inside)) for mark in marks)
            if self._nums[index] > most:
                raise ApiError(
                    413,
                    f"{self._what} holds more than {most} {name}; send less in a request",
                    code="request_too_large",
                )


def num_bytes_of(raw: Raw, wanted: bytes) -> int:
    """Return how often some bytes stand in others."""
    return len(raw.translate(None, bytes(set(range(256)) - set(wanted))))


def has_many_marks(raw: Raw) -> bool:
    """Return whether JSON is to be counted, by a look that takes little."""
    return num_bytes_of(raw, b"".join(marks for marks, _, _ in _MOST_MARKS)) > MAX_JSON_PARTS
