"""A device that does nothing until it is waited for, as if it were endlessly slow. Its clock counts work."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class FakeStream:
    """Keeps the work that is queued, and does it when a mark behind it is waited for.

    Memory is poisoned where it is handed out, so that a read of what was never written shows.
    """

    def __init__(self) -> None:
        self.num_queued = 0
        self.num_done = 0
        self.most_behind = 0
        self._work: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def run(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            self.num_queued += 1
            self.most_behind = max(self.most_behind, self.num_queued - self.num_done)

    def mark(self) -> FakeMark:
        return FakeMark(self, self.num_queued)

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), 2**31 - 1, dtype=torch.int32)

    def work_until(self, count: int) -> None:
        with self._lock:
            while self.num_done < count:
                work = self._work.pop(0)
                work()
                self.num_done += 1


class FakeMark:
    def __init__(self, stream: FakeStream, count: int) -> None:
        self._stream = stream
        self._count = count

    def is_passed(self) -> bool:
        return self._stream.num_done >= self._count

    def wait(self) -> None:
        self._stream.work_until(self._count)

    def seconds_since(self, earlier: FakeMark) -> float:
        return float(self._count - earlier._count)
