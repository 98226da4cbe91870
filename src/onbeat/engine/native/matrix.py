"""A weight matrix in the order in which the native kernels read it."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.native.library import ERROR_BYTES, NativeLibrary, Source, Status, Store, address


class MatrixLayout(NamedTuple):
    """How a matrix keeps its numbers."""

    store: Store
    group: int = 0
    """Neighbours in a row that share a scale (Q8), or a scale and a minimum (Q4, Q8_MIN)."""

    @property
    def bytes_per_number(self) -> float:
        """Bytes of a number; of quantized ones with its part of what the group shares, 2 bytes each."""
        match self.store:
            case Store.F32:
                return 4.0
            case Store.BF16:
                return 2.0
            case Store.Q8:
                return 1.0 + 2 / self.group
            case Store.Q8_MIN:
                return 1.0 + 4 / self.group
            case Store.Q4:
                return 0.5 + 4 / self.group


class PackedMatrix:
    """`y = x W^T`: memory of the library, freed with this object.

    Parameters
    ----------
    library : the library that keeps it.
    layout : how.
    num_outputs, num_inputs : rows of W, and numbers in each.

    Raises
    ------
    ModelLoadError : memory is short, or the sizes do not suit the store.
    """

    def __init__(
        self, library: NativeLibrary, layout: MatrixLayout, *, num_outputs: int, num_inputs: int
    ) -> None:
        error = ctypes.create_string_buffer(ERROR_BYTES)
        self._functions = library.functions
        self.handle: int | None = self._functions.ob_matrix_create(
            layout.store, num_outputs, num_inputs, layout.group, error, len(error)
        )
        if self.handle is None:
            raise ModelLoadError(
                f"a matrix of {num_outputs} x {num_inputs} cannot be kept as {layout.store.name}: "
                f"{error.value.decode(errors='replace')}"
            )
        self.layout = layout
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self._free = weakref.finalize(self, self._functions.ob_matrix_free, self.handle)
        self._free.atexit = False  # the process's end frees it too

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return int(self._functions.ob_matrix_bytes(self.handle))

    def pack(
        self, rows: NDArray[Any], source: Source, to_outputs: NDArray[np.int64], *, num_threads: int = 1
    ) -> bool:
        """Take in some rows.

        Parameters
        ----------
        rows : `[rows, numbers or bytes of a row]`; rows may lie apart.
        source : their type.
        to_outputs : for each row, which one of the matrix it becomes.
        num_threads : threads that share the work.

        Returns
        -------
        bool
            False where this store cannot take this type.

        Raises
        ------
        ModelLoadError : memory is short.
        """
        assert len(rows) == len(to_outputs)
        assert rows.strides[1] == rows.itemsize
        result = self._functions.ob_matrix_pack(
            self.handle,
            source,
            rows.__array_interface__["data"][0],
            rows.strides[0],
            address(to_outputs, np.int64),
            len(rows),
            num_threads,
        )
        if result == Status.NO_MEMORY:
            raise ModelLoadError(f"there is not enough memory to pack {len(rows)} rows of a matrix")
        return int(result) == Status.OK

    def free(self) -> None:
        """Give the memory back; the matrix is of no use any more."""
        self._free()
