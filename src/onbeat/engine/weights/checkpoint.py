"""What every source of weights looks like, and the check that it holds what the model needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import BFLOAT16
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.weights.parameters import Shape, StoredRows, find_rows, parameter_shapes, shapes_of


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A matrix as its file has it, or in a form that holds it."""

    type_name: str
    """GGUF's, such as `Q4_1`, or `E2M1_16`: 16 floats of 4 bits with a scale."""
    read: Callable[[slice], NDArray[np.uint8]]
    """Returns some rows of the file, which may lie in its map: [rows, bytes of a row]."""
    to_rows: NDArray[np.int64]
    """For each row of the file, which one of the parameter it is."""


ALL_ROWS = slice(None)


class Checkpoint(ABC):
    """Weights of one model under their Hugging Face parameter names.

    Parameters
    ----------
    config : the model that the weights are of.
    """

    left_out: str | None = None
    """What of the source is not served, in words."""
    scheme: str | None = None
    """How safetensors are quantized, in words; None where they are not."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = parameter_shapes(config)

    def names(self) -> Iterable[str]:
        """Return the parameters' names: just those of `parameter_shapes(config)`."""
        return self._shapes.keys()

    def shape_of(self, name: str) -> Shape:
        """Return a parameter's shape.

        Raises
        ------
        ModelLoadError : the model has no such parameter.
        """
        if name not in self._shapes:
            raise ModelLoadError(f"the {self.config.architecture} model has no parameter {name!r}")
        return self._shapes[name]

    @abstractmethod
    def get(self, name: str, dtype: np.dtype[Any], rows: slice = ALL_ROWS) -> NDArray[Any]:
        """Return a parameter in one of `DTYPES`; it may share memory with the file, so don't write to it.

        Parameters
        ----------
        rows : which of it. Those of a vocabulary or a feed-forward alone are read apart; they begin at an
            even number.

        Raises
        ------
        ModelLoadError : the parameter is not there or cannot be read.
        """

    def stored_type(self, name: str) -> str | None:  # noqa: ARG002
        """Return a type as the file's format calls it: `BF16`, `F16`, `F32`, `F64`, or one of GGUF's.

        None where there is no file.
        """
        return None

    def quantized_rows(self, name: str) -> QuantizedRows | None:  # noqa: ARG002
        """Return a parameter's rows as they are in the file; None where the file does not quantize it."""
        return None

    def remarks(self, plain: Iterable[str], dtype: np.dtype[Any]) -> Iterator[str]:  # noqa: ARG002
        """Yield how weights that a scheme quantizes are read, and how exactly.

        Parameters
        ----------
        plain : the parameters that become plain numbers.
        dtype : of these numbers.
        """
        return iter(())

    def _find(self, found: Mapping[str, Shape], source: str) -> dict[str, StoredRows]:
        """Return where the parameters are in a file's tensors, which must all be of use; see `find_rows`."""
        rows = find_rows(found, self._shapes, self.config)
        _check_parameters(self._shapes, shapes_of(rows, found), source)
        return rows


def loading_remarks(checkpoint: Checkpoint, names: Iterable[str], dtype: np.dtype[Any]) -> Iterator[str]:
    """Yield lines on weights that lose digits as they become plain numbers, and on what is left out.

    Parameters
    ----------
    names : the parameters that become plain numbers.
    dtype : of these numbers. Quantized types are float32 by their definition, so float32 holds them.
    """
    if checkpoint.left_out is not None:
        yield f"{checkpoint.left_out} is left out: onbeat serves text alone"
    names = list(names)
    yield from checkpoint.remarks(names, dtype)
    stored = {checkpoint.stored_type(name) for name in names}
    rounded = sorted(kind for kind in stored if kind is not None and kind != "BF16")
    if dtype == BFLOAT16 and rounded:
        yield (
            f"weights of type {', '.join(rounded)} become bfloat16 (8 significant bits, 2 bytes a "
            "number); --dtype float32 rounds nothing and takes twice the memory"
        )


def _check_parameters(expected: Mapping[str, Shape], found: Mapping[str, Shape], source: str) -> None:
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
