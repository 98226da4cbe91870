"""Quantized weights of safetensors files: which tensors are one weight, what they stand for, what holds them.

A weight is `(table[codes] - zeros) * scales`, whatever its scheme. A scheme is a function and an entry of
`_SCHEMES`; what it cannot say in a form of the native kernels becomes plain numbers.

References
----------
Lin et al. (2023), "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration".
Frantar et al. (2022), "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
Rouhani et al. (2023), "OCP Microscaling Formats (MX) Specification".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import MXFP4, dequantize
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError, NeedsVllm, quoted
from onbeat.engine.dtypes import FLOAT32, FLOAT64
from onbeat.engine.weights.parameters import Shape
from onbeat.files import read

Floats = NDArray[Any]
"""In float32."""
Bytes = NDArray[Any]
"""In uint8."""


class Settings(msgspec.Struct):
    """What tensors do not tell of themselves: `quantization_config` of a config.json."""

    quant_method: str = ""
    quant_algo: str = ""
    """ModelOpt's."""
    format: str = ""
    """Of compressed-tensors."""
    packing_format: str = ""
    """AutoRound's: whose layout it has taken."""
    version: str = "gemm"
    """AWQ's layout."""
    checkpoint_format: str = "gptq"
    """GPTQ's; `gptq_v2` has zeros as they are, the first version one less."""
    bits: int = 4
    desc_act: bool = False
    weight_block_size: tuple[int, int] | None = None
    config_groups: Mapping[str, Any] = {}
    transform_config: Mapping[str, Any] | None = None

    @property
    def usual_form(self) -> str | None:
        """What holds most of the weights, going by the settings alone; None where plain numbers do."""
        groups = (group for group in self.config_groups.values() if isinstance(group, Mapping))
        weights: Mapping[str, Any] = next((g["weights"] for g in groups if g.get("weights")), {})
        bits = weights.get("num_bits", self.bits)
        if "mxfp4" in self.quant_method + self.format:
            return "MXFP4"
        if "nvfp4" in (self.quant_algo + self.format).lower():
            return "E2M1_16"
        is_plain = "fp8" in (self.quant_method + self.quant_algo).lower() or weights.get("type") == "float"
        return None if is_plain else {4: "Q4_1", 8: "Q8_0"}.get(bits)

    @property
    def rounds_activations(self) -> bool:
        """Whether the model was made for activations of few bits, too."""
        groups = (group for group in self.config_groups.values() if isinstance(group, Mapping))
        return "fp8" in self.quant_method or any(group.get("input_activations") for group in groups)


class _Config(msgspec.Struct):
    quantization_config: Settings | None = None
    compression_config: Settings | None = None


_METHODS = ("fp8", "fbgemm_fp8", "awq", "gptq", "auto-round", "compressed-tensors", "mxfp4", "modelopt")


def read_settings(path: Path) -> Settings | None:
    """Return how a config.json says that weights are quantized; None where it does not.

    Raises
    ------
    NeedsVllm : by a method that is not read here.
    """
    config = read(_Config, path)
    settings = config.quantization_config or config.compression_config
    if settings is None:
        return None
    if settings.quant_method not in _METHODS:
        raise NeedsVllm(
            f"{path} has weights quantized by {quoted(settings.quant_method)}, which onbeat does not read; "
            f"it reads {', '.join(_METHODS)}, and GGUF files"
        )
    if (settings.transform_config or {}).get("config_groups") or settings.version not in ("gemm", "GEMM"):
        what = "rotates activations" if settings.transform_config else f"has AWQ's layout {settings.version}"
        raise NeedsVllm(f"{path} {what}, which onbeat does not read; serve a GGUF file of the model instead")
    return settings


class Stored(NamedTuple):
    """A tensor of a file."""

    values: NDArray[Any]
    """In the mapped file."""
    dtype: str
    """As the format calls it."""


