"""What a GPU without a data sheet reaches at best, measured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onbeat.engine.device import Device, free_memory, wait_for
from onbeat.engine.profiling.limits import shortest
from onbeat.engine.torch.types import torch_device
from onbeat.perfmodel.profile import MachineLimits


def gpu_limits(
    device: Device,
    dtype: torch.dtype,
    number_format: str,
    *,
    read_bytes: int = 2**31,
    matrix_size: int = 8192,
) -> MachineLimits:
    """Measure read bandwidth and the rate of a square matrix product, in a fraction of a second.

    Parameters
    ----------
    dtype, number_format : of the product; the format is the key in the result.
    read_bytes : several times the largest cache, so that every pass reads memory; less where memory is short.
    """
    read_bytes = min(read_bytes, free_memory(device).num_bytes // 4)
    values = torch.ones(read_bytes // 4, dtype=torch.float32, device=torch_device(device))
    # Random: tensor cores multiply numbers that are all alike faster than those of a model.
    left = torch.empty(matrix_size, matrix_size, dtype=dtype, device=torch_device(device)).normal_()

    def seconds(work: Callable[[], object]) -> float:
        def done() -> None:
            work()
            wait_for(device)

        return shortest(done)

    with torch.inference_mode():
        read = seconds(lambda: torch.amax(values))
        product = seconds(lambda: torch.mm(left, left))
    return MachineLimits(
        memory_bandwidth=values.nbytes / read, peak_flops={number_format: 2 * matrix_size**3 / product}
    )
