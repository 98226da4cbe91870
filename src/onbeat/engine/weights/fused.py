"""Parameters that a file keeps in one tensor: projections below one another, all experts of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config import ModelConfig

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Shape = tuple[int, ...]


class StoredRows(NamedTuple):
    """Where a parameter is: rows of a tensor, counted through all its dimensions but the last."""

    tensor: str
    first: int
    end: int


def find_rows(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], config: ModelConfig
) -> dict[str, StoredRows]:
    """Return where each parameter of a file is; tensors that the model does not have stand for themselves.

    Parameters
    ----------
    found : the file's tensors, under names like the parameters'.
    expected : the model's parameters.

    Raises
    ------
    ModelLoadError : a tensor is not as long as its parts are together.
    """
    rows = {}
    for tensor, shape in found.items():
        num_rows, first = _num_rows(shape), 0
        parts = [tensor] if tensor in expected else list(_parts(tensor, config))
        if any(part not in expected for part in parts):
            parts = []
        for part in parts:
            end = first + _num_rows(expected[part])
            rows[part] = StoredRows(tensor, first, end if len(parts) > 1 else num_rows)
            first = end
        if len(parts) > 1 and (first != num_rows or shape[-1] != expected[parts[0]][-1]):
            raise ModelLoadError(
                f"tensor {tensor} has shape {list(shape)}; the configuration asks for "
                f"{[first, expected[parts[0]][-1]]}"
            )
        if not parts:
            rows[tensor] = StoredRows(tensor, 0, num_rows)
    return rows


def shapes_of(rows: Mapping[str, StoredRows], found: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of what `find_rows` found."""
    shapes = {}
    for name, (tensor, first, end) in rows.items():
        is_whole = end - first == _num_rows(found[tensor])
        shapes[name] = found[tensor] if is_whole else (end - first, found[tensor][-1])
    return shapes


def _parts(tensor: str, config: ModelConfig) -> Iterator[str]:
    """Yield the parameters that a tensor of several would hold, in their order."""
    stem = tensor.removesuffix(".weight")
    prefix, _, module = stem.rpartition(".")
    parts = _PARTS.get(module, (module,))
    has_all_experts = prefix.endswith(".experts")
    prefixes = [prefix]
    if has_all_experts:
        num_experts = 0 if config.experts is None else config.experts.num_experts
        prefixes = [f"{prefix}.{index}" for index in range(num_experts)]
    for each in prefixes:
        for part in parts:
            yield f"{each}.{part}.weight"


def _num_rows(shape: Shape) -> int:
    return math.prod(shape[:-1])