class Codes(NamedTuple):
    """Rows of a weight; n rows, K inputs, G groups of inputs."""

    codes: Bytes
    """[n, K], or of 4 bits [n, K / 2], the first of two in the lower half."""
    table: Floats
    """What a code stands for: of 8 or 4 bits."""
    scales: Floats
    """[n, G]"""
    groups: NDArray[np.int64]
    """[K]: the group of an input."""
    zeros: Floats | None = None
    """[n, G]"""

    def plain(self, rows: slice, dtype: np.dtype[Any] = FLOAT32) -> NDArray[Any]:
        """Return some rows as numbers."""
        codes = self.codes[rows]
        if len(self.table) == 16:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        values = self.table.astype(dtype)[codes]
        if self.zeros is not None:
            values -= self.zeros[rows].astype(dtype)[:, self.groups]
        values *= self.scales[rows].astype(dtype)[:, self.groups]
        return values


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One weight of several tensors."""

    shape: Shape
    kind: str
    """For people."""
    form: str | None
    """What holds its codes: a type of GGUF's, or of the native engine's; None where nothing does."""
    read: Callable[[slice], Codes]
    """Of some rows, counted through all dimensions but the last."""

    def numbers(self, rows: slice, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return some rows as plain numbers."""
        codes = self.read(rows)
        values = np.empty((len(codes.codes), self.shape[-1]), dtype)
        step = max(1, _PIECE_NUMBERS // self.shape[-1])
        for first in range(0, len(values), step):
            values[first : first + step] = codes.plain(slice(first, first + step))
        return values

    def blocks(self, rows: slice) -> Bytes:
        """Return some rows in blocks of the form."""
        assert self.form is not None
        codes = self.read(rows)
        return _FORMS[self.form](codes).reshape(len(codes.codes), -1)

    def rounding(self, form: str | None, dtype: np.dtype[Any]) -> float:
        """Return the relative error of a form, or of plain numbers of a type: of the first rows."""
        rows = slice(0, _TRIED_ROWS)
        exact = self.read(rows).plain(slice(None), FLOAT64)
        held = exact.astype(dtype) if form is None else decoded(form, self.blocks(rows)).reshape(exact.shape)
        return float(np.linalg.norm(held.astype(FLOAT64) - exact) / max(float(np.linalg.norm(exact)), 1e-30))


_PIECE_NUMBERS = 1 << 20
_TRIED_ROWS = 64


# ---- Forms ----


def _heads(values: Floats, codes: Codes, size: int) -> Bytes:
    """Return what blocks begin with, in half precision: [n, K / size, 2]."""
    of_blocks = values[:, codes.groups[::size]].astype(np.float16)
    return of_blocks[..., None].view(np.uint8)


def _halves(pairs: Bytes, size: int) -> Bytes:
    """Return blocks of 4 bits whose input i is in a lower half, and i + size / 2 in the upper one."""
    parts = pairs.reshape(len(pairs), -1, 2, size // 4)
    first, second = parts[:, :, 0], parts[:, :, 1]
    return np.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], axis=-1).reshape(
        len(pairs), -1, size // 2
    )


def _q4_1(codes: Codes) -> Bytes:
    assert codes.zeros is not None
    heads = [_heads(each, codes, 32) for each in (codes.scales, -codes.zeros * codes.scales)]
    return np.concatenate([*heads, _halves(codes.codes, 32)], axis=-1)


def _q8_0(codes: Codes) -> Bytes:
    numbers = codes.codes.reshape(len(codes.codes), -1, 32)
    return np.concatenate([_heads(codes.scales, codes, 32), numbers], axis=-1)


def _mxfp4_blocks(codes: Codes) -> Bytes:
    exponents = (np.frexp(codes.scales)[1] + 126).astype(np.uint8)[..., None]
    return np.concatenate([exponents, _halves(codes.codes, 32)], axis=-1)


def _e2m1_16(codes: Codes) -> Bytes:
    return np.concatenate([_heads(codes.scales / 2, codes, 16), _halves(codes.codes, 16)], axis=-1)


_FORMS: Mapping[str, Callable[[Codes], Bytes]] = {
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4_blocks,
    "E2M1_16": _e2m1_16,
}
_BLOCK_INPUTS = {"E2M1_16": 16}


