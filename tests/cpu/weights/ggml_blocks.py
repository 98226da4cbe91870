"""GGUF's quantized blocks decoded one number at a time, written from the ggml format's definition.

Slow on purpose: no arrays, no code in common with the reader under test.
"""

from __future__ import annotations

import struct
from collections.abc import Callable


def _half(data: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", data, offset)[0])


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _nibbles(data: bytes, offset: int) -> list[int]:
    """Return 32 numbers of 4 bits: first the low halves of 16 bytes, then the high ones."""
    return [b & 15 for b in data[offset : offset + 16]] + [b >> 4 for b in data[offset : offset + 16]]


def _fifth_bits(data: bytes, offset: int) -> list[int]:
    bits = int.from_bytes(data[offset : offset + 4], "little")
    return [bits >> i & 1 for i in range(32)]


def f32(data: bytes) -> list[float]:
    return [struct.unpack("<f", data)[0]]


def f16(data: bytes) -> list[float]:
    return [_half(data, 0)]


def bf16(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data)[0]]


def q8_0(data: bytes) -> list[float]:
    return [_half(data, 0) * _signed(byte) for byte in data[2:34]]


def q4_0(data: bytes) -> list[float]:
    return [_half(data, 0) * (q - 8) for q in _nibbles(data, 2)]


def q4_1(data: bytes) -> list[float]:
    return [_half(data, 0) * q + _half(data, 2) for q in _nibbles(data, 4)]


def q5_0(data: bytes) -> list[float]:
    return [
        _half(data, 0) * (q + 16 * h - 16)
        for q, h in zip(_nibbles(data, 6), _fifth_bits(data, 2), strict=True)
    ]


def q5_1(data: bytes) -> list[float]:
    d, m = _half(data, 0), _half(data, 2)
    return [d * (q + 16 * h) + m for q, h in zip(_nibbles(data, 8), _fifth_bits(data, 4), strict=True)]


def _scale_and_min(packed: bytes, j: int) -> tuple[int, int]:
    """Return the 6-bit scale and minimum of sub-block j of 8, packed into 12 bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
    return scale, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4


def q2_k(data: bytes) -> list[float]:
    scales, quants, d, dmin = data[:16], data[16:80], _half(data, 80), _half(data, 82)
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        shift, lane = divmod(within, 32)
        scale = scales[i // 16]
        values.append(d * (scale & 15) * (quants[part * 32 + lane] >> 2 * shift & 3) - dmin * (scale >> 4))
    return values


def q3_k(data: bytes) -> list[float]:
    high, quants, packed, d = data[:32], data[32:96], data[96:108], _half(data, 108)
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        shift, lane = divmod(within, 32)
        q = (quants[part * 32 + lane] >> 2 * shift & 3) - (0 if high[lane] >> (i // 32) & 1 else 4)
        j = i // 16
        scale = (packed[j % 8] >> (4 if j > 7 else 0) & 15) + 16 * (packed[8 + j % 4] >> 2 * (j // 4) & 3)
        values.append(d * (scale - 32) * q)
    return values


_UNEVEN = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def iq4_nl(data: bytes) -> list[float]:
    return [_half(data, 0) * _UNEVEN[q] for q in _nibbles(data, 2)]


def iq4_xs(data: bytes) -> list[float]:
    d, high, low, quants = _half(data, 0), int.from_bytes(data[2:4], "little"), data[4:8], data[8:]
    values = []
    for j in range(8):
        scale = (low[j // 2] >> (4 * (j % 2)) & 15) + 16 * (high >> 2 * j & 3)
        values += [d * (scale - 32) * _UNEVEN[q] for q in _nibbles(quants, 16 * j)]
    return values


def q4_k(data: bytes) -> list[float]:
    d, dmin, packed, quants = _half(data, 0), _half(data, 2), data[4:16], data[16:144]
    values = []
    for j in range(8):
        scale, minimum = _scale_and_min(packed, j)
        for byte in quants[j // 2 * 32 : j // 2 * 32 + 32]:
            values.append(d * scale * (byte >> 4 if j % 2 else byte & 15) - dmin * minimum)
    return values


def q5_k(data: bytes) -> list[float]:
    d, dmin, packed, high, quants = _half(data, 0), _half(data, 2), data[4:16], data[16:48], data[48:176]
    values = []
    for j in range(8):
        scale, minimum = _scale_and_min(packed, j)
        for i, byte in enumerate(quants[j // 2 * 32 : j // 2 * 32 + 32]):
            q = (byte >> 4 if j % 2 else byte & 15) + 16 * (high[i] >> j & 1)
            values.append(d * scale * q - dmin * minimum)
    return values


def q6_k(data: bytes) -> list[float]:
    low, high, scales, d = data[:128], data[128:192], data[192:208], _half(data, 208)
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        group, lane = divmod(within, 32)
        nibble = low[part * 64 + lane + 32 * (group % 2)] >> (4 if group >= 2 else 0) & 15
        q = nibble | (high[part * 32 + lane] >> 2 * group & 3) << 4
        values.append(d * _signed(scales[i // 16]) * (q - 32))
    return values


def mxfp4(data: bytes) -> list[float]:
    """Sign, two bits of exponent (biased by 1), one of mantissa; the block's scale is a power of two."""
    values = []
    for q in _nibbles(data, 1):
        exponent, mantissa = q >> 1 & 3, q & 1
        size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        values.append((-size if q & 8 else size) * 2.0 ** (data[0] - 127))
    return values


DECODERS: dict[str, tuple[int, int, Callable[[bytes], list[float]], tuple[int, ...]]] = {
    "F32": (1, 4, f32, ()),
    "F16": (1, 2, f16, (0,)),
    "BF16": (1, 2, bf16, ()),
    "Q8_0": (32, 34, q8_0, (0,)),
    "Q4_0": (32, 18, q4_0, (0,)),
    "Q4_1": (32, 20, q4_1, (0, 2)),
    "Q5_0": (32, 22, q5_0, (0,)),
    "Q5_1": (32, 24, q5_1, (0, 2)),
    "Q2_K": (256, 84, q2_k, (80, 82)),
    "Q3_K": (256, 110, q3_k, (108,)),
    "Q4_K": (256, 144, q4_k, (0, 2)),
    "Q5_K": (256, 176, q5_k, (0, 2)),
    "Q6_K": (256, 210, q6_k, (208,)),
    "IQ4_NL": (32, 18, iq4_nl, (0,)),
    "IQ4_XS": (256, 136, iq4_xs, (0,)),
    "MXFP4": (32, 17, mxfp4, ()),
}
"""Type name to numbers in a block, bytes in a block, decoder, and where half-precision numbers stand."""
