"""Products of few rows by what is quickest for each shape here: cuBLAS, or a tiling in Triton.

cuBLAS splits the inputs of a small matrix and adds the parts in a second kernel; how well it reads depends on
the shape. What is quicker is timed when an engine starts, on the model's own matrices, in captured graphs and
so many matrices in turn that none is still in the cache, and kept for the next start.

Legend: T rows, D inputs, F outputs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onbeat.engine.cuda.triton_products import (
    MOST_ROWS,
    TILINGS,
    Card,
    SplitMemory,
    Tiling,
    compile_all,
    multiply,
    num_parts,
)
from onbeat.engine.cuda.weights import CudaWeights
from onbeat.engine.progress import Detail

TIMED_ROWS = (1, 8, 16, 32, 64, 128)
"""Rows that are timed; others go by the next larger one."""
_BYTES_IN_TURN = 512 << 20
"""Of the matrices that are read in turn: ten times a cache of the second level."""
_PRODUCTS_IN_TURN = 16
"""At least, so that the start of a graph does not show."""
_LEAST_GAIN = 0.02
"""By so much a tiling must be quicker than cuBLAS: less is chance."""
_LARGEST_ERROR = 0.02
"""Of a tiling's products against cuBLAS's, relative: both round to bfloat16."""


class Timed(NamedTuple):
    """What was found for one shape and number of rows."""

    num_outputs: int
    num_inputs: int
    num_rows: int
    tiling: Tiling | None
    """None: cuBLAS is quickest."""
    us: float
    """Of the quickest."""
    cublas_us: float

    def __str__(self) -> str:
        how = "cuBLAS" if self.tiling is None else "Triton {}x{}/{}".format(*self.tiling)
        return f"{self.num_rows} rows {how} {self.us:.1f} us ({self.cublas_us:.1f})"


class ChosenProducts:
    """Multiplies rows with matrices as it was chosen; called as `torch.nn.functional.linear` is.

    Parameters
    ----------
    timed : the choice. A shape or number of rows that is not among them goes by cuBLAS.
    device : of the matrices.
    """

    def __init__(self, timed: Sequence[Timed], device: torch.device) -> None:
        self.timed = timed
        self._tilings: dict[tuple[int, int, int], Tiling] = {}
        most = 0
        before: dict[tuple[int, int], int] = {}
        for each in sorted(timed, key=lambda one: one.num_rows):
            shape = each.num_outputs, each.num_inputs
            if each.tiling is not None:
                for num_rows in range(before.get(shape, 0) + 1, each.num_rows + 1):
                    self._tilings[*shape, num_rows] = each.tiling
                most = max(most, num_parts(each.tiling, each.num_rows, each.num_outputs))
            before[shape] = each.num_rows
        self._memory = SplitMemory.allocate(most, device)

    def __call__(self, x_TD: Tensor, matrix_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """Return `x @ matrix.T + bias`."""
        tiling = self._tilings.get((matrix_FD.shape[0], matrix_FD.shape[1], len(x_TD)))
        if tiling is None:
            return functional.linear(x_TD, matrix_FD, bias_F)
        return multiply(x_TD, matrix_FD, bias_F, tiling, self._memory)

    def __str__(self) -> str:
        lines: dict[tuple[int, int], list[str]] = {}
        for each in self.timed:
            lines.setdefault((each.num_outputs, each.num_inputs), []).append(str(each))
        return "; ".join(f"{shape[0]} x {shape[1]}: {', '.join(texts)}" for shape, texts in lines.items())


def choose_products(
    weights: CudaWeights,
    max_rows: int,
    *,
    directory: Path | None,
    seconds: float = 8.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ChosenProducts:
    """Return the quickest products for a model on its GPU, as timed before or now.

    Parameters
    ----------
    max_rows : most rows of a decode step.
    directory : where choices are kept; None keeps none.
    seconds : that timing may take, about; what is not timed by then goes by cuBLAS, and nothing is kept.
    on_progress : told what was chosen.
    """
    kinds = _matrices(weights)
    path = None if directory is None else directory / f"{_digest(kinds, weights)}.json"
    timed = _read(path, kinds)
    if timed is None:
        start = time.monotonic()
        with torch.inference_mode(), torch.cuda.device(weights.device):
            timed = _time_all(kinds, start + seconds)
        seconds_taken = time.monotonic() - start
        took = f"timed in {seconds_taken:.1f} s"
        if seconds_taken < seconds:  # else the next start, whose kernels are compiled already, gets further
            _keep(path, timed)
    else:
        took = "timed before"
    chosen = ChosenProducts(
        [each for each in timed if each.num_rows <= _next_timed(max_rows)], weights.device
    )
    on_progress(Detail(f"products of few rows, {took}: {chosen}"))
    return chosen


def _matrices(weights: CudaWeights) -> dict[tuple[int, int], list[Tensor]]:
    """Return the layers' matrices by shape."""
    kinds: dict[tuple[int, int], list[Tensor]] = {}
    for layer in weights.layers:
        for matrix in (layer.qkv_XD, layer.o_DX, layer.gate_up_FD, layer.down_DF):
            kinds.setdefault((matrix.shape[0], matrix.shape[1]), []).append(matrix)
    return kinds


def _next_timed(num_rows: int) -> int:
    return min((rows for rows in TIMED_ROWS if rows >= num_rows), default=MOST_ROWS)


