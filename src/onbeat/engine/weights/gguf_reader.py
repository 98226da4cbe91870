"""The gguf package's reader, made quick to open and strict about truncated files."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

from onbeat.core.errors import ModelLoadError
from onbeat.engine.weights.dequantize import SUPPORTED_TYPES


class TensorReader(GGUFReader):
    """Reads scalars, short texts and tensors; steps over arrays of strings.

    A vocabulary has hundreds of thousands of strings, and the package makes several arrays for each: seconds
    of start-up for what the tokenizer reads on its own.

    Parameters
    ----------
    path : the file.

    Raises
    ------
    ModelLoadError : the file is missing, no GGUF, damaged, cut short, or has a tensor of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            super().__init__(path)
            self.metadata = self._read_metadata()
            """The scalars, texts and number arrays of the file."""
        except OSError as error:
            raise ModelLoadError(f"cannot read the model file {path}: {error.strerror}") from error
        except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            raise ModelLoadError(
                f"{path} is not a GGUF file, is damaged or cut short ({error}); fetch the file again"
            ) from error

    def _read_metadata(self) -> dict[str, Any]:
        return {name: field.contents() for name, field in self.fields.items() if not _is_skipped(field)}

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY and self._get(orig_offs, np.uint32)[0] == GGUFValueType.STRING:
            size = self._strings_size(orig_offs + 12, int(self._get(orig_offs + 4, np.uint64)[0])) + 12
            return size, [], [], [GGUFValueType.ARRAY, GGUFValueType.STRING]
        if raw_type == GGUFValueType.ARRAY:
            return self._numbers(orig_offs)
        return super()._get_field_parts(orig_offs, raw_type)

    def _strings_size(self, start: int, length: int) -> int:
        data, unpack = memoryview(self.data.data), struct.Struct("<Q").unpack_from
        offset = start
        for _ in range(length):
            offset += 8 + unpack(data, offset)[0]
        return offset - start

    def _numbers(self, offset: int) -> Any:
        """Return an array of numbers as one part."""
        item_type = GGUFValueType(self._get(offset, np.uint32)[0])
        length = int(self._get(offset + 4, np.uint64)[0])
        if item_type not in self.gguf_scalar_to_np:
            raise ValueError(f"an array of {item_type.name} values")
        numbers = self._get(offset + 12, self.gguf_scalar_to_np[item_type], length)
        if len(numbers) < length:
            raise ValueError(f"an array of {length} values, of which {len(numbers)} are there")
        return 12 + numbers.nbytes, [numbers], [0], [GGUFValueType.ARRAY, item_type]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            self._check_tensor(start_offs, field)
        super()._build_tensors(start_offs, fields)

    def _check_tensor(self, start_offs: int, field: ReaderField) -> None:
        _, _, _, dims, raw_type, offset = field.parts
        supported = ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
        if raw_type[0] not in SUPPORTED_TYPES:
            known = {kind.value: kind.name for kind in GGMLQuantizationType}
            name = known.get(int(raw_type[0]), f"number {raw_type[0]}")
            raise ModelLoadError(
                f"{self.path}: tensor {field.name} is of GGUF type {name}, which is not supported; "
                f"supported: {supported}"
            )
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type[0])]
        sizes = [int(size) for size in dims]
        if sizes and sizes[0] % block_size:
            raise ModelLoadError(
                f"{self.path}: tensor {field.name} has rows of {sizes[0]} numbers, which blocks of "
                f"{block_size} ({GGMLQuantizationType(raw_type[0]).name}) do not divide; fetch the file again"
            )
        end = start_offs + int(offset[0]) + math.prod(sizes) // block_size * block_bytes
        if end > self.data.size:
            raise ModelLoadError(
                f"{self.path} is cut short: tensor {field.name} ends at byte {end}, "
                f"the file at {self.data.size}; fetch the file again"
            )


def _is_skipped(field: ReaderField) -> bool:
    return (
        bool(field.types)
        and field.types[0] == GGUFValueType.ARRAY
        and field.types[-1] == GGUFValueType.STRING
    )