def decoded(form: str, blocks: Bytes) -> Floats:
    """Return what blocks stand for."""
    values: Floats
    if form != "E2M1_16":
        values = dequantize(blocks, GGMLQuantizationType[form])
        return values
    parts = blocks.reshape(-1, 10)
    codes = np.concatenate([parts[:, 2:] & 15, parts[:, 2:] >> 4], axis=-1)
    values = np.ascontiguousarray(parts[:, :2]).view(np.float16).astype(np.float32) * (2 * _E2M1)[codes]
    return values


def random_blocks(form: str, shape: tuple[int, int], seed: int) -> Bytes:
    """Return blocks of random numbers with the standard deviation `1 / sqrt(inputs)`."""
    size, deviation = _BLOCK_INPUTS.get(form, 32), shape[1] ** -0.5
    exponent, scale = 127 + round(math.log2(deviation / 2.93)), deviation / 4.61
    heads: Mapping[str, NDArray[Any]] = {
        "Q4_1": np.array([scale, -7.5 * scale], np.float16),
        "Q8_0": np.array([deviation / 73.9], np.float16),
        "MXFP4": np.array([exponent], np.uint8),
        "E2M1_16": np.array([deviation / 2.93 / 2], np.float16),
    }
    head = heads[form].view(np.uint8)
    num_bytes = len(head) + (size if form == "Q8_0" else size // 2)
    blocks = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // size, num_bytes), np.uint8)
    blocks[:, :, : len(head)] = head
    return blocks.reshape(shape[0], -1)


def _form(name: str, groups: NDArray[np.int64]) -> str | None:
    """Return a form, where the inputs of each of its blocks are in one group."""
    size = _BLOCK_INPUTS.get(name, 32)
    return name if len(groups) % size == 0 and (groups == groups[::size].repeat(size)).all() else None


# ---- Schemes ----

Parts = Mapping[str, Stored]
"""The tensors of a weight, by what their names end in."""
_WHOLE = np.arange(16, dtype=np.float32)
_SIGNED = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
_E2M1 = np.array(MXFP4.kvalues, np.float32) / 2
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of the columns in a word of eight."""


def _even(num_inputs: int, num_groups: int) -> NDArray[np.int64]:
    """Return the groups of inputs that are in them in their order."""
    return np.arange(num_inputs) // -(-num_inputs // num_groups)


def _unpacked(words: NDArray[Any], bits: int) -> Bytes:
    """Return the numbers in the words of a row."""
    found = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        found = np.stack([found & 15, found >> 4], axis=-1).reshape(len(found), -1)
    return found


def _whole(codes: Bytes, bits: int, scales: Floats, groups: NDArray[np.int64], zeros: NDArray[Any]) -> Codes:
    """Return whole numbers, in 8 bits as signed ones."""
    zeros = zeros.astype(np.float32)
    if bits == 4:
        return Codes(codes, _WHOLE, scales, groups, zeros)
    zeros -= 128
    return Codes(codes ^ 0x80, _SIGNED, scales, groups, zeros if zeros.any() else None)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise NeedsVllm(f"weights are quantized to {bits} bits, and onbeat reads 4 or 8")


def _gptq(parts: Parts, settings: Settings) -> QuantizedWeight:
    if "awq" in settings.quant_method + settings.packing_format:
        return _awq(parts)
    bits = settings.bits
    _check_bits(bits)
    words, zeros, scales = (parts[name].values for name in ("qweight", "qzeros", "scales"))
    num_inputs, num_outputs = len(words) * 32 // bits, words.shape[1]
    groups = _even(num_inputs, len(scales))
    if settings.desc_act and "g_idx" in parts:
        groups = parts["g_idx"].values.astype(np.int64)

    own_zeros = _unpacked(zeros, bits).T.astype(np.int16)
    if settings.checkpoint_format != "gptq_v2":
        own_zeros += 1

    def read_rows(rows: slice) -> Codes:
        codes = np.ascontiguousarray(words[:, rows].T).view(np.uint8)
        return _whole(codes, bits, scales[:, rows].T.astype(np.float32), groups, own_zeros[rows])

    has_zeros = bool((own_zeros != 1 << bits - 1).any())
    return _of_whole("GPTQ", bits, (num_outputs, num_inputs), groups, read_rows, has_zeros=has_zeros)


def _of_whole(
    name: str,
    bits: int,
    shape: Shape,
    groups: NDArray[np.int64],
    read_rows: Callable[[slice], Codes],
    *,
    has_zeros: bool,
) -> QuantizedWeight:
    form = None if bits == 8 and has_zeros else _form("Q4_1" if bits == 4 else "Q8_0", groups)
    return QuantizedWeight(shape, f"{name} ({bits} bits)", form, read_rows)


def _awq(parts: Parts) -> QuantizedWeight:
    words, zeros, scales = (parts[name].values for name in ("qweight", "qzeros", "scales"))
    num_inputs, num_outputs = len(words), words.shape[1] * 8
    groups = _even(num_inputs, len(scales))

    def columns(packed: NDArray[Any], rows: slice) -> Bytes:
        first = rows.start // 8
        eights = _unpacked(packed[:, first : -(-rows.stop // 8)], 4).reshape(len(packed), -1, 8)
        ordered = eights[..., list(_AWQ_PLACES)].reshape(len(packed), -1)
        return ordered[:, rows.start - 8 * first : rows.stop - 8 * first].T

    def read_rows(rows: slice) -> Codes:
        codes = columns(words, rows)
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        return _whole(pairs, 4, scales[:, rows].T.astype(np.float32), groups, columns(zeros, rows))

    return _of_whole("AWQ", 4, (num_outputs, num_inputs), groups, read_rows, has_zeros=True)


def _scales(parts: Parts, num_outputs: int, name: str = "weight_scale") -> Floats:
    """Return scales of [N, G] as floats, or those of [N / block, G]."""
    scales = parts[name].values
    if scales.ndim < 2:
        scales = np.broadcast_to(scales.reshape(-1, 1), (num_outputs, 1))
    return scales.astype(np.float32)


def _packed(parts: Parts, settings: Settings) -> QuantizedWeight:
    words, shape = parts["weight_packed"].values, tuple(map(int, parts["weight_shape"].values))
    bits = 32 * words.shape[1] // shape[1]
    _check_bits(bits)
    scales = _scales(parts, shape[0])
    groups = _even(shape[1], scales.shape[1])
    if "weight_g_idx" in parts:
        groups = parts["weight_g_idx"].values.astype(np.int64)

    def read_rows(rows: slice) -> Codes:
        codes = np.ascontiguousarray(words[rows]).view(np.uint8)
        zeros = np.full_like(scales[rows], 1 << bits - 1)
        if "weight_zero_point" in parts:
            zeros = _unpacked(parts["weight_zero_point"].values.T, bits)[:, rows].T
        return _whole(codes, bits, scales[rows], groups, zeros)

    has_zeros = "weight_zero_point" in parts
    return _of_whole(settings.quant_method, bits, shape, groups, read_rows, has_zeros=has_zeros)


def _int8(parts: Parts, _: Settings) -> QuantizedWeight:
    weight = parts["weight"].values
    scales = _scales(parts, len(weight))
    groups = _even(weight.shape[1], scales.shape[1])
    zeros = _scales(parts, len(weight), "weight_zero_point") if "weight_zero_point" in parts else None

    def read_rows(rows: slice) -> Codes:
        own = None if zeros is None else zeros[rows]
        return Codes(weight[rows].view(np.uint8), _SIGNED, scales[rows], groups, own)

    return QuantizedWeight(
        weight.shape, "int8", None if zeros is not None else _form("Q8_0", groups), read_rows
    )


def _fp8(parts: Parts, settings: Settings) -> QuantizedWeight:
    weight = parts["weight"].values
    scales = _scales(
        parts, len(weight), "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    )
    sizes = settings.weight_block_size or (128, 128)
    are_blocks = tuple(scales.shape) == tuple(
        -(-size // block) for size, block in zip(weight.shape, sizes, strict=True)
    )
    height, width = (
        sizes if are_blocks else (len(weight) // len(scales), -(-weight.shape[1] // scales.shape[1]))
    )

    def read_rows(rows: slice) -> Codes:
        own = scales[np.arange(*rows.indices(len(weight))) // height]
        return Codes(weight[rows].view(np.uint8), _E4M3, own, np.arange(weight.shape[1]) // width)

    return QuantizedWeight(weight.shape, "fp8", None, read_rows)


def _fp4(parts: Parts, _: Settings) -> QuantizedWeight:
    """NVFP4, with a scale of e4m3 for 16 and one for all, or MXFP4, with a power of two for 32."""
    pairs = parts["weight_packed" if "weight_packed" in parts else "weight"].values
    shape = (len(pairs), 2 * pairs.shape[1])
    groups = _even(shape[1], parts["weight_scale"].values.shape[1])
    if parts["weight_scale"].dtype in ("U8", "F8_E8M0"):
        return _of_powers(pairs, parts["weight_scale"].values, shape)
    over: Floats = np.ones((), np.float32)
    if "weight_scale_2" in parts:
        over = parts["weight_scale_2"].values.astype(np.float32).reshape(())
    elif "weight_global_scale" in parts:
        over = 1 / parts["weight_global_scale"].values.astype(np.float32).reshape(())

    def read_rows(rows: slice) -> Codes:
        scales = parts["weight_scale"].values[rows].astype(np.float32) * over
        return Codes(pairs[rows], _E2M1, scales, groups)

    return QuantizedWeight(shape, "NVFP4", _form("E2M1_16", groups), read_rows)


def _mxfp4(parts: Parts, _: Settings) -> QuantizedWeight:
    """Those of all experts together, as gpt-oss has them."""
    blocks = parts["blocks"].values
    shape = (*blocks.shape[:-2], 32 * blocks.shape[-2])
    return _of_powers(blocks.reshape(-1, shape[-1] // 2), parts["scales"].values, shape)


def _of_powers(pairs: Bytes, exponents: NDArray[Any], shape: Shape) -> QuantizedWeight:
    flat = exponents.view(np.uint8).reshape(len(pairs), -1)
    groups = _even(shape[-1], flat.shape[1])

    def read_rows(rows: slice) -> Codes:
        scales = np.ldexp(np.float32(1), flat[rows].astype(np.int32) - 127)
        return Codes(pairs[rows], _E2M1, scales, groups)

    return QuantizedWeight(shape, "MXFP4", _form("MXFP4", groups), read_rows)


_SCHEMES: Mapping[tuple[str, str], Callable[[Parts, Settings], QuantizedWeight]] = {
    ("qweight", "I32"): _gptq,
    ("weight_packed", "I32"): _packed,
    ("weight_packed", "U8"): _fp4,
    ("blocks", "U8"): _mxfp4,
    ("weight", "U8"): _fp4,
    ("weight", "I8"): _int8,
    ("weight", "F8_E4M3"): _fp8,
}
"""By the tensor that has the codes, and its type."""
_PART = re.compile(
    r"(.+?)(?:\.(qweight|qzeros|g_idx|weight(?:_packed|_scale(?:_inv|_2)?|_global_scale|_shape|"
    r"_zero_point|_g_idx)?)|[._](blocks|scales))"
)
_OF_ACTIVATIONS = re.compile(
    r".*\.(?:input|output|activation|[qkv])_(?:scale|zero_point|global_scale|scale_inv|scale_ub)"
)
"""Tensors for what onbeat does not do: round activations and the KV cache."""


def gather(stored: dict[str, Stored], settings: Settings) -> dict[str, QuantizedWeight]:
    """Take the quantized weights out of a file's tensors, and return them by their names.

    Raises
    ------
    ModelLoadError : a tensor of a weight is missing.
    """
    found: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        if match := _PART.fullmatch(name):
            found.setdefault(match[1], {})[match[2] or match[3]] = tensor
    weights = {}
    for stem, parts in found.items():
        scheme = next(
            (_SCHEMES[name, part.dtype] for name, part in parts.items() if (name, part.dtype) in _SCHEMES),
            None,
        )
        if scheme is None or len(parts) == 1:
            continue
        try:
            weights[f"{stem}.weight"] = scheme(parts, settings)
        except KeyError as missing:
            raise ModelLoadError(
                f"{stem} has {', '.join(sorted(parts))}, but lacks {missing}; fetch the model again"
            ) from missing
        for part in parts:
            stored.pop(f"{stem}.{part}", None) or stored.pop(f"{stem}_{part}")
    for name in [name for name in stored if weights and _OF_ACTIVATIONS.fullmatch(name)]:
        del stored[name]
    return weights
