"""Server-sent events, parsed incrementally from whatever pieces the network delivers.

References
----------
WHATWG HTML Living Standard, section 9.2.6, "Interpreting an event stream".
"""

from __future__ import annotations


class EventStreamParser:
    """Turns pieces of an event stream into the data of its events.

    Lines may end in LF, CR or CRLF and may be split anywhere between pieces. Comments and the fields
    `event`, `id` and `retry` carry nothing that a load client needs and are passed over.
    """

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that this piece completes, in order."""
        if self._rest:
            piece = self._rest + piece
        if b"\r" in piece:
            piece = self._normalise(piece)
        lines = piece.split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events

    @staticmethod
    def _normalise(piece: bytes) -> bytes:
        # A final CR may be the first half of a CRLF: leave it until the next piece shows.
        held = b"\r" if piece.endswith(b"\r") else b""
        body = piece[:-1] if held else piece
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held

    def finish(self) -> list[bytes]:
        """Return the data of a last event that lacks its closing blank line.

        The standard drops such an event; a server that forgets the blank line after `[DONE]` has still
        delivered its answer.
        """
        events = self.feed(b"\n\n")
        self._rest = b""
        return events
