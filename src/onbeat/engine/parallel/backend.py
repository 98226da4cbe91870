"""The backend that splits a model among processes: torch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from onbeat.core.errors import ConfigError
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig, native_settings
from onbeat.engine.forward import ForwardPass
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.parallel.leader import start_ranks
from onbeat.engine.parallel.shards import Shard, check_degree, config_of_rank
from onbeat.engine.weights import Checkpoint, parameter_shapes
from onbeat.scheduler.scheduler_config import SchedulerConfig


class ParallelBackend:
    """The model in torch operators, split among `config.tensor_parallel_size` processes.

    Parameters
    ----------
    config, checkpoint, device : what runs where; the device's threads are shared out among the ranks.

    Raises
    ------
    ConfigError : the model, the device or another option does not go with a split.
    """

    weights_format: str | None = None
    embedding_format: str | None = None

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> None:
        size = config.tensor_parallel_size
        _check_options(config, device)
        check_degree(checkpoint.config, size)
        self._config = config
        self._checkpoint = checkpoint
        self._rank_device = replace(device, num_threads=max(device.num_threads // size, 1))
        self._rank_config = config_of_rank(checkpoint.config, Shard(0, size))
        self._size = size
        num_threads = self._rank_device.num_threads
        plural = "" if num_threads == 1 else "s"
        self.description = f"by torch, tensor parallel: {size} ranks of {num_threads} thread{plural} each" + (
            "" if size <= device.num_threads else ", which is more than there are: ranks take turns"
        )

    def weight_bytes(self) -> int:
        shapes = parameter_shapes(self._rank_config)
        return self._size * sum(map(math.prod, shapes.values())) * self._rank_device.dtype.itemsize

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the size of a block on all ranks together, heads that several of them hold included."""
        spec = KVCacheSpec.of_model(self._rank_config, dtype=self._rank_device.dtype, block_size=block_size)
        return replace(spec, num_kv_heads=self._size * spec.num_kv_heads)

    def build(
        self,
        limits: SchedulerConfig,
        *,
        on_progress: Callable[[str], None],  # noqa: ARG002
        spare_bytes: int = 0,  # noqa: ARG002
    ) -> ForwardPass:
        return start_ranks(
            self._config,
            self._checkpoint,
            self._rank_device,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
        )


_ONE_PROCESS = {"native": "the native engine", "cuda": "the GPU engine"}


def _check_options(config: EngineConfig, device: DeviceConfig) -> None:
    size = config.tensor_parallel_size
    if config.backend in _ONE_PROCESS:
        raise ConfigError(
            f"{_ONE_PROCESS[config.backend]} runs in one process, but tensor_parallel_size is {size}; tensor "
            "parallelism needs the torch backend: leave --backend out, or --tensor-parallel-size"
        )
    for setting, value in native_settings(config):
        raise ConfigError(
            f"{setting} {value} needs the native engine, but with a tensor_parallel_size of {size} the "
            "model would run by torch; leave one of the two out"
        )
    if device.device.type != "cpu":
        raise ConfigError(
            f"tensor parallelism runs on the CPU only, but the device is {device.device}; give --device cpu, "
            "or leave --tensor-parallel-size out"
        )
