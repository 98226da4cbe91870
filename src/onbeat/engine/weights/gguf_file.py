"""Weights of a GGUF file as the Hugging Face checkpoint would have them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config import ModelConfig, model_config_from_gguf
from onbeat.engine.weights.checkpoint import QuantizedRows, check_parameters
from onbeat.engine.weights.dequantize import PLAIN_TYPES, dequantize_rows
from onbeat.engine.weights.gguf_names import ROPE_FACTORS, hf_name, stored_offset, unpermute_rows
from onbeat.engine.weights.gguf_reader import TensorReader
from onbeat.engine.weights.parameters import parameter_shapes


class GgufCheckpoint:
    """Memory-mapped weights of one file, dequantized when they are read.

    Parameters
    ----------
    path : the file.

    Raises
    ------
    ModelLoadError : the file is missing or damaged, its architecture or a tensor's type is not supported, or
        a tensor is missing or of the wrong shape.
    """

    def __init__(self, path: Path) -> None:
        reader = TensorReader(path)
        _refuse_split(reader.metadata, path)
        by_gguf_name = {tensor.name: tensor for tensor in reader.tensors}
        self._config = _read_config(reader.metadata, by_gguf_name)
        self._shapes = parameter_shapes(self._config)
        self._tensors = {
            hf_name(name, self._config): tensor
            for name, tensor in by_gguf_name.items()
            if name != ROPE_FACTORS
        }
        found = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        check_parameters(self._shapes, found, f"the GGUF file {path}")

    @property
    def config(self) -> ModelConfig:
        """The model that the weights are of."""
        return self._config

    def names(self) -> Iterable[str]:
        """Return the parameters' names."""
        return self._shapes.keys()

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter; see `Checkpoint.get`."""
        tensor = self._tensor(name)
        shape, minus = self._shapes[name], stored_offset(name, self._config)
        values = dequantize_rows(tensor.data, shape, tensor.tensor_type, dtype, minus=minus)
        return unpermute_rows(name, values, self._config)

    def quantized_rows(self, name: str) -> QuantizedRows | None:
        """Return a matrix as it is in the file; see `QuantizedSource.quantized_rows`."""
        tensor, shape = self._tensor(name), self._shapes[name]
        if tensor.tensor_type in PLAIN_TYPES or len(shape) != 2:
            return None
        from_rows = unpermute_rows(name, torch.arange(shape[0]), self._config).numpy()
        return QuantizedRows(tensor.tensor_type.name, tensor.data, np.argsort(from_rows))

    def _tensor(self, name: str) -> Any:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"the {self._config.architecture} model has no parameter {name!r}")
        return tensor


def _refuse_split(metadata: dict[str, Any], path: Path) -> None:
    count = metadata.get("split.count", 0)
    if count > 1:
        raise ModelLoadError(
            f"{path} is one of {count} parts of a model; merge them first "
            "(llama.cpp: llama-gguf-split --merge)"
        )


def _read_config(metadata: dict[str, Any], tensors: dict[str, Any]) -> ModelConfig:
    vocab_key = f"{metadata.get('general.architecture')}.vocab_size"
    if "token_embd.weight" in tensors:
        # The embedding's rows count: many files leave the key out.
        metadata = {vocab_key: _shape(tensors["token_embd.weight"])[0], **metadata}
    factors = tensors.get(ROPE_FACTORS)
    return model_config_from_gguf(
        metadata,
        tensor_names=tensors.keys(),
        rope_frequency_factors=None if factors is None else tuple(_factors(factors)),
    )


def _factors(tensor: Any) -> list[float]:
    values: list[float] = dequantize_rows(
        tensor.data, _shape(tensor), tensor.tensor_type, torch.float32
    ).tolist()
    return values


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape, rows first (GGUF counts from the innermost)."""
    return tuple(int(size) for size in reversed(tensor.shape))
