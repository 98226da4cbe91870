"""Decode steps of a few sizes, run again and again: captured on a GPU, called where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from onbeat.core.errors import ConfigError

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows. Under some 150, a product's time is that of reading its weights, and rows of padding cost little."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes that decode steps of up to so many rows are padded to; larger ones are not padded."""
    return tuple(
        size for size, smaller in zip(GRAPH_SIZES, (0, *GRAPH_SIZES), strict=False) if smaller < max_num_seqs
    )


class Graphs(Protocol):
    """Runs a function of the rows' number, whose input and output lie in fixed memory."""

    name: str
    """For readers of measurements."""

    def prepare(self, sizes: Sequence[int], run: Callable[[int], None], plan: Callable[[int], None]) -> None:
        """Do what makes `replay` of these sizes possible.

        Parameters
        ----------
        plan : the host's part, which comes before `run` and before each `replay`, and is not captured.
        run : neither waits for the device nor depends on what lies in memory; its results do not matter now.

        Raises
        ------
        ConfigError : naming the size that cannot be captured.
        """
        ...

    def replay(self, size: int) -> None:
        """Queue the function for a size."""
        ...


class EagerGraphs:
    """Calls the function."""

    name = "none"

    def __init__(self) -> None:
        self._run: Callable[[int], None] | None = None

    def prepare(
        self,
        sizes: Sequence[int],  # noqa: ARG002
        run: Callable[[int], None],
        plan: Callable[[int], None],  # noqa: ARG002 -- who replays has planned
    ) -> None:
        """Remember the function."""
        self._run = run

    def replay(self, size: int) -> None:
        """Call the function."""
        assert self._run is not None, "nothing was prepared"
        self._run(size)


class CudaGraphs:
    """Captures the function once for each size; the graphs share one pool, for only one runs at a time."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def prepare(self, sizes: Sequence[int], run: Callable[[int], None], plan: Callable[[int], None]) -> None:
        """Capture, the largest size first, so that smaller ones find the pool large enough."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            pool = torch.cuda.graph_pool_handle()
            for size in sorted(sizes, reverse=True):
                stream.wait_stream(torch.cuda.current_stream())
                try:
                    with torch.cuda.stream(stream):
                        plan(size)
                        run(size)  # a kernel that is compiled, or memory that is taken, would fail a capture
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        run(size)
                except Exception as error:  # of torch, Triton or FlashInfer
                    raise ConfigError(
                        f"a decode step of {size} rows cannot be captured as a CUDA graph: "
                        f"{str(error).partition(chr(10))[0]}; --enforce-eager does without graphs"
                    ) from error
                self._graphs[size] = graph
            torch.cuda.current_stream().wait_stream(stream)

    def replay(self, size: int) -> None:
        """Launch the graph."""
        self._graphs[size].replay()
