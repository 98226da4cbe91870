"""How much of a device a step used: MBU and MFU.

MBU = (weight and KV bytes that a step must read) / step time / peak memory bandwidth; MFU = (operations that
a step must do) / step time / peak arithmetic (Chowdhery et al., "PaLM", 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable

from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import Parallelism
from onbeat.perfmodel.model_spec import ModelSpec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.shapes import draft_pairs
from onbeat.perfmodel.speculative import draft_passes


class StepOperations:
    """What a batch takes of one device at least: operations, and bytes of weights and KV.

    With several devices the sum is an equal share of the whole, so that MBU and MFU are means over them.
    Sliding windows are counted as if their layers attended to everything.
    """

    def __init__(
        self, model: ModelSpec, precision: Precision | None = None, parallelism: Parallelism | None = None
    ) -> None:
        precision, parallelism = precision or Precision(), parallelism or Parallelism()
        share = 1 / parallelism.num_devices
        experts = model.expert_bytes(precision)
        head = model.embedding_parameters
        self._token_flops = 2.0 * model.active_layer_parameters * share
        self._head_flops = 2.0 * head * share
        self._pair_flops = 2.0 * model.pair_products * share
        self._weight_bytes = (model.dense_bytes(precision) + head * precision.embedding_bytes) * share
        self._expert_bytes = experts * share
        self._state_bytes = 2 * model.state_bytes * share
        self._expert_miss = 1 - model.num_experts_per_token / model.num_experts if experts else 0.0
        self._kv_bytes = model.kv_bytes_per_token(precision) * share

    def flops(self, shape: BatchShape) -> float:
        """Return the operations of a batch (a multiplication and an addition are two)."""
        return (
            shape.num_new_tokens * self._token_flops
            + shape.num_lm_head_rows * self._head_flops
            + (shape.query_key_pairs + shape.decode_context_tokens + draft_pairs(shape)) * self._pair_flops
        )

    def bytes_read(self, shape: BatchShape) -> float:
        """Return the bytes of weights and KV that a batch reads; of experts the expected number."""
        tokens = shape.num_new_tokens
        if tokens == 0:
            return 0.0
        total = self._weight_bytes + self._state_bytes * shape.num_sequences
        total += self._kv_bytes * (shape.decode_context_tokens + shape.chunk_cached_tokens)
        if self._expert_bytes:
            total += self._expert_bytes * (1 - self._expert_miss**tokens)
        return total


class SpeculativeOperations:
    """The operations of a step with that of its draft passes: what MBU and MFU are made from.

    Parameters
    ----------
    target, draft : of the two models.
    """

    def __init__(self, target: BatchOperations, draft: BatchOperations) -> None:
        self._target = target
        self._draft = draft

    def flops(self, shape: BatchShape) -> float:
        """Return the operations of both models."""
        return self._target.flops(shape) + _of_passes(self._draft.flops, shape)

    def bytes_read(self, shape: BatchShape) -> float:
        """Return the bytes of weights and KV that both models read."""
        return self._target.bytes_read(shape) + _of_passes(self._draft.bytes_read, shape)


def _of_passes(of_batch: Callable[[BatchShape], float], shape: BatchShape) -> float:
    return sum(number * of_batch(each) for number, each in draft_passes(shape))


BatchOperations = StepOperations | SpeculativeOperations
"""What a batch takes of a device at least."""
