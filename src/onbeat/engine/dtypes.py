"""Number types of weights, activations and KV, as NumPy has them: what the engine needs without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

FLOAT32: np.dtype[Any] = np.dtype(np.float32)
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT64: np.dtype[Any] = np.dtype(np.float64)
FLOAT8: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
"""Of a KV cache alone."""

DTYPES: Mapping[str, np.dtype[Any]] = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT64)}
"""By name, as options give them."""
