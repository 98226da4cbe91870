"""A product of few rows and a matrix in Triton: it only has to read the matrix as quickly as memory gives it.

The matrix is the first operand and the rows are the second one, so that tensor cores work on tiles of
outputs, of which there are many. Where a matrix has too few outputs to keep all processors reading, several
programs each sum a part of the inputs; the last of them to end adds the parts up, always in the same order.

Legend: T rows, D inputs, F outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 128
_MOST_TILES = 1 << 14
"""Of outputs of one product whose inputs are split."""


class Card(NamedTuple):
    """What of a GPU decides which tilings it can run."""

    shared_bytes: int
    """Of a processor's memory that a program may take."""
    capability: int
    """The first number."""

    @classmethod
    def current(cls) -> Card:
        """Look at the current device."""
        index = torch.cuda.current_device()
        found = triton.runtime.driver.active.utils.get_device_properties(index)
        return cls(found["max_shared_mem"], torch.cuda.get_device_capability(index)[0])


H100 = Card(227 << 10, 9)
"""The one with the most memory."""


class Tiling(NamedTuple):
    """How a product is cut."""

    outputs: int
    """Of one program."""
    depth: int
    """Inputs that are read at once."""
    splits: int
    """Programs that share the inputs of an output."""
    warps: int
    stages: int
    """Pieces of the matrix on their way at once, and one."""

    def fits(self, num_outputs: int, num_inputs: int, num_rows: int, card: Card = H100) -> bool:
        """Whether a matrix can be cut so, with nothing over, and a program has memory for its pieces."""
        rows = _padded(num_rows)
        # Before Hopper the piece that is multiplied lies in registers.
        kept = self.stages if card.capability >= H100.capability else self.stages - 1
        # Each program reads all rows again: with few outputs for many rows that is more than the matrix.
        if rows > 2 * self.outputs or 2 * (self.outputs + rows) * self.depth * kept > card.shared_bytes:
            return False
        if num_outputs % self.outputs or num_inputs % (self.splits * self.depth):
            return False
        return self.splits == 1 or num_outputs // self.outputs <= _MOST_TILES


TILINGS = (
    Tiling(16, 512, 1, 4, 4),
    Tiling(32, 256, 1, 4, 4),
    Tiling(32, 256, 2, 4, 4),
    Tiling(64, 128, 1, 4, 5),
    Tiling(64, 128, 2, 4, 5),
    Tiling(64, 128, 4, 4, 5),
    Tiling(128, 64, 4, 4, 6),
    Tiling(128, 128, 2, 8, 4),
    Tiling(128, 64, 1, 4, 3),
    Tiling(128, 64, 4, 8, 5),
    Tiling(256, 64, 4, 8, 4),
)


class SplitMemory(NamedTuple):
    """What programs that share outputs leave for each other; products may use it in stream order."""

    parts: Tensor
    """float32."""
    arrived: Tensor
    """int32, zeros: each product leaves zeros behind."""

    @classmethod
    def allocate(cls, num_parts: int, device: torch.device) -> SplitMemory:
        """Return memory for products whose parts are at most so many numbers."""
        return cls(
            torch.empty(num_parts, dtype=torch.float32, device=device),
            torch.zeros(_MOST_TILES, dtype=torch.int32, device=device),
        )


def num_parts(tiling: Tiling, num_rows: int, num_outputs: int) -> int:
    """Return how many numbers of `SplitMemory.parts` a product needs."""
    return 0 if tiling.splits == 1 else tiling.splits * num_outputs * _padded(num_rows)


def multiply(
    x_TD: Tensor, matrix_FD: Tensor, bias_F: Tensor | None, tiling: Tiling, memory: SplitMemory
) -> Tensor:
    """Return `x @ matrix.T + bias`, summed in float32.

    Parameters
    ----------
    x_TD, matrix_FD : contiguous, of one type; at most `MOST_ROWS` rows.
    tiling : one that fits the matrix.
    memory : large enough for it.
    """
    assert len(x_TD) <= MOST_ROWS, f"{len(x_TD)} rows are too many"
    assert tiling.fits(len(matrix_FD), matrix_FD.shape[1], len(x_TD)), (
        f"{tiling} does not fit {tuple(matrix_FD.shape)}"
    )
    out_TF = x_TD.new_empty(len(x_TD), len(matrix_FD))
    grid, arguments, options = _launch(x_TD, matrix_FD, bias_F, tiling, memory, out_TF)
    _multiply[grid](*arguments, **options)
    return out_TF


def compile_all(
    products: Iterable[tuple[Tensor, Tensor, Tensor | None, Tiling]], memory: SplitMemory
) -> None:
    """Compile what these calls of `multiply` will launch, many at once.

    What cannot be compiled raises when it is launched.
    """
    with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for x_TD, matrix_FD, bias_F, tiling in products:
            grid, arguments, options = _launch(x_TD, matrix_FD, bias_F, tiling, memory, x_TD)
            _multiply.warmup(*arguments, grid=grid, **options)


def _launch(
    x_TD: Tensor,
    matrix_FD: Tensor,
    bias_F: Tensor | None,
    tiling: Tiling,
    memory: SplitMemory,
    out_TF: Tensor,
) -> tuple[tuple[int, int], tuple[Tensor | int, ...], dict[str, int]]:
    """Return the programs, arguments and sizes of a launch."""
    (num_rows, num_inputs), num_outputs = x_TD.shape, len(matrix_FD)
    arguments = (
        x_TD,
        matrix_FD,
        matrix_FD if bias_F is None else bias_F,
        out_TF,
        memory.parts,
        memory.arrived,
        num_rows,
        num_outputs,
        num_inputs // (tiling.splits * tiling.depth),
    )
    options = {
        "HAS_BIAS": bias_F is not None,
        "ROWS": _padded(num_rows),
        "OUTPUTS": tiling.outputs,
        "DEPTH": tiling.depth,
        "SPLITS": tiling.splits,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    return (num_outputs // tiling.outputs, tiling.splits), arguments, options


def _padded(num_rows: int) -> int:
    """Return for how many rows a kernel is compiled."""
    return max(int(triton.next_power_of_2(num_rows)), 16)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_steps"])
def _multiply(
    x_ptr,
    matrix_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    num_rows,
    num_outputs,
    num_steps,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    # A product of a constant: the compiler knows that rows begin at multiples of 16 numbers.
    width = num_steps * (SPLITS * DEPTH)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    places = split * num_steps * DEPTH + tl.arange(0, DEPTH)
    matrix_ptrs = matrix_ptr + outputs[:, None].to(tl.int64) * width + places[None, :]
    x_ptrs = x_ptr + rows[None, :] * width + places[:, None]
    is_row = rows < num_rows
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for _ in range(num_steps):
        matrix = tl.load(matrix_ptrs, eviction_policy="evict_first")
        x = tl.load(x_ptrs, mask=is_row[None, :], other=0.0)
        sums = tl.dot(matrix, x, sums, input_precision="ieee")
        matrix_ptrs += DEPTH
        x_ptrs += DEPTH

    out_ptrs = out_ptr + rows[None, :] * num_outputs + outputs[:, None]
    is_last = True
    if SPLITS > 1:
        part_ptrs = parts_ptr + tile * (SPLITS * OUTPUTS * ROWS)
        part_ptrs += tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :]
        tl.store(part_ptrs + split * (OUTPUTS * ROWS), sums)
        tl.debug_barrier()  # all threads have written before one says so
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for each in tl.static_range(SPLITS):
                sums += tl.load(part_ptrs + each * (OUTPUTS * ROWS), cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
        if HAS_BIAS:
            sums += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :])
