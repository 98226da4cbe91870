"""Tell what of a checkpoint is rounded when it is loaded, or left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from onbeat.engine.dtypes import BFLOAT16
from onbeat.engine.weights.checkpoint import Checkpoint


@runtime_checkable
class DescribedSource(Protocol):
    """A checkpoint that knows in which type its file keeps a parameter, and what it does not use."""

    @property
    def left_out(self) -> str | None:
        """What of the checkpoint is not served, in words."""
        ...

    def stored_type(self, name: str) -> str:
        """Return the type as the file's format calls it: `BF16`, `F16`, `F32`, `F64`, or one of GGUF's.

        Raises
        ------
        ModelLoadError : the parameter is not there.
        """
        ...


def loading_remarks(checkpoint: Checkpoint, names: Iterable[str], dtype: np.dtype[Any]) -> Iterator[str]:
    """Yield lines on weights that lose digits as they become plain numbers, and on what is left out.

    Parameters
    ----------
    names : the parameters that become plain numbers.
    dtype : of these numbers. Quantized types are float32 by their definition, so float32 holds them.
    """
    if not isinstance(checkpoint, DescribedSource):
        return
    if checkpoint.left_out is not None:
        yield f"{checkpoint.left_out} is left out: onbeat serves text alone"
    rounded = {checkpoint.stored_type(name) for name in names} - {"BF16"}
    if dtype == BFLOAT16 and rounded:
        yield (
            f"weights of type {', '.join(sorted(rounded))} become bfloat16 (8 significant bits, 2 bytes a "
            "number); --dtype float32 rounds nothing and takes twice the memory"
        )
