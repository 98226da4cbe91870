"""Arrays and tensors share memory and numbers in both directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onbeat.engine.dtypes import BFLOAT16, DTYPES
from onbeat.engine.torch.types import numpy_dtype, to_tensor, torch_dtype
from tests.cpu.engine.tiny_models import to_array


@pytest.mark.parametrize("name", DTYPES)
def test_there_and_back(name: str) -> None:
    dtype = DTYPES[name]
    array = np.linspace(-3, 3, 12).reshape(3, 4).astype(dtype)
    tensor = to_tensor(array)
    assert tensor.dtype == torch_dtype(dtype)
    assert numpy_dtype(tensor.dtype) == dtype
    assert tensor.double().tolist() == array.astype(np.float64).tolist()
    tensor[0, 0] = 7
    assert array[0, 0] == 7
    back = to_array(tensor)
    back[1, 1] = 5
    assert array[1, 1] == 5
    assert back.dtype == dtype


def test_numbers_become_bfloat16_as_in_torch() -> None:
    """Every bfloat16 and what lies behind it: all but nothing, less than one half, one half, more."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, None] | lower).view(np.float32)
    values = values[~np.isnan(values)]
    ours, theirs = values.astype(BFLOAT16), torch.from_numpy(values).bfloat16()
    assert np.array_equal(ours.view(np.uint16), to_array(theirs).view(np.uint16))
