"""A checkpoint's weights as the generic layer wants them, on the device.

Legend: D model width, F feed-forward width, V vocabulary, X = (query heads + 2 KV heads) * head width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onbeat.engine.cuda.kernels import LayerSpec, Norm
from onbeat.engine.device import wait_for
from onbeat.engine.model_config import ModelConfig, inverse_frequencies
from onbeat.engine.torch_types import device_of
from onbeat.engine.torch_weights import parameter_on
from onbeat.engine.weights import Checkpoint, parameter_shapes
from onbeat.engine.weights.layer_norms import LAYER_NORMS


class CudaLayer(NamedTuple):
    """One layer; None where the family has no such thing. Products are `x @ weight.T + bias`."""

    qkv_XD: Tensor
    qkv_bias_X: Tensor | None
    o_DX: Tensor
    o_bias_D: Tensor | None
    gate_up_FD: Tensor
    """All of the gate, then all of up: [2 F, D]."""
    down_DF: Tensor
    attention_norm: Norm
    mlp_norm: Norm
    after_attention_norm: Norm | None
    after_mlp_norm: Norm | None
    spec: LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaWeights:
    """All of a model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding_VD: Tensor
    embedding_scale: float
    """Rounded to the model's type."""
    layers: list[CudaLayer]
    final_norm: Norm
    lm_head_VD: Tensor
    """The embedding itself where the two are tied."""


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> CudaWeights:
    """Read a checkpoint, one parameter at a time.

    Raises
    ------
    ModelLoadError : a weight is missing or cannot be read.
    """
    with torch.inference_mode():
        return _Loader(checkpoint, dtype, device).load()


class _Loader:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._shapes = parameter_shapes(checkpoint.config)
        self._dtype = dtype
        self._device = device
        ropes = dict.fromkeys(self._config.layer_rope(index) for index in range(self._config.num_layers))
        self._frequencies = {
            rope: torch.from_numpy(inverse_frequencies(rope, self._config.head_dim)).to(device)
            for rope in ropes
        }

    def load(self) -> CudaWeights:
        config = self._config
        embedding_VD = self._joined("model.embed_tokens.weight")
        scale = torch.tensor(config.embedding_scale, dtype=self._dtype)
        return CudaWeights(
            config=config,
            dtype=self._dtype,
            device=self._device,
            embedding_VD=embedding_VD,
            embedding_scale=float(scale),
            layers=[self._layer(index) for index in range(config.num_layers)],
            final_norm=self._norm("model.norm"),
            lm_head_VD=embedding_VD if config.tie_word_embeddings else self._joined("lm_head.weight"),
        )

    def _layer(self, index: int) -> CudaLayer:
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        names = LAYER_NORMS[config.norms]
        assert names.attention is not None, "see `missing_feature`"
        assert names.mlp is not None, "see `missing_feature`"
        projections = [f"{attention}.{part}_proj" for part in "qkv"]
        after_attention, after_mlp = (
            None if name is None else self._norm(f"{prefix}.{name}")
            for name in (names.after_attention, names.after_mlp)
        )
        has_bias, has_output_bias = config.attention_bias, config.attention_output_bias
        return CudaLayer(
            qkv_XD=self._joined(*(f"{name}.weight" for name in projections)),
            qkv_bias_X=self._joined(*(f"{name}.bias" for name in projections)) if has_bias else None,
            o_DX=self._joined(f"{attention}.o_proj.weight"),
            o_bias_D=self._joined(f"{attention}.o_proj.bias") if has_output_bias else None,
            gate_up_FD=self._joined(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            down_DF=self._joined(f"{mlp}.down_proj.weight"),
            attention_norm=self._norm(f"{prefix}.{names.attention}"),
            mlp_norm=self._norm(f"{prefix}.{names.mlp}"),
            after_attention_norm=after_attention,
            after_mlp_norm=after_mlp,
            spec=self._spec(index, attention),
        )

    def _spec(self, index: int, attention: str) -> LayerSpec:
        config = self._config
        return LayerSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.layer_window(index),
            frequencies_H=self._frequencies[config.layer_rope(index)],
            query_norm=self._norm(f"{attention}.q_norm") if config.qk_norm else None,
            key_norm=self._norm(f"{attention}.k_norm") if config.qk_norm else None,
        )

    def _norm(self, name: str) -> Norm:
        scale_D = self._joined(f"{name}.weight")
        offset = self._config.norm_weight_offset
        if not self._config.norm_rounds_once:
            return Norm(scale_D + offset, self._config.rms_norm_eps, scales_rounded=True)
        return Norm(scale_D.float() + offset, self._config.rms_norm_eps, scales_rounded=False)

    def _joined(self, *names: str) -> Tensor:
        """Return parameters one below the other, of which no second copy is made on the device."""
        num_rows = [self._shapes[name][0] for name in names]
        shape = (sum(num_rows), *self._shapes[names[0]][1:])
        joined = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part, name in zip(torch.split(joined, num_rows), names, strict=True):
            part.copy_(parameter_on(self._checkpoint, name, self._dtype, self._device))
        return joined


class LayerProducts:
    """All four matrices of a layer, times rows; see `RowProducts`."""

    def __init__(self, weights: CudaWeights) -> None:
        layer = weights.layers[0]
        self._matrices = (layer.qkv_XD, layer.o_DX, layer.gate_up_FD, layer.down_DF)
        self._device = device_of(weights.device)
        self.flops_per_row = 2.0 * sum(matrix.numel() for matrix in self._matrices)
        self.num_bytes = sum(matrix.nbytes for matrix in self._matrices)

    @torch.inference_mode()
    def run(self, num_rows: int) -> float:
        """Multiply, and return the seconds that it took."""
        inputs = [matrix.new_empty(num_rows, matrix.shape[1]).normal_() for matrix in self._matrices]
        wait_for(self._device)
        start = perf_counter()
        for x, matrix in zip(inputs, self._matrices, strict=True):
            functional.linear(x, matrix)
        wait_for(self._device)
        return perf_counter() - start

    def close(self) -> None:
        """Let go of nothing: the weights are the model's."""
