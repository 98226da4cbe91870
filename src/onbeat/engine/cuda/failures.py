"""What a GPU that fails says, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onbeat.core.errors import EngineDead, EngineError
from onbeat.engine.cuda.step_packer import PackedStep


@contextmanager
def failures_in_words(step: PackedStep) -> Iterator[None]:
    """Turn what torch, Triton and FlashInfer raise while a step is queued or waited for into words.

    Raises
    ------
    EngineError : the step does not fit in memory; the next one may.
    EngineDead : the device failed, and nothing runs on it any more.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"a step of {step.counts.tokens} tokens in {step.num_rows} rows does not fit in the GPU's "
            "memory; lower --max-num-batched-tokens"
        ) from error
    except RuntimeError as error:
        text = str(error).strip().partition("\n")[0]
        if "CUDA" not in text:
            raise
        raise EngineDead(f"the GPU failed: {text}; the engine must be started again") from error
