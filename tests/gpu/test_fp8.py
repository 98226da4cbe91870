"""Products of 8 bits on a GPU, against those of the same rounded numbers in float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.cuda import triton_ops
from onbeat.engine.torch.layer import multiply_by
from onbeat.engine.torch.types import Fp8Matrix
from tests.cpu.engine.cuda.kernel_sizes import kernel_sizes
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.gpu.engines import relative_error

pytestmark = pytest.mark.gpu


class Quick(ReferenceKernels):
    def in_fp8(self, x_TD: torch.Tensor) -> Fp8Matrix:
        return triton_ops.in_fp8(x_TD)


@pytest.mark.parametrize("num_tokens", [1, 5, 32, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_rounded_numbers(num_tokens: int, has_bias: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU does not compute in 8 bits")
    x_TD, rows_FD, bias_F = (
        torch.randn(*shape, device="cuda").bfloat16() for shape in ((num_tokens, 576), (1536, 576), (1536,))
    )
    matrix, tokens = Fp8Matrix.of(rows_FD), Fp8Matrix.of(x_TD)
    values_TD, scales_T1 = triton_ops.in_fp8(x_TD)
    torch.testing.assert_close(scales_T1, tokens.scales_F1)
    assert (values_TD.float() == tokens.values_FD.float()).double().mean() > 0.999
    product_TF = multiply_by(Quick(kernel_sizes()), x_TD, matrix, bias_F if has_bias else None)
    wide_TD, wide_FD = (each.values_FD.float() * each.scales_F1 for each in (tokens, matrix))
    expected_TF = wide_TD @ wide_FD.t() + (bias_F.float() if has_bias else 0.0)
    assert relative_error(product_TF, expected_TF) < 1e-2
