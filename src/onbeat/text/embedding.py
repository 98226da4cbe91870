"""From an engine's embedding to the vector that callers get."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def vector_of(
    embedding: bytes | None, dimensions: int | None = None, *, normalize: bool = True
) -> NDArray[np.float32]:
    """Return an embedding as numbers.

    Parameters
    ----------
    embedding : float32, little-endian.
    dimensions : give the first numbers alone, as many as this; None gives all.
    normalize : give it the length 1, unless it is all 0.
    """
    assert embedding is not None, "the engine delivers one, or an error"
    vector = np.frombuffer(embedding, "<f4")[:dimensions]
    length = float(np.linalg.norm(vector.astype(np.float64))) if normalize else 0.0
    return vector if length == 0.0 else (vector / length).astype(np.float32)
