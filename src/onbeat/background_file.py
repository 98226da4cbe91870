"""A file written by a thread of its own, so that neither steps nor answers wait for a disk."""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from pathlib import Path
from typing import BinaryIO

from onbeat.core.errors import ConfigError

logger = logging.getLogger("onbeat.files")

FLUSH_SECONDS = 1.0
MAX_PENDING_BYTES = 64 * 2**20
"""A disk that falls behind by this much ends the file, not the memory."""
CLOSE_SECONDS = 10.0
GZIP_LEVEL = 1
GZIP_FORMAT = 31
"""zlib's `wbits` of a gzip stream with the largest window."""


class BackgroundFile:
    """Takes lines at once, writes them about once a second; all that was flushed survives a kill.

    A write error or a full disk ends the file with one warning; `write` then does nothing.

    Parameters
    ----------
    path : created for this user alone, or overwritten with the mode that it has.
    what : the file is, for messages: `record`.
    is_packed : whether it is written as gzip.
    waits : for the disk where it falls behind, as whoever is not on time can.
    max_pending_bytes : text that may wait for the disk.

    Raises
    ------
    ConfigError : the file cannot be created.
    """

    def __init__(
        self,
        path: Path,
        what: str,
        *,
        is_packed: bool,
        waits: bool = False,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        try:
            # The thread opens nothing: who records into a missing directory hears of it at once.
            # Tenants, and hashes by which a known prompt can be recognised, are nobody else's business.
            private = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file: BinaryIO = os.fdopen(private, "wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"cannot write the {what} to {path}: {error.strerror}; choose another file"
            ) from error
        self._path, self._what = path, what
        self._waits, self._max_pending_bytes = waits, max_pending_bytes
        self._compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_FORMAT) if is_packed else None
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._is_closing = threading.Event()
        self.is_broken = False
        """Whether lines have been lost."""
        self._thread = threading.Thread(target=self._run, name=f"onbeat-{what}", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Take one line, its end included."""
        if self.is_broken:
            return
        with self._lock:
            self._pending.append(line)
            self._num_pending_bytes += len(line)
        while self._num_pending_bytes > self._max_pending_bytes and not self.is_broken:
            if self._waits:
                time.sleep(FLUSH_SECONDS / 100)
            else:
                self.give_up(f"the disk is {self._max_pending_bytes:,} bytes behind")

    def close(self) -> None:
        """Write what is pending and close the file; one that does not wait gives up on a disk that hangs."""
        self._is_closing.set()
        self._thread.join(None if self._waits else CLOSE_SECONDS)

    def give_up(self, reason: object) -> None:
        """Take no more lines; serving goes on. Those taken so far are written, if the disk takes them."""
        if not self.is_broken:
            self.is_broken = True
            logger.warning("the %s %s ends here, cut short: %s", self._what, self._path, reason)

    def _run(self) -> None:
        try:
            while not self._is_closing.wait(FLUSH_SECONDS):
                self._write(zlib.Z_SYNC_FLUSH)
            self._write(zlib.Z_FINISH)
        except OSError as error:
            self.give_up(error)
        finally:
            self._close()

    def _write(self, flush: int) -> None:
        with self._lock:
            lines, self._pending, self._num_pending_bytes = self._pending, [], 0
        if not (lines or flush == zlib.Z_FINISH):
            return
        data = b"".join(lines)
        if self._compressor is not None:
            data = self._compressor.compress(data) + self._compressor.flush(flush)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _close(self) -> None:
        with self._lock:
            self._pending = []
        try:
            self._file.close()
        except OSError as error:
            self.give_up(error)
