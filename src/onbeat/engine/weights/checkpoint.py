"""What every source of weights looks like, and the check that it holds what the model needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import BFLOAT16
from onbeat.engine.model_config import ModelConfig


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


class Checkpoint(Protocol):
    """Weights of one model under their Hugging Face parameter names."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> Iterable[str]:
        """Return the parameters' names: just those of `parameter_shapes(config)`."""
        ...

    def get(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a parameter in one of `DTYPES`; it may share memory with the file, so don't write to it.

        Raises
        ------
        ModelLoadError : the parameter is not there or cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A matrix as its file has it."""

    type_name: str
    """GGUF's, such as `Q4_1`."""
    data: NDArray[np.uint8]
    """[rows, bytes of a row], in the mapped file."""
    to_rows: NDArray[np.int64]
    """For each row of the file, which one of the parameter it is."""


@runtime_checkable
class QuantizedSource(Protocol):
    """A checkpoint that can hand out matrices without dequantizing them."""

    def quantized_rows(self, name: str) -> QuantizedRows | None:
        """Return a parameter's rows as they are in the file; None where the file does not quantize it.

        Raises
        ------
        ModelLoadError : the parameter is not there.
        """
        ...


def check_parameters(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Check that a source has each parameter in its right shape, and none that the model would leave out.

    Parameters
    ----------
    expected, found : parameter name to shape.
    source : what was read, for messages.

    Raises
    ------
    ModelLoadError : naming the first parameters that differ.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelLoadError(f"{source} lacks {len(missing)} of {len(expected)} tensors: {_some(missing)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(
                f"{source}: tensor {name} has shape {list(found[name])}; "
                f"the configuration asks for {list(shape)}"
            )
    extra = [name for name in found if name not in expected]
    if extra:
        raise ModelLoadError(
            f"{source} has {len(extra)} tensors that this architecture does not use: {_some(extra)}; "
            "the checkpoint is of another or a quantized model"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown}, ..." if len(names) > 3 else shown
