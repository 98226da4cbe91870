"""Whether a process gets the processor time that it wants: an engine that is kept waiting does not hang."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_SECONDS = 1.0
"""Between looks at a process that may hang: each reads two files of every thread."""
_NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """What the threads of a process, and of those that it has started, have got of the processors so far."""

    running: float
    """Seconds that they ran, all together."""
    waiting: float
    """Seconds that they were ready to run before they did, while others had the processors."""
    is_ready: bool
    """Whether one of them runs now, or would."""


@dataclass(slots=True)
class ProcessorWaits:
    """How long a process has been kept from running, since somebody began to look.

    Of each while between two looks, the share counts that its threads waited of what they asked for. One
    that sleeps asks for nothing, so that a deadlock is no wait; one that the system has stopped neither.
    """

    seconds: float = 0.0
    last_look: float = 0.0
    is_told: bool = False
    """Whether the log has said that it is kept waiting."""
    _last: ProcessorTime | None = None

    def forget(self) -> None:
        """Begin anew: it is seen to go on."""
        self.seconds, self.is_told, self._last = 0.0, False, None

    def look(self, now: float, got: ProcessorTime | None) -> None:
        """Take in what the process has got by now; None where nobody knows."""
        if got is not None and (last := self._last) is not None:
            passed = now - self.last_look
            # A process that it had started may have ended.
            running, waiting = max(got.running - last.running, 0.0), max(got.waiting - last.waiting, 0.0)
            # What a thread waits is counted once it runs.
            is_ready = got.is_ready or last.is_ready
            share = waiting / (running + waiting) if running + waiting > 0 else float(is_ready)
            self.seconds += passed * share if is_ready else min(passed * share, waiting)
        self.last_look, self._last = now, got


def read_processor_time(process_id: int) -> ProcessorTime | None:
    """Return what a process and those that it has started have got; None where the system does not say."""
    running = waiting = 0
    is_ready = False
    processes = [process_id]
    while processes:
        for thread in _threads(processes.pop()):
            with suppress(OSError):  # it has ended meanwhile
                got, waited, _ = (thread / "schedstat").read_text().split()
                running, waiting = running + int(got), waiting + int(waited)
                is_ready |= (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
                processes += map(int, (thread / "children").read_text().split())
    if not running:
        return None
    return ProcessorTime(running * _NANOSECOND, waiting * _NANOSECOND, is_ready)


def _threads(process_id: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{process_id}/task").iterdir())
    except OSError:
        return []
