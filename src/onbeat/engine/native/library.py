"""The native engine's library: its C interface (`native/include/onbeat_native.h`), and its matrices."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.engine_config import ActivationQuantization

ABI_VERSION = 19


class CallStatus(IntEnum):
    """What a call returns that can fail."""

    OK = 0
    MALFORMED = -1
    NO_MEMORY = -2
    FAILED = -3


class Store(IntEnum):
    """How a packed matrix keeps its numbers."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4 = 3
    Q8_MIN = 4
    E2M1 = 5


class Source(IntEnum):
    """Types of the rows that are packed: GGUF's own numbers, and from 1000 on what GGUF has not."""

    F32 = 0
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39
    E2M1_16 = 1000


ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}
"""By the name in `ModelConfig.hidden_activation`."""

HEAD_NORMS = {None: 0, "head": 0, "all": 1, "own": 2}
"""By `ModelConfig.qk_norm`."""

ACTIVATION_QUANTIZATIONS: Mapping[ActivationQuantization, int] = {"auto": 0, "none": 1, "int8": 2}


MOST_QKV = 3
"""Matrices that a layer's query, key and value projections may be in."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one kind, as the header has them in a line."""
    return [(name, kind) for name in names.split()]


class LayerStructure(Structure):
    """`ob_layer`."""

    _fields_ = (
        ("qkv", c_void_p * MOST_QKV),
        *_fields(
            c_void_p, "o gate_up down router expert_gate_up expert_down router_bias expert_gate_up_bias"
        ),
        *_fields(c_void_p, "expert_down_bias qkv_bias o_bias gate_up_bias down_bias attention_norm mlp_norm"),
        *_fields(c_void_p, "after_attention_norm after_mlp_norm query_norm key_norm sinks"),
        *_fields(c_int64, "window rope num_kv_heads head_dim shares_kv place table"),
        *_fields(c_void_p, "value_norm router_norm expert_norm after_dense_norm after_experts_norm"),
        *_fields(c_void_p, "expert_factors input_gate input_projection after_input_norm"),
        ("scale", c_float),
        *_fields(c_void_p, "conv decay dt_bias delta_norm"),
    )


class ModelStructure(Structure):
    """`ob_model`."""

    _fields_ = (
        *_fields(c_int32, "num_layers hidden_size num_heads vocab_size activation precision block_size"),
        *_fields(c_int32, "num_blocks num_threads activation_quantization batch_invariant head_norms"),
        *_fields(c_int32, "norms_center norms_have_bias is_ungated is_parallel growth_context num_experts"),
        *_fields(c_int32, "experts_per_token expert_size shared_experts num_state_layers kv_numbers"),
        *_fields(c_int32, "num_tables gates_attention num_slots most_drafts key_heads value_heads key_dim"),
        *_fields(c_int32, "value_dim conv_width alternates_values layer_input_size normalizes_experts"),
        *_fields(c_float, "rms_norm_eps attention_scale embedding_scale query_growth attention_softcap"),
        *_fields(c_float, "logits_softcap mixer_jitter residual_scale"),
        *_fields(c_void_p, "embedding lm_head final_norm head_norm head_bias layers layer_table"),
        *_fields(c_void_p, "layer_projection layer_input_norm rotary_dims rope_frequencies rope_scales"),
    )


class StepStructure(Structure):
    """`ob_step`."""

    _fields_ = (
        ("num_tokens", c_int64),
        *_fields(c_void_p, "token_ids positions slot_mapping"),
        ("num_rows", c_int64),
        *_fields(c_void_p, "query_lens context_lens slots block_tables"),
        *_fields(c_int64, "num_block_tables block_table_stride num_samples"),
        *_fields(c_void_p, "sample_tokens logits best_ids best_logits"),
        ("num_hidden", c_int64),
        *_fields(c_void_p, "hidden_tokens hidden"),
        ("num_kept", c_int64),
        *_fields(c_void_p, "kept_rows kept_tokens kept_slots pending untaken"),
        ("seconds", c_double),
    )


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
    "ob_matrix_bytes": (c_int64, (c_void_p,)),
    "ob_matrix_row": (c_int32, (c_void_p, c_int64, c_void_p)),
    "ob_matrix_free": (None, (c_void_p,)),
    "ob_engine_create": (c_void_p, (POINTER(ModelStructure), c_char_p, c_char_p, c_size_t)),
    "ob_engine_free": (None, (c_void_p,)),
    "ob_engine_step": (c_int32, (c_void_p, POINTER(StepStructure))),
    "ob_engine_scrub": (c_int32, (c_void_p, c_void_p, c_int64)),
    "ob_engine_touch": (c_int32, (c_void_p, c_int64)),
    "ob_engine_kv": (c_void_p, (c_void_p, POINTER(c_int64))),
    "ob_engine_states": (c_void_p, (c_void_p, POINTER(c_int64))),
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


class MatrixLayout(NamedTuple):
    """How a matrix keeps its numbers."""

    store: Store
    group: int = 0
    """Neighbours in a row that share a scale (Q8, E2M1), or a scale and a minimum (Q4, Q8_MIN)."""

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
            case Store.E2M1:
                return 0.5 + 2 / self.group


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
        if result == CallStatus.NO_MEMORY:
            raise ModelLoadError(f"there is not enough memory to pack {len(rows)} rows of a matrix")
        return int(result) == CallStatus.OK

    def free(self) -> None:
        """Give the memory back; the matrix is of no use any more."""
        self._free()
