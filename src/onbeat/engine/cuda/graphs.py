"""Steps of a few sizes, run again and again: captured on a GPU, called where there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from onbeat.core.errors import ConfigError

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""Rows. Under some 150, a product's time is that of reading its weights, and rows of padding cost little.
Above 512 a step takes the device longer than the host needs to queue it."""


PIECE_SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
"""Tokens. Above, a step takes the device longer than the host needs to queue its operators one by one."""


def piece_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return the sizes that steps with prompts are padded to; larger steps are not captured."""
    return tuple(size for size in PIECE_SIZES if size <= max_tokens)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes that decode steps of up to so many rows are padded to; larger ones are not padded."""
    return tuple(
        size for size, smaller in zip(GRAPH_SIZES, (0, *GRAPH_SIZES), strict=False) if smaller < max_num_seqs
    )


def verify_sizes(max_num_seqs: int, max_tokens: int, width: int) -> tuple[int, ...]:
    """Return the rows that steps of so many new tokens a row are padded to; larger ones are not captured."""
    most = min(max_tokens, PIECE_SIZES[-1])
    return tuple(size for size in graph_sizes(max_num_seqs) if size * width <= most)


class GraphKey(NamedTuple):
    """What a graph is captured of."""

    size: int
    """Rows, or tokens of a step that is captured in pieces."""
    piece: int | None = None
    """Of such a step; None: the whole of a step whose rows are alike."""
    width: int = 1
    """New tokens of each row: one where it decodes, more where it verifies drafts."""

    def __str__(self) -> str:
        if self.piece is None:
            return f"a step of {self.size} rows, new tokens of each: {self.width}"
        return f"piece {self.piece} of a step of {self.size} tokens"


class Graphs(Protocol):
    """Runs functions whose input and output lie in fixed memory."""

    name: str
    """For readers of measurements."""

    def prepare(
        self, keys: Sequence[GraphKey], run: Callable[[GraphKey], None], plan: Callable[[GraphKey], None]
    ) -> None:
        """Do what makes `replay` of these keys possible.

        Parameters
        ----------
        plan : the host's part, which comes before `run` and before each `replay`, and is not captured.
        run : neither waits for the device nor depends on what lies in memory; its results do not matter now.

        Raises
        ------
        ConfigError : naming what cannot be captured.
        """

    def replay(self, key: GraphKey) -> None:
        """Queue the function for a key."""


class EagerGraphs:
    """Calls the functions."""

    name = "none"

    def __init__(self) -> None:
        self._runs: dict[GraphKey, Callable[[GraphKey], None]] = {}

    def prepare(
        self,
        keys: Sequence[GraphKey],
        run: Callable[[GraphKey], None],
        plan: Callable[[GraphKey], None],  # noqa: ARG002 -- who replays has planned
    ) -> None:
        """Remember the function."""
        self._runs.update(dict.fromkeys(keys, run))

    def replay(self, key: GraphKey) -> None:
        """Call the function."""
        self._runs[key](key)


class CudaGraphs:
    """Captures a function once for each key; the graphs share one pool, for only one runs at a time."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def prepare(
        self, keys: Sequence[GraphKey], run: Callable[[GraphKey], None], plan: Callable[[GraphKey], None]
    ) -> None:
        """Capture, the largest size first, so that smaller ones find the pool large enough."""
        gc.freeze()  # garbage that was freed inside of a capture would spoil it
        try:
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()
                for key in sorted(keys, key=lambda key: -key.size):
                    self._graphs[key] = self._capture(key, run, plan)
                torch.cuda.current_stream().wait_stream(self._stream)
                torch.cuda.empty_cache()  # what ran before the captures left memory to its stream alone
        finally:
            gc.unfreeze()

    def replay(self, key: GraphKey) -> None:
        """Launch the graph."""
        self._graphs[key].replay()

    def _capture(
        self, key: GraphKey, run: Callable[[GraphKey], None], plan: Callable[[GraphKey], None]
    ) -> torch.cuda.CUDAGraph:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                plan(key)
                run(key)  # a kernel that is compiled, or memory that is taken, would fail a capture
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):  # `torch.cuda.graph` would let go of all unused memory each time
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run(key)
                finally:
                    graph.capture_end()
        except Exception as error:  # of torch, Triton or FlashInfer
            raise ConfigError(
                f"{key} cannot be captured as a CUDA graph: {str(error).partition(chr(10))[0]}; "
                "--enforce-eager does without graphs"
            ) from error
        return graph
