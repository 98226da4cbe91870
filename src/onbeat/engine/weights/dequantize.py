"""Turn GGUF's quantized blocks into plain numbers, piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    )
)
PLAIN_TYPES = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
"""Those of them that quantize nothing."""
_PIECE_NUMBERS = 1 << 17
"""A piece and its intermediate results stay in the processor's cache."""


def dequantize_rows(
    rows: npt.NDArray[Any],
    shape: tuple[int, ...],
    quantization: GGMLQuantizationType,
    dtype: np.dtype[Any],
    *,
    minus: float = 0.0,
) -> npt.NDArray[Any]:
    """Return a tensor of a GGUF file as plain numbers.

    The arithmetic is in float32, whatever the result's type.

    Parameters
    ----------
    rows : the file's own data, `[rows, bytes or numbers of a row]` or one row.
    shape : of the result.
    quantization : one of `SUPPORTED_TYPES`.
    dtype : of the result.
    minus : is subtracted from every number, in float32.
    """
    # Slices of a memory map are memory maps too, and take longer to make.
    rows = rows.view(np.ndarray).reshape(-1, rows.shape[-1])
    result = np.empty((rows.shape[0], shape[-1]), dtype)
    step = max(1, _PIECE_NUMBERS // shape[-1])
    for start in range(0, rows.shape[0], step):
        # As one long row, for blocks do not know where rows end: of rows, gguf takes only 16 at once.
        piece = rows[start : start + step].reshape(1, -1)
        values = dequantize(piece, quantization).reshape(-1, shape[-1])
        if minus:
            values = values - np.float32(minus)
        result[start : start + step] = values
    return result.reshape(shape)