def _time_all(kinds: Mapping[tuple[int, int], list[Tensor]], deadline: float) -> list[Timed]:
    """Time all that fits, few rows first; what cannot be compiled or computes wrongly is left out."""
    device, card = next(iter(kinds.values()))[0].device, Card.current()
    memory = SplitMemory.allocate(
        max(
            num_parts(tiling, num_rows, shape[0])
            for tiling in TILINGS
            for shape in kinds
            for num_rows in TIMED_ROWS
        ),
        device,
    )
    stream = torch.cuda.Stream()
    timed: list[Timed] = []
    compiled: set[int] = set()
    for num_rows in TIMED_ROWS:
        inputs = {
            shape: matrices[0].new_empty(num_rows, shape[1]).normal_() for shape, matrices in kinds.items()
        }
        fitting = {shape: [each for each in TILINGS if each.fits(*shape, num_rows, card)] for shape in kinds}
        padded = max(num_rows, 16)
        if padded not in compiled:
            compiled.add(padded)
            compile_all(
                (
                    (inputs[shape], matrices[0], None, tiling)
                    for shape, matrices in kinds.items()
                    for tiling in fitting[shape]
                ),
                memory,
            )
        for shape, matrices in kinds.items():
            if time.monotonic() > deadline:
                return timed
            timed.append(_time_one(inputs[shape], matrices, fitting[shape], memory, stream, deadline))
    return timed


def _time_one(
    x_TD: Tensor,
    matrices: Sequence[Tensor],
    tilings: Sequence[Tiling],
    memory: SplitMemory,
    stream: Any,
    deadline: float,
) -> Timed:
    """Time one shape with one number of rows, in each way."""
    few = matrices[: -(-_BYTES_IN_TURN // matrices[0].nbytes)]
    num_outputs, num_inputs = few[0].shape
    in_turn = list(few) * -(-_PRODUCTS_IN_TURN // len(few))
    expected_TF = functional.linear(x_TD, few[0])
    cublas_us = us = _graph_us(lambda matrix: functional.linear(x_TD, matrix), in_turn, stream)
    best: Tiling | None = None
    for tiling in tilings:
        if time.monotonic() > deadline:
            break
        # A tiling that this card cannot run, whatever the reason, or that comes out wrong, is no choice.
        with suppress(Exception):
            actual_TF = multiply(x_TD, few[0], None, tiling, memory)
            if not _is_close(actual_TF, expected_TF):
                continue
            took = _graph_us(partial(_by_tiling, x_TD, tiling, memory), in_turn, stream)
            if took < min(us, (1 - _LEAST_GAIN) * cublas_us):
                best, us = tiling, took
    return Timed(num_outputs, num_inputs, len(x_TD), best, round(us, 2), round(cublas_us, 2))


def _by_tiling(x_TD: Tensor, tiling: Tiling, memory: SplitMemory, matrix_FD: Tensor) -> Tensor:
    return multiply(x_TD, matrix_FD, None, tiling, memory)


def _is_close(actual_TF: Tensor, expected_TF: Tensor) -> bool:
    error = (actual_TF.float() - expected_TF.float()).norm()
    return bool(error <= _LARGEST_ERROR * expected_TF.float().norm())


def _graph_us(product: Callable[[Tensor], object], matrices: Sequence[Tensor], stream: Any) -> float:
    """Return the microseconds of a product inside a captured graph."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product(matrices[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # `torch.cuda.graph` would let go of all unused memory each time
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for matrix in matrices:
                product(matrix)
        finally:
            graph.capture_end()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    took: float = min(start.elapsed_time(end) for start, end in pairwise(events))
    return took * 1e3 / len(matrices)


def _digest(kinds: Mapping[tuple[int, int], Sequence[Tensor]], weights: CudaWeights) -> str:
    """Return a name for all that the times depend on."""
    what = [
        torch.cuda.get_device_name(weights.device),
        torch.__version__,
        str(weights.dtype),
        sorted((*shape, len(matrices)) for shape, matrices in kinds.items()),
        TILINGS,
        TIMED_ROWS,
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _read(path: Path | None, kinds: Mapping[tuple[int, int], object]) -> list[Timed] | None:
    """Return what was kept; None where there is nothing that can be used."""
    if path is None:
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        timed = [_timed(*row) for row in rows]
        is_sound = all(
            (each.num_outputs, each.num_inputs) in kinds
            and each.num_rows in TIMED_ROWS
            and (each.tiling is None or each.tiling in TILINGS)
            for each in timed
        )
    except (OSError, ValueError, TypeError, IndexError):
        return None
    return timed if is_sound else None


def _timed(
    num_outputs: int,
    num_inputs: int,
    num_rows: int,
    tiling: Sequence[int] | None,
    us: float,
    cublas_us: float,
) -> Timed:
    """Return what a line of the file says."""
    how = None if tiling is None else Tiling(*tiling)
    return Timed(num_outputs, num_inputs, num_rows, how, us, cublas_us)


def _keep(path: Path | None, timed: Sequence[Timed]) -> None:
    if path is None:
        return
    partial = path.with_suffix(".partial")
    with suppress(OSError):  # it is timed again
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(timed) + "\n", encoding="utf-8")
        partial.replace(path)
