"""Open what the hub found: the one entry to the kinds of checkpoints.

Weights of a GGUF file as the Hugging Face checkpoint would have them.

Weights of a Hugging Face directory: one safetensors file, or shards with an index.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from onbeat.core.errors import ModelLoadError, NeedsVllm
from onbeat.engine.dtypes import BFLOAT16, FLOAT32, FLOAT64
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families import FAMILIES
from onbeat.engine.model_config.gguf import RopeFactors, model_config_from_gguf
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.model_config.values import Values
from onbeat.engine.pooling import hf_pooling
from onbeat.engine.weights.checkpoint import ALL_ROWS, Checkpoint, QuantizedRows
from onbeat.engine.weights.gguf_names import hf_names, stored_offset, unpermute_rows
from onbeat.engine.weights.quantized import Settings, Stored, gather, read_settings
from onbeat.files import read
from onbeat.hub.files import WEIGHT_INDEX, ModelFiles, indexed_files
from onbeat.hub.gguf_files import parts_of
from onbeat.text.gguf_header import GgufTensor, Metadata, read_gguf_header

_PREFIX = "model."
"""Of all parameters but the head's. Files of a model that was saved without its head lack it, as those of
embedding models do."""
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
_FLOAT_TYPES = {"F64": FLOAT64, "F32": FLOAT32, "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_TYPES: Mapping[str, np.dtype[Any]] = {
    **_FLOAT_TYPES,
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Those of parts of quantized weights, too."""
_UNUSED = re.compile(r"\.rotary_emb\.inv_freq$|^mtp\.")
"""Tensors that old versions of transformers saved although the configuration gives them, and layers that
guess further tokens (MTP), which nothing here runs."""
_TEXT_PART = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
"""Before a name of the text part of a multimodal checkpoint, whichever version of transformers saved it."""
_VISION_PART = re.compile(
    r"(?:model\.)?(?:vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual)\."
)


