"""The table of attention backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.attention.base import AttentionBackend
from onbeat.engine.attention.torch_sdpa import TorchSdpaBackend
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.torch_kv import LayerKVCache

BackendFactory = Callable[[ModelConfig, Sequence[LayerKVCache]], AttentionBackend]

ATTENTION_BACKENDS: Mapping[str, BackendFactory] = {"torch": TorchSdpaBackend}


def select_attention_backend(device: torch.device, name: str = "auto") -> BackendFactory:  # noqa: ARG001
    """Return the backend of a name; `auto` takes the best one for the device.

    Raises
    ------
    ConfigError : no backend has this name.
    """
    if name == "auto":
        return TorchSdpaBackend
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; there are: {', '.join(ATTENTION_BACKENDS)}")
    return ATTENTION_BACKENDS[name]
