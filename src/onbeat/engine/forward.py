"""The seam between the model runner and what computes a step's logits, and the reference behind it in torch.

Legend: T tokens of the step, R sampling rows, P tokens whose hidden states are wanted, D model width,
V vocabulary.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.engine.attention.base import AttentionBackend, ForwardContext, IntArray
from onbeat.engine.attention.registry import select_attention_backend
from onbeat.engine.device import wait_for
from onbeat.engine.input_batch import StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.layers.linear import select_linear_kernel
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.models.model import Model
from onbeat.engine.sampler import BestTokens


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a forward pass gives the sampling rows of a step."""

    values_RV: Tensor | None
    """float32 (float64 in a float64 model), contiguous, may be modified; None where nobody wants them."""
    best: BestTokens | None = None
    """Where the forward pass found them on the way."""
    seconds: float | None = None
    """How long the pass took, where it was measured inside."""
    hidden_PD: NDArray[Any] | None = None
    """Hidden states of `StepInputs.pooled_tokens` behind the final norm, float32 (float64 in a float64
    model); None where none are wanted."""


class RowProducts(Protocol):
    """Matrix products as a forward pass computes them, to be timed."""

    flops_per_row: float
    """Operations of one run for each row."""
    num_bytes: int
    """Of the weights, which every run reads."""

    def run(self, num_rows: int) -> float:
        """Multiply so many rows, and return the seconds that it took."""
        ...

    def close(self) -> None:
        """Let go of threads and memory."""
        ...


class ForwardPass(Protocol):
    """A model with its KV cache: runs the new tokens of a step, one step after the other."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """What a reader of measurements wants to know of this forward pass."""
        ...

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        """Store the keys and values of all tokens, and compute what is wanted of some.

        That is the logits of the sampling rows, and the hidden states of `StepInputs.pooled_tokens`; a
        forward pass that `LaunchesSteps` gives none of these.

        Parameters
        ----------
        inputs : the step.
        wants_logits : False where each row's most likely token suffices; the logits may be returned all the
            same.
        """
        ...

    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values of KV blocks finite."""
        ...

    def check_alive(self) -> None:
        """Raise `EngineDead` if a process that steps need is gone; called while no step runs."""
        ...

    def touch_ahead(self) -> bool:
        """Take a little of the memory that later steps will need; return whether there was any to take.

        Called over and over while nothing runs; a call takes some milliseconds at most.
        """
        ...

    def products(self) -> RowProducts:
        """Return products of its kind; no step may run until they are closed."""
        ...

    def close(self) -> None:
        """Let go of threads and processes; no step may run any more."""
        ...


class ChosenTokens(Protocol):
    """The tokens of a step that may still run."""

    def wait(self) -> BestTokens:
        """Return once the step is done: each sampling row's token, and its largest logit.

        A row whose largest logit is not finite has no token.

        Raises
        ------
        EngineDead : no step can run any more.
        """
        ...


@runtime_checkable
class LaunchesSteps(Protocol):
    """A forward pass that can take the next step while one runs, for it chooses the tokens itself."""

    def launch(self, inputs: StepInputs) -> ChosenTokens:
        """Queue a step and return.

        Parameters
        ----------
        inputs : a token id is `UNKNOWN_TOKEN` where it is what the last step chose for the row's slot.
            `Sampler.is_plain` holds of the rows.
        """
        ...


class TorchForward:
    """A model of torch operators and its attention backend: the reference, for any device and type.

    Parameters
    ----------
    model : built model.
    num_blocks : KV blocks, ids 0 to `num_blocks` - 1.
    block_size : tokens of a block, a multiple of 16.
    """

    def __init__(self, model: Model, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        spec = KVCacheSpec.of_model(model.config, dtype=model.dtype, block_size=block_size)
        backend = select_attention_backend(model.device)
        with torch.inference_mode():
            self.attention: AttentionBackend = backend(model.config, spec.allocate(num_blocks, model.device))

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def settings(self) -> Mapping[str, str]:
        return {
            "backend": "torch",
            "attention": self.attention.name,
            "linear_kernel": self.model.linear_kernel,
        }

    @torch.inference_mode()
    def run(
        self,
        inputs: StepInputs,
        *,
        wants_logits: bool,  # noqa: ARG002 -- always computed
    ) -> StepLogits:
        """Run one step; see `ForwardPass.run`."""
        context = ForwardContext(self.attention, self.attention.prepare(inputs.attention))
        hidden_TD = self.model.forward(
            torch.from_numpy(inputs.token_ids_T).to(self.device),
            torch.from_numpy(inputs.positions_T).to(self.device),
            context,
        )
        pooled_PD = self._pooled(hidden_TD, inputs.pooled_tokens)
        if not len(inputs.sampling_tokens):  # not the rows, which a tensor-parallel rank is not told of
            return StepLogits(None, hidden_PD=pooled_PD)
        sampling_tokens = torch.from_numpy(inputs.sampling_tokens).to(self.device)
        logits_RV = self.model.logits(hidden_TD.index_select(0, sampling_tokens))
        return StepLogits(logits_RV, hidden_PD=pooled_PD)

    def _pooled(self, hidden_TD: Tensor, tokens: IntArray) -> NDArray[Any] | None:
        if not len(tokens):
            return None
        normed_PD = self.model.norm(hidden_TD.index_select(0, torch.from_numpy(tokens).to(self.device)))
        return (normed_PD if self.model.dtype == torch.float64 else normed_PD.float()).cpu().numpy()

    @torch.inference_mode()
    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values of KV blocks finite."""
        self.attention.scrub(block_ids)

    def kv_regions(self) -> list[KVRegion]:
        """Return keys and values of each layer; see `GivesKV`."""
        return [KVRegion.of_tensor(part) for layer in self.attention.layers for part in layer]

    def check_alive(self) -> None:
        """Find nothing: all of it is in this process."""

    def touch_ahead(self) -> bool:
        """Return False: torch takes all memory at start."""
        return False

    def products(self) -> RowProducts:
        """Return products of the kernel that the model's layers have; see `ForwardPass.products`."""
        return _TorchProducts(self.model.dtype, self.device)

    def close(self) -> None:
        """Let go of nothing: torch keeps its threads, and memory goes with the object."""


class _TorchProducts:
    """A square matrix in the caches, times rows."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        weight_OI = torch.ones(_PRODUCT_WIDTH, _PRODUCT_WIDTH, dtype=dtype, device=device)
        self.flops_per_row = 2.0 * weight_OI.numel()
        self.num_bytes = weight_OI.nbytes
        self._linear = select_linear_kernel(dtype, device)(weight_OI)
        self._weight_OI = weight_OI

    @torch.inference_mode()
    def run(self, num_rows: int) -> float:
        x_TI = self._weight_OI.new_ones(num_rows, _PRODUCT_WIDTH)
        wait_for(x_TI.device)
        start = perf_counter()
        self._linear(x_TI)
        wait_for(x_TI.device)
        return perf_counter() - start

    def close(self) -> None:
        """Let go of nothing: memory goes with the object."""


_PRODUCT_WIDTH = 1024