class SafetensorsCheckpoint(Checkpoint):
    """Memory-mapped weights of a directory.

    Parameters
    ----------
    directory : holds `model.safetensors`, or shards and `model.safetensors.index.json`.
    config : what the weights must fit.
    settings : how they are quantized; None where the configuration does not say so.

    Raises
    ------
    ModelLoadError : a file is missing or damaged, a tensor is missing or of the wrong shape or type, or the
        weights are pickled.
    """

    def __init__(self, directory: Path, config: ModelConfig, settings: Settings | None = None) -> None:
        self._family = FAMILIES[config.architecture]
        self._stored: dict[str, Stored] = {}
        self._left_out: Counter[str] = Counter()
        for path in weight_files(directory):
            self._open(path)
        self._quantized = gather(self._stored, settings or Settings())
        self._rounds_activations = settings is not None and settings.rounds_activations
        self.scheme = next((weight.kind for weight in self._quantized.values()), None)
        for name, tensor in self._stored.items():
            if tensor.dtype not in _FLOAT_TYPES:
                raise _unsupported(directory, name, tensor.dtype)
        shapes = {name: tuple(tensor.values.shape) for name, tensor in self._stored.items()}
        shapes |= {name: weight.shape for name, weight in self._quantized.items()}
        if shapes and not any(name.startswith(_PREFIX) for name in shapes) and "lm_head.weight" not in shapes:
            shapes = {_PREFIX + name: shape for name, shape in shapes.items()}
            self._stored = {_PREFIX + name: stored for name, stored in self._stored.items()}
            self._quantized = {_PREFIX + name: weight for name, weight in self._quantized.items()}
            config = replace(config, tie_word_embeddings=True, has_head=False)
        super().__init__(config)
        self._rows = self._find(self._used(shapes), f"the checkpoint {directory}")
        if self._left_out:
            kinds, number = " and ".join(sorted(self._left_out)), self._left_out.total()
            self.left_out = f"its {kinds} part ({number} tensors)"

    def get(self, name: str, dtype: np.dtype[Any], rows: slice = ALL_ROWS) -> NDArray[Any]:
        """Return a parameter; see `Checkpoint.get`."""
        self.shape_of(name)
        tensor_name, first, end = self._rows[name]
        if tensor_name in self._quantized:
            start, stop, _ = rows.indices(end - first)
            return self._quantized[tensor_name].numbers(slice(first + start, first + stop), dtype)
        values = self._stored[tensor_name].values
        if tensor_name != name:
            values = values.reshape(-1, values.shape[-1])[first:end]
        return values[rows].astype(dtype, copy=False)

    def stored_type(self, name: str) -> str | None:
        """Return a parameter's type in its file; see `Checkpoint.stored_type`."""
        tensor = self._rows[name].tensor
        return None if tensor in self._quantized else self._stored[tensor].dtype

    def quantized_rows(self, name: str) -> QuantizedRows | None:
        """Return a weight in the form that holds it; see `Checkpoint.quantized_rows`."""
        tensor, first, end = self._rows[name]
        weight = self._quantized.get(tensor)
        if weight is None or weight.form is None:
            return None

        def read(rows: slice) -> NDArray[np.uint8]:
            start, stop, _ = rows.indices(end - first)
            return weight.blocks(slice(first + start, first + stop))

        return QuantizedRows(weight.form, read, np.arange(end - first))

    def remarks(self, plain: Iterable[str], dtype: np.dtype[Any]) -> Iterator[str]:
        """Yield how quantized weights are read; see `Checkpoint.remarks`."""
        plain = {self._rows[name].tensor for name in plain}
        told: set[tuple[str, str | None]] = set()
        for name, weight in self._quantized.items():
            form = None if name in plain else weight.form
            if (weight.kind, form) in told:
                continue
            told.add((weight.kind, form))
            error = weight.rounding(form, dtype)
            exact = "exactly" if error < _NO_ERROR else f"rounded by {100 * error:.2g} % ({name})"
            held = f"become {dtype.name} numbers" if form is None else f"keep their bits (as {form})"
            yield f"weights in {weight.kind} {held}, {exact}"
        if self._quantized and self._rounds_activations:
            yield (
                "the model was made for activations of 8 bits or less; onbeat does not quantize them so: it "
                "leaves their scales out, and computes as --activation-quantization says"
            )

    def _open(self, path: Path) -> None:
        try:
            # Opened so for the check of sizes and places; it would copy what it reads.
            with safe_open(path, framework="numpy"):
                data = np.memmap(path, np.uint8, "c").view(np.ndarray)
        except FileNotFoundError:
            raise ModelLoadError(f"the weight file {path} is missing; fetch the model again") from None
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"the weight file {path} is cut short or damaged ({error}); fetch the model again"
            ) from error
        start = 8 + int(data[:8].view("<u8")[0])
        for stored_name, about in json.loads(data[8:start].tobytes()).items():
            if stored_name == "__metadata__":
                continue
            if self._family.multimodal and _VISION_PART.match(stored_name):
                self._left_out["audio" if "audio" in stored_name else "vision"] += 1
                continue
            if about["dtype"] not in _TYPES:
                raise _unsupported(path, stored_name, about["dtype"])
            first, end = about["data_offsets"]
            whole = data[start + first : start + end].view(_TYPES[about["dtype"]]).reshape(about["shape"])
            for name, part in self._family.own_tensors(self._text_name(stored_name), whole):
                self._stored[name] = Stored(part, about["dtype"])

    def _text_name(self, stored_name: str) -> str:
        """Return what a tensor of a multimodal model would be called in its text part alone."""
        prefix = _TEXT_PART.match(stored_name) if self._family.multimodal else None
        if prefix is None:
            return stored_name
        name = stored_name[prefix.end() :]
        return name if name == "lm_head.weight" else f"model.{name}"

    def _used(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        unused = {name for name in shapes if _UNUSED.search(name)}
        if self.config.tie_word_embeddings:
            unused.add("lm_head.weight")  # a copy of the embedding
        for index in self.config.sharing_layers:
            parts = ("k_proj", "v_proj", "k_norm")
            unused |= {f"model.layers.{index}.self_attn.{part}.weight" for part in parts}
        for weight in self._quantized:  # some quantizers write a bias where the model has none
            bias = f"{weight.removesuffix('weight')}bias"
            if bias in shapes and bias not in self._shapes and not self._stored[bias].values.any():
                unused.add(bias)
        return {name: shape for name, shape in shapes.items() if name not in unused}


_NO_ERROR = 1e-7
"""Of float32 numbers."""


def _unsupported(source: Path, name: str, dtype: str) -> NeedsVllm:
    return NeedsVllm(
        f"{source}: tensor {name} is of type {dtype}, which is not supported; supported: "
        f"{', '.join(sorted(_FLOAT_TYPES))}, and what schemes of quantization use (docs/models.md)"
    )


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


SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    )
)
PLAIN_TYPES = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
"""Those of them that quantize nothing."""
_PIECE_NUMBERS = 1 << 17
"""A piece and its intermediate results stay in the processor's cache."""


def dequantize_rows(
    rows: NDArray[Any],
    shape: tuple[int, ...],
    quantization: GGMLQuantizationType,
    dtype: np.dtype[Any],
    *,
    minus: float = 0.0,
) -> NDArray[Any]:
    """Return a tensor of a GGUF file as plain numbers.

    The arithmetic is in float32, whatever the result's type.

    Parameters
    ----------
    rows : the file's own data, `[rows, bytes of a row]` or one row.
    shape : of the result.
    quantization : one of `SUPPORTED_TYPES`.
    dtype : of the result.
    minus : is subtracted from every number, in float32.
    """
    rows = rows.reshape(-1, rows.shape[-1])
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


