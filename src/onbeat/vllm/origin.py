"""What vLLM says of itself: whose steps they are that are recorded, told or measured."""

from __future__ import annotations

import logging
from typing import Any

from onbeat.perfmodel.logged_step import StepOrigin


def log_as_vllm_does() -> None:
    """Let what onbeat says come where vLLM's own lines come, which sets up its own logger alone."""
    ours, theirs = logging.getLogger("onbeat"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


def origin_of(vllm_config: Any) -> StepOrigin:
    """Return what vLLM says of itself."""
    import vllm
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    is_cpu = current_platform.is_cpu()
    return StepOrigin(
        engine="vllm",
        engine_version=str(vllm.__version__),
        model=str(model.model),
        device="cpu" if is_cpu else None,
        device_name=str(current_platform.get_device_name()),
        dtype=_FORMATS.get(str(model.quantization or model.dtype)),
        tensor_parallel=int(parallel.tensor_parallel_size),
        pipeline_parallel=int(parallel.pipeline_parallel_size),
        steps_ahead=int(bool(vllm_config.scheduler_config.async_scheduling)),
    )


_FORMATS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "fp8": "fp8"}
"""Of weights; of others the user says what they are."""
