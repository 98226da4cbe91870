"""Weights of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import BFLOAT16, FLOAT32, FLOAT64
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.model_config.families import FAMILIES
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.hub.files import WEIGHT_INDEX, indexed_files

_PREFIX = "model."
"""Of all parameters but the head's. Files of a model that was saved without its head lack it, as those of
embedding models do."""
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
_FLOAT_TYPES = {"F64": FLOAT64, "F32": FLOAT32, "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old versions of transformers saved although the configuration gives them."""
_TEXT_PART = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
"""Before a name of the text part of a multimodal checkpoint, whichever version of transformers saved it."""
_VISION_PART = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")


class _Stored(NamedTuple):
    """A tensor of a file."""

    values: NDArray[Any]
    """In the mapped file."""
    dtype: str
    """As the format calls it."""


class SafetensorsCheckpoint(Checkpoint):
    """Memory-mapped weights of a directory.

    Parameters
    ----------
    directory : holds `model.safetensors`, or shards and `model.safetensors.index.json`.
    config : what the weights must fit.

    Raises
    ------
    ModelLoadError : a file is missing or damaged, a tensor is missing or of the wrong shape or type, or the
        weights are pickled.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._family = FAMILIES[config.architecture]
        self._stored: dict[str, _Stored] = {}
        self._num_left_out = 0
        shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(directory):
            shapes |= self._open(path)
        if shapes and not any(name.startswith(_PREFIX) for name in shapes) and "lm_head.weight" not in shapes:
            shapes = {_PREFIX + name: shape for name, shape in shapes.items()}
            self._stored = {_PREFIX + name: stored for name, stored in self._stored.items()}
            config = replace(config, tie_word_embeddings=True, has_head=False)
        super().__init__(config)
        self._rows = self._find(self._used(shapes), f"the checkpoint {directory}")
        if self._num_left_out:
            self.left_out = f"its vision part ({self._num_left_out} tensors)"

    def get(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a parameter; see `Checkpoint.get`."""
        self.shape_of(name)
        tensor_name, first, end = self._rows[name]
        values = self._stored[tensor_name].values
        if tensor_name != name:
            values = values.reshape(-1, values.shape[-1])[first:end]
        return values.astype(dtype, copy=False)

    def stored_type(self, name: str) -> str:
        """Return a parameter's type in its file; see `Checkpoint.stored_type`."""
        return self._stored[self._rows[name].tensor].dtype

    def _open(self, path: Path) -> dict[str, tuple[int, ...]]:
        try:
            with safe_open(
                path, framework="numpy"
            ):  # which checks sizes and places; it would copy what it reads
                data = np.memmap(path, np.uint8, "c").view(np.ndarray)
        except FileNotFoundError:
            raise ModelLoadError(f"the weight file {path} is missing; fetch the model again") from None
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"the weight file {path} is cut short or damaged ({error}); fetch the model again"
            ) from error
        shapes = {}
        start = 8 + int(data[:8].view("<u8")[0])
        for stored_name, about in json.loads(data[8:start].tobytes()).items():
            if stored_name == "__metadata__":
                continue
            if self._family.multimodal and _VISION_PART.match(stored_name):
                self._num_left_out += 1
                continue
            if about["dtype"] not in _FLOAT_TYPES:
                raise ModelLoadError(
                    f"{path}: tensor {stored_name} is of type {about['dtype']}, which is not supported; "
                    f"supported: {', '.join(sorted(_FLOAT_TYPES))}"
                )
            name, (first, end) = self._own_name(stored_name), about["data_offsets"]
            shapes[name] = tuple(about["shape"])
            values = data[start + first : start + end].view(_FLOAT_TYPES[about["dtype"]])
            self._stored[name] = _Stored(values.reshape(shapes[name]), about["dtype"])
        return shapes

    def _own_name(self, stored_name: str) -> str:
        """Return what a tensor is called here, where its family's files have other names."""
        for theirs, ours in self._family.hf_names:
            stored_name = stored_name.replace(theirs, ours)
        prefix = _TEXT_PART.match(stored_name) if self._family.multimodal else None
        if prefix is None:
            return stored_name
        name = stored_name[prefix.end() :]
        return name if name == "lm_head.weight" else f"model.{name}"

    def _used(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        unused = {name for name in shapes if _DERIVED.search(name)}
        if self.config.tie_word_embeddings:
            unused.add("lm_head.weight")  # a copy of the embedding
        return {name: shape for name, shape in shapes.items() if name not in unused}


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that make up a directory's weights.

    Raises
    ------
    ModelLoadError : there are none, or only pickled ones.
    """
    if (directory / WEIGHT_INDEX).exists():
        return [directory / name for name in indexed_files(directory / WEIGHT_INDEX)]
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelLoadError(
            f"{directory} has {len(found)} safetensors files but no {WEIGHT_INDEX} to say what is in them"
        )
    pickles = [path.name for pattern in _PICKLES for path in sorted(directory.glob(pattern))]
    if pickles:
        raise ModelLoadError(
            f"{directory} has pickled weights only ({pickles[0]}). Unpickling can run any code, so "
            "onbeat refuses; convert them to safetensors (transformers: load the model, then save_pretrained)"
        )
    raise ModelLoadError(f"{directory} has no weights: neither {_SINGLE} nor {WEIGHT_INDEX}")
