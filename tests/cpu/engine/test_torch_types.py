"""Arrays and tensors share memory and numbers in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from onbeat.engine.dtypes import DTYPES
from onbeat.engine.torch_types import numpy_dtype, to_array, to_tensor, torch_dtype


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