class _Tensor(NamedTuple):
    """A tensor of a mapped file."""

    shape: tuple[int, ...]
    """Rows first."""
    kind: GGMLQuantizationType
    rows: NDArray[np.uint8]
    """[rows, bytes of a row]"""


def _map_tensor(path: Path, tensor: GgufTensor, data: NDArray[np.uint8]) -> _Tensor:
    """Return a tensor once its type is one of ours and all of it is there."""
    name, shape, number, start = tensor
    if number not in SUPPORTED_TYPES:
        known = {kind.value: kind.name for kind in GGMLQuantizationType}
        raise ModelLoadError(
            f"{path}: tensor {name} is of GGUF type {known.get(number, f'number {number}')}, which is not "
            f"supported; supported: {', '.join(sorted(kind.name for kind in SUPPORTED_TYPES))}. Serve a "
            "file of such a type: `onbeat serve OWNER/NAME:Q4_K_M` takes that one of a repository"
        )
    kind = GGMLQuantizationType(number)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise ModelLoadError(
            f"{path}: tensor {name} has rows of {shape[-1]} numbers, which blocks of {block_size} "
            f"({kind.name}) do not divide; fetch the file again"
        )
    row_bytes = shape[-1] // block_size * block_bytes
    end = start + math.prod(shape[:-1]) * row_bytes
    if end > len(data):
        raise ModelLoadError(
            f"{path} is cut short: tensor {name} ends at byte {end}, the file at {len(data)}; fetch the file "
            "again"
        )
    return _Tensor(shape, kind, data[start:end].reshape(-1, row_bytes))


ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = frozenset({ROPE_FREQS, ROPE_SHORT, ROPE_LONG})
"""No parameters: frequency factors, which the configuration takes in."""


def _read_parts(path: Path) -> tuple[Metadata, dict[str, _Tensor]]:
    """Return the metadata of a GGUF file's first part, and the tensors of all parts by name.

    Raises
    ------
    ModelLoadError : a part is missing, damaged, or of another file.
    """
    paths = [path.with_name(name) for name in parts_of(path.name)]
    headers = [read_gguf_header(part) for part in paths]
    tensors: dict[str, _Tensor] = {}
    for index, (part, header) in enumerate(zip(paths, headers, strict=True)):
        _check_part(part, header.metadata, index, len(paths))
        # Slices of a memory map are memory maps too, and take longer to make.
        data = np.memmap(part, np.uint8, "r").view(np.ndarray)
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise ModelLoadError(
                    f"{part} has the tensor {tensor.name}, which a part before it has too: these are "
                    "parts of different models; fetch them again"
                )
            tensors[tensor.name] = _map_tensor(part, tensor, data)
    for part, header in zip(paths, headers, strict=True):
        expected = header.metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise ModelLoadError(
                f"{part} is of a model of {expected} tensors, but its {len(paths)} parts have "
                f"{len(tensors)}: these are parts of different models; fetch them again"
            )
    return headers[0].metadata, tensors


def _check_part(path: Path, metadata: Metadata, index: int, count: int) -> None:
    """Check that a file is the part that its name says; parts are counted from 0 inside, from 1 in names."""
    values = Values(metadata, source=str(path))
    said_index, said_count = values.count("split.no", 0), values.count("split.count", 1)
    if count == 1 and said_count > 1:
        raise ModelLoadError(
            f"{path} is part {said_index + 1} of {said_count}, but its name does not say so; name the "
            f"parts NAME-{said_index + 1:05}-of-{said_count:05}.gguf, or merge them (llama.cpp: "
            "llama-gguf-split --merge)"
        )
    if (said_index, said_count) != (index, count) and count > 1:
        raise ModelLoadError(
            f"{path} says that it is part {said_index + 1} of {said_count}, not {index + 1} of "
            f"{count} as its name does; fetch the file again"
        )


