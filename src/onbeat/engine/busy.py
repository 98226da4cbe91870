"""Whether other programs take the processors that this one counts on, while it measures itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

PROC_STAT = Path("/proc/stat")
BUSY_CORES = 0.25
"""Cores that others take of those that this process needs, from which on the machine counts as busy."""
_IDLE = slice(3, 5)
"""Among the counts of a core: idle, and idle while something is read."""
_STEAL = 8
"""The counts to the time that other virtual machines took; those behind it are contained in others."""
_SHORTEST = 0.1
"""Seconds; the system counts time in hundredths, and less than some of them says nothing."""


@dataclass(frozen=True, slots=True)
class Others:
    """What other programs took of the processors over a while."""

    num_cores: float
    """As cores that they kept busy all the while."""
    num_allowed: int
    """Cores that this process may run on."""
    num_threads: int
    """Threads that it computes with."""

    @property
    def is_busy(self) -> bool:
        """Whether what others left was too little for all threads: a step waits for its slowest one."""
        return self.num_threads + self.num_cores - self.num_allowed > BUSY_CORES

    def __str__(self) -> str:
        return f"other programs take {self.num_cores:.1f} of {self.num_allowed} cores"


class OthersMeter:
    """Counts from its making on what others than this process take of the cores that it may run on.

    Parameters
    ----------
    num_threads : that this process computes with.
    stat : the system's counts, /proc/stat.
    clock, own_seconds : time that passes, and processor time of this process.
    cores : what this process may run on; None asks the system.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        stat: Path = PROC_STAT,
        clock: Callable[[], float] = time.monotonic,
        own_seconds: Callable[[], float] = time.process_time,
        cores: Set[int] | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._stat = stat
        self._clock = clock
        self._own_seconds = own_seconds
        self._cores = os.sched_getaffinity(0) if cores is None else cores
        self._start = (clock(), own_seconds(), self._all_seconds())

    def read(self) -> Others | None:
        """Return what others took; None where the system does not tell, or too little time has passed."""
        start, own, before = self._start
        wall, after = self._clock() - start, self._all_seconds()
        if before is None or after is None or wall < _SHORTEST:
            return None
        others = max(after - before - (self._own_seconds() - own), 0.0) / wall
        return Others(min(others, float(len(self._cores))), len(self._cores), self._num_threads)

    def _all_seconds(self) -> float | None:
        """Return the time that the cores were not idle, seconds since the machine's start, if known."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        ticks, num_cores = 0, 0
        for name, *counts in (line.split() for line in lines if line.startswith("cpu")):
            if name[3:].isdigit() and int(name[3:]) in self._cores:
                values = [int(count) for count in counts[:_STEAL]]
                ticks += sum(values) - sum(values[_IDLE])
                num_cores += 1
        return ticks / os.sysconf("SC_CLK_TCK") if num_cores == len(self._cores) else None
