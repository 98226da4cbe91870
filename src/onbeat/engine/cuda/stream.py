"""Where queued work runs, and how the host learns that it has run."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from onbeat.engine.forward import Mark


class DeviceStream(Protocol):
    """Runs work in order, at once or later."""

    def run(self, work: Callable[[], object]) -> None:
        """Queue what `work` computes on the device; who calls may go on at once."""

    def mark(self) -> Mark:
        """Return the present end of the queue."""

    def pinned(self, num_words: int) -> Tensor:
        """Return int32 host memory that the device copies from and to, while the host does other things.

        Nothing is written there yet.
        """


class CpuStream:
    """The CPU computes while it is called."""

    def run(self, work: Callable[[], object]) -> None:
        """Do the work."""
        work()

    def mark(self) -> Mark:
        """Return a mark that is passed already."""
        return _Passed()

    def pinned(self, num_words: int) -> Tensor:
        """Return plain memory."""
        return torch.empty(num_words, dtype=torch.int32)


class CudaStream:
    """The current stream of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        # `set_device` takes no device without an index, which is what "cuda" is.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def run(self, work: Callable[[], object]) -> None:
        """Queue the work; the device is that of the thread from now on, for Triton asks for no other."""
        torch.cuda.set_device(self._device)
        work()

    def mark(self) -> Mark:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return _Recorded(event)

    def pinned(self, num_words: int) -> Tensor:
        """Return memory of the driver's, which torch keeps and hands out again."""
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)


class _Passed:
    def __init__(self) -> None:
        self._time = perf_counter()

    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: _Passed) -> float:
        return self._time - earlier._time


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: _Recorded) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def stream_of(device: torch.device) -> DeviceStream:
    """Return where work is queued for a device."""
    return CudaStream(device) if device.type == "cuda" else CpuStream()
