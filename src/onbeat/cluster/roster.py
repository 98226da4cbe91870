"""Which processes outlive the one that has started them, and how the next one finds and holds them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


class LeftProcess:
    """A process that another one has started, to be used as those of `multiprocessing` are.

    Parameters
    ----------
    name : which no other process has.
    share : of the machine that it has.

    Raises
    ------
    ProcessLookupError : it has ended.
    """

    exitcode = "unknown"  # which another process is told

    def __init__(self, pid: int, name: str, share: int) -> None:
        self.pid, self.name, self.share = pid, name, share
        self.sentinel = os.pidfd_open(pid)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def join(self) -> None:
        """Who has taken it over is told of its end."""

    def close(self) -> None:
        os.close(self.sentinel)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)


class Roster:
    """Who has which place, in files of a folder that only this user can enter.

    Parameters
    ----------
    guardian : the process that takes over whom its child leaves, and with which all of them end.
    """

    def __init__(self, folder: Path, guardian: int) -> None:
        self._folder, self.guardian = folder, guardian

    def enter(self, place: str, pid: int | None, name: str, share: int = 0) -> None:
        """Note who has a place from now on; see `LeftProcess`."""
        file = self._folder / f"{place}.new"
        file.write_text(f"{pid} {name} {share}")
        file.rename(self._folder / f"{place}.at")

    def strike(self, place: str) -> None:
        """Note that nobody is to have a place."""
        (self._folder / f"{place}.at").unlink(missing_ok=True)

    def places(self, prefix: str) -> list[str]:
        """Return the places that somebody is to have, of those whose names begin so."""
        return sorted(file.stem for file in self._folder.glob(f"{prefix}*.at"))

    def kill(self, prefix: str) -> None:
        """End those who are still in places whose names begin so, and strike the places."""
        for place in self.places(prefix):
            if (left := self.find(place)) is not None:
                left.kill()
                left.close()
            self.strike(place)

    def find(self, place: str) -> LeftProcess | None:
        """Return who has had a place since before this process; None where there is nobody."""
        with suppress(OSError, ValueError):  # where the place is nobody's, there is no number
            pid, name, share = (self._folder / f"{place}.at").read_text().split()
            process = LeftProcess(int(pid), name, int(share))
            if process_status(process.pid)[1:2] == [str(self.guardian)]:
                return process
            process.close()  # another one has its id now
        return None


def process_status(pid: int | None) -> list[str]:
    """Return what the kernel tells of a process, its state and its parent first; nothing where it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