class GgufCheckpoint(Checkpoint):
    """Memory-mapped weights of one file or its parts, dequantized when they are read.

    Parameters
    ----------
    path : the file, or a part of it.
    served_len : see `model_config_from_gguf`.

    Raises
    ------
    ModelLoadError : the file is missing or damaged, its architecture or a tensor's type is not supported, or
        a tensor is missing or of the wrong shape.
    """

    def __init__(self, path: Path, served_len: int | None = None) -> None:
        metadata, by_gguf_name = _read_parts(path)
        super().__init__(_read_config(metadata, by_gguf_name, served_len))
        names = hf_names(self.config, self.names())
        values = Values(metadata, source=str(path), prefix=f"{metadata['general.architecture']}.")
        num_blocks = values.count("block_count", 0)
        unread = tuple(f"blk.{index}." for index in range(self.config.num_layers, num_blocks))
        for index in self.config.sharing_layers:
            unread += tuple(f"blk.{index}.attn_{part}." for part in ("k", "v", "k_norm"))
        self._tensors = {
            names.get(name, name): tensor
            for name, tensor in by_gguf_name.items()
            if name not in ROPE_TENSORS and not name.startswith(unread)
        }
        found = {name: tensor.shape for name, tensor in self._tensors.items()}
        for name, shape in self._shapes.items():  # files leave sizes of 1 out
            if name in found and found[name] == tuple(size for size in shape if size > 1):
                found[name] = shape
        self._rows = self._find(found, f"the GGUF file {path}")

    def get(self, name: str, dtype: np.dtype[Any], rows: slice = ALL_ROWS) -> NDArray[Any]:
        """Return a parameter; see `Checkpoint.get`."""
        data, kind = self._stored(name, rows)
        shape, minus = self.shape_of(name), stored_offset(name, self.config)
        if rows != ALL_ROWS:
            shape = len(data), *shape[1:]
        values = dequantize_rows(data, shape, kind, dtype, minus=minus)
        if name.endswith(".A_log"):  # files have what the decay's rate is
            values = np.log(-values)
        return unpermute_rows(name, values, self.config)

    def stored_type(self, name: str) -> str:
        """Return a parameter's GGUF type; see `Checkpoint.stored_type`."""
        return self._stored(name)[1].name

    def quantized_rows(self, name: str) -> QuantizedRows | None:
        """Return a matrix as it is in the file; see `Checkpoint.quantized_rows`."""
        (data, kind), shape = self._stored(name), self.shape_of(name)
        if kind in PLAIN_TYPES or len(shape) != 2:
            return None
        from_rows = unpermute_rows(name, np.arange(shape[0]), self.config)
        return QuantizedRows(kind.name, data.__getitem__, np.argsort(from_rows))

    def _stored(self, name: str, some: slice = ALL_ROWS) -> tuple[NDArray[np.uint8], GGMLQuantizationType]:
        """Return some of a parameter's rows as the file has them, and their type."""
        self.shape_of(name)
        rows = self._rows[name]
        tensor = self._tensors[rows.tensor]
        return tensor.rows[rows.first : rows.end][some], tensor.kind


def _read_config(metadata: Metadata, tensors: Mapping[str, _Tensor], served_len: int | None) -> ModelConfig:
    vocab_key = f"{metadata.get('general.architecture')}.vocab_size"
    if "token_embd.weight" in tensors:
        # The embedding's rows count: many files leave the key out.
        metadata = {vocab_key: tensors["token_embd.weight"].shape[0], **metadata}
    return model_config_from_gguf(
        metadata,
        tensor_names=tensors.keys(),
        rope_factors=RopeFactors(
            *(_factors(tensors.get(name)) for name in (ROPE_FREQS, ROPE_SHORT, ROPE_LONG))
        ),
        served_len=served_len,
    )


def _factors(tensor: _Tensor | None) -> tuple[float, ...]:
    if tensor is None:
        return ()
    return tuple(dequantize_rows(tensor.rows, tensor.shape, tensor.kind, FLOAT32).ravel().tolist())


_HINT = "; fetch the file again"


def open_checkpoint(files: ModelFiles, *, served_len: int | None = None) -> Checkpoint:
    """Open a model's weights and check that all are there in their right shapes; read none of them yet.

    Parameters
    ----------
    served_len : longest context that will be served, tokens; None: as long as the model allows.

    Raises
    ------
    ModelLoadError : naming the file and the tensor at fault.
    """
    if files.kind == "gguf":
        return GgufCheckpoint(files.path, served_len)
    settings = read_settings(files.path / "config.json")  # what it refuses, vLLM may run
    return SafetensorsCheckpoint(files.path, read_model_config(files, served_len=served_len), settings)


def usual_form(files: ModelFiles) -> str | None:
    """Return what holds most weights of a quantized directory, going by its configuration alone."""
    settings = None if files.kind == "gguf" else read_settings(files.path / "config.json")
    return None if settings is None else settings.usual_form


def read_model_config(files: ModelFiles, *, served_len: int | None = None) -> ModelConfig:
    """Read a model's configuration alone; its weights need not be there.

    Parameters
    ----------
    served_len : longest context that will be served, tokens; None: as long as the model allows.

    Raises
    ------
    ModelLoadError : the configuration is missing, damaged or not supported.
    """
    if files.kind == "gguf":
        return GgufCheckpoint(files.path, served_len).config
    generation = files.path / "generation_config.json"
    config = model_config_from_hf(
        read(dict[str, Any], files.path / "config.json", hint=_HINT),
        read(dict[str, Any], generation, hint=_HINT) if generation.exists() else None,
        served_len=served_len,
    )
    return replace(config, pooling=hf_pooling(files.path))
