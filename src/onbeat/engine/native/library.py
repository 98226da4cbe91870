"""Finds and loads the native engine's library; where it cannot, says why."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.native.structures import ABI_VERSION, ModelStructure, StepStructure

VARIABLE = "ONBEAT_NATIVE_LIBRARY"
"""Names another build of the library, such as one with a sanitizer."""
BUILT_LIBRARY = Path(__file__).with_name("libonbeat_native.so")
ERROR_BYTES = 512
"""Room for the library's messages."""

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ob_instruction_sets": (c_char_p, ()),
    "ob_withheld_instruction_sets": (c_char_p, ()),
    "ob_matrix_create": (c_void_p, (c_int32, c_int64, c_int64, c_int32, c_char_p, c_size_t)),
    "ob_matrix_pack": (c_int32, (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int32)),
    "ob_matrix_copy": (c_int32, (c_void_p, c_int32, c_int32)),
    "ob_matrix_drop_copy": (None, (c_void_p,)),
    "ob_matrix_bytes": (c_int64, (c_void_p,)),
    "ob_matrix_row": (c_int32, (c_void_p, c_int64, c_void_p)),
    "ob_matrix_free": (None, (c_void_p,)),
    "ob_engine_create": (c_void_p, (POINTER(ModelStructure), c_char_p, c_char_p, c_size_t)),
    "ob_engine_free": (None, (c_void_p,)),
    "ob_engine_step": (c_int32, (c_void_p, POINTER(StepStructure))),
    "ob_engine_scrub": (c_int32, (c_void_p, c_void_p, c_int64)),
    "ob_engine_touch": (c_int32, (c_void_p, c_int64)),
    "ob_engine_kv": (c_void_p, (c_void_p, POINTER(c_int64))),
}
"""Name to result and arguments."""


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """There is no library to use."""

    reason: str


class NativeLibrary:
    """A loaded library. Its calls let go of the interpreter lock.

    Parameters
    ----------
    functions : of the interface's version that this package was written for.
    """

    def __init__(self, functions: ctypes.CDLL) -> None:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
        self.functions: Any = functions
        self.path = Path(functions._name)
        self.instruction_sets: tuple[str, ...] = tuple(functions.ob_instruction_sets().decode().split())
        """Those that the build has and this processor runs, best first."""
        self.withheld: str = functions.ob_withheld_instruction_sets().decode()
        """What the processor has, but its system withholds from this process, and why; or nothing."""


def load_library() -> NativeLibrary | NotLoaded:
    """Load the library that `VARIABLE` names, else the one that was built when onbeat was installed."""
    override = os.environ.get(VARIABLE)
    path = Path(override) if override else BUILT_LIBRARY
    if not path.is_file():
        cure = f"${VARIABLE} names it" if override else "install g++, then onbeat again"
        return NotLoaded(f"its library {path.name} is not there ({cure})")
    try:
        functions = ctypes.CDLL(str(path))
        version = int(functions.ob_abi_version())
        if version != ABI_VERSION:
            return NotLoaded(
                f"its library {path.name} has interface version {version}, not {ABI_VERSION} "
                "(install onbeat again)"
            )
        return NativeLibrary(functions)
    except (OSError, AttributeError) as error:
        return NotLoaded(f"its library cannot be loaded: {error}")


def address(array: NDArray[Any] | None, dtype: Any) -> int | None:
    """Return where an array's numbers lie, in their order; None for NULL."""
    if array is None:
        return None
    assert array.dtype == dtype, f"an array of {array.dtype}, not {np.dtype(dtype)}"
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])
