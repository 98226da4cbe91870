"""The forward pass on torch, operator by operator: the reference, for any device and float type.

Legend: T tokens of the step, N tokens that are sampled or scored, P tokens whose hidden states are wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from onbeat.engine.forward import ForwardPass, RowProducts, StepLogits
from onbeat.engine.input_batch import IntArray, StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.sampler import BestTokens
from onbeat.engine.torch.kernels import BestBuffers, ChunkRows, LayerSpec, StepTensors
from onbeat.engine.torch.kv import LayerKVCache, allocate_kv, region_of, scrub
from onbeat.engine.torch.layer import (
    Hidden,
    LayerStep,
    final_states,
    first_of_windows,
    run_layers,
    write_logits,
)
from onbeat.engine.torch.plain import TorchKernels
from onbeat.engine.torch.types import device_of, numpy_dtype
from onbeat.engine.torch.weights import LayerProducts, TorchWeights


class TorchForward(ForwardPass):
    """Runs steps by plain torch, with a KV cache of its own; the host chooses the tokens.

    Parameters
    ----------
    weights : the model.
    num_blocks : KV blocks, ids 0 to `num_blocks` - 1.
    block_size : tokens of a block, a multiple of 16.
    """

    def __init__(self, weights: TorchWeights, *, num_blocks: int, block_size: int) -> None:
        self.weights, self.config, self.device = weights, weights.config, device_of(weights.device)
        self.settings = {"backend": "torch"}
        self._block_size = block_size
        self._kernels = TorchKernels(weights.dtype, weights.device, block_size)
        self._windows = first_of_windows(weights)
        dtype = numpy_dtype(weights.dtype)
        spec = KVCacheSpec.of_model(weights.config, dtype=dtype, block_size=block_size)
        with torch.inference_mode():
            self.kv = allocate_kv(spec, num_blocks, weights.device)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        """Run one step; see `ForwardPass.run`."""
        batch, num_samples = inputs.attention, len(inputs.sampling_tokens)
        rows = ChunkRows.of(batch, self._block_size)
        plans = {window: self._kernels.plan_chunks(rows, spec) for window, spec in self._windows.items()}

        def attend(q_TNH: Tensor, kv: LayerKVCache, layer: LayerSpec, out_TNH: Tensor) -> None:
            self._kernels.attend_chunks(q_TNH, kv, plans[layer.window], layer, out_TNH)

        ids_T, positions_T, kv_slots_T, sampled_N, pooled_P = (
            torch.from_numpy(part).to(self.weights.device)
            for part in (
                inputs.token_ids_T,
                inputs.positions_T,
                batch.slot_mapping_T,
                inputs.sampling_tokens,
                inputs.pooled_tokens,
            )
        )
        tensors = StepTensors(positions_T, kv_slots_T)
        step = LayerStep(tensors, self.kv, self._kernels, functional.linear)
        hidden = run_layers(self.weights, ids_T, step, attend, torch.cat((sampled_N, pooled_P)))
        hidden_PD = None
        if len(pooled_P):
            pooled = Hidden(*(part[num_samples:] for part in hidden))
            hidden_PD = final_states(self.weights, self._kernels, pooled).cpu().numpy()
        if not num_samples:
            return StepLogits(None, hidden_PD=hidden_PD)
        shape = num_samples, self.config.vocab_size
        logits_NV = torch.empty(shape, dtype=self.weights.wide_dtype, device=self.weights.device)
        write_logits(self.weights, self._kernels, hidden, logits_NV)
        peaks_N = torch.empty(num_samples, device=self.weights.device)
        best = BestBuffers(torch.empty_like(sampled_N), peaks_N)
        self._kernels.best(logits_NV, best)
        return StepLogits(
            logits_NV.cpu().numpy() if wants_logits else None,
            BestTokens(*(part.cpu().numpy() for part in best)),
            hidden_PD=hidden_PD,
        )

    @torch.inference_mode()
    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values of KV blocks finite."""
        scrub(self.kv, torch.from_numpy(block_ids).to(self.weights.device))

    def kv_regions(self) -> list[KVRegion]:
        """Return keys and values of each layer; see `GivesKV`."""
        return [region_of(part) for layer in self.kv for part in layer]

    def products(self) -> RowProducts:
        """Return those of the model's first layer; see `GivesProducts`."""
        return LayerProducts(self.weights)
