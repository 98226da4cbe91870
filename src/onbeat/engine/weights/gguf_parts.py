"""The parts of a GGUF file that was split, read as one and held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onbeat.core.errors import ModelLoadError
from onbeat.engine.weights.gguf_reader import TensorReader
from onbeat.hub.gguf_files import parts_of


def read_parts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata of a GGUF file's first part, and the tensors of all parts by name.

    Parameters
    ----------
    path : the file, or any part of it.

    Raises
    ------
    ModelLoadError : a part is missing, damaged, or of another file.
    """
    readers = [TensorReader(path.with_name(name)) for name in parts_of(path.name)]
    tensors: dict[str, Any] = {}
    for index, reader in enumerate(readers):
        _check_part(reader, index, len(readers))
        for tensor in reader.tensors:
            if tensor.name in tensors:
                raise ModelLoadError(
                    f"{reader.path} has the tensor {tensor.name}, which a part before it has too: these are "
                    "parts of different models; fetch them again"
                )
            tensors[tensor.name] = tensor
    for reader in readers:
        expected = reader.metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise ModelLoadError(
                f"{reader.path} is of a model of {expected} tensors, but its {len(readers)} parts have "
                f"{len(tensors)}: these are parts of different models; fetch them again"
            )
    return readers[0].metadata, tensors


def _check_part(reader: TensorReader, index: int, count: int) -> None:
    """Check that a file is the part that its name says; parts are counted from 0 inside, from 1 in names."""
    said_count = reader.metadata.get("split.count", 1)
    said_index = reader.metadata.get("split.no", 0)
    if count == 1 and said_count > 1:
        raise ModelLoadError(
            f"{reader.path} is part {said_index + 1} of {said_count}, but its name does not say so; name the "
            f"parts NAME-{said_index + 1:05}-of-{said_count:05}.gguf, or merge them (llama.cpp: "
            "llama-gguf-split --merge)"
        )
    if (said_index, said_count) != (index, count) and count > 1:
        raise ModelLoadError(
            f"{reader.path} says that it is part {said_index + 1} of {said_count}, not {index + 1} of "
            f"{count} as its name does; fetch the file again"
        )
