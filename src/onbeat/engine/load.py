"""From a configuration to a model that can run steps: device, limits, weights, KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.backend import Backend, choose_backend
from onbeat.engine.config import EngineConfig
from onbeat.engine.device import DeviceConfig, available_memory_bytes, detect_device
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampler import Sampler
from onbeat.engine.weights import Checkpoint, DummyCheckpoint, open_checkpoint, read_model_config
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import default_token_budget, make_policy

OnProgress = Callable[[str], None]

DEFAULT_KV_SHARE = 0.25
"""Share of the free memory that the KV cache takes where the user gives no size."""
DEFAULT_KV_LIMIT_BYTES = 4 * 2**30
"""But no more than this."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run steps, and what was decided on the way."""

    name: str
    config: ModelConfig
    device: DeviceConfig
    limits: SchedulerConfig
    runner: ModelRunner
    weights_format: str | None
    """Number format of most weights; None where they are of the device's type."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Everything that can be refused has been, and nothing large is loaded."""

    name: str
    checkpoint: Checkpoint
    device: DeviceConfig
    limits: SchedulerConfig
    backend: Backend

    def load(self, on_progress: OnProgress) -> LoadedModel:
        """Load the weights, make the KV cache, and run a first step.

        Raises
        ------
        ConfigError : a weight is missing or cannot be read.
        """
        device, limits, config = self.device, self.limits, self.checkpoint.config
        on_progress(
            f"loading {self.name} ({config.architecture}) in {device.dtype_name} "
            f"on {device.device} with {device.num_threads} threads, {self.backend.description}"
        )
        forward = self.backend.build(num_blocks=limits.num_blocks, block_size=limits.block_size)
        torch.set_num_threads(self.backend.torch_threads)
        on_progress(
            f"KV cache of {limits.num_blocks} blocks ({limits.num_blocks * limits.block_size} tokens), "
            f"longest request {limits.max_model_len} tokens, policy {limits.policy}, "
            f"{limits.max_num_batched_tokens} tokens a step"
        )
        runner = _make_runner(forward, limits)
        on_progress("warming up")
        runner.warm_up()
        return LoadedModel(self.name, config, device, limits, runner, self.backend.weights_format)


def prepare_model(config: EngineConfig) -> ModelLoader:
    """Look at the machine, the model's files and the limits.

    Raises
    ------
    ConfigError : the model cannot be loaded, or limits and memory do not go together.
    """
    device = detect_device(config.device, config.dtype, config.threads)
    torch.set_num_threads(device.num_threads)
    checkpoint = open_weights(config)
    backend = choose_backend(config, checkpoint, device)
    limits = resolve_limits(config, checkpoint.config, device, backend)
    make_policy(limits)  # it checks the limits against the policy
    return ModelLoader(config.model.name, checkpoint, device, limits, backend)


def resolve_limits(
    config: EngineConfig, model: ModelConfig, device: DeviceConfig, backend: Backend
) -> SchedulerConfig:
    """Decide what the user left open, from the model, its backend and the memory.

    Raises
    ------
    ConfigError : what the user gave cannot be kept.
    """
    spec = backend.kv_cache_spec(config.block_size)
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but this model was made for {limit} tokens; "
            "give a smaller one"
        )
    wanted_len = config.max_model_len or limit
    free = _memory_beside_weights(backend.weight_bytes(), device)
    default = min(int(free * DEFAULT_KV_SHARE), DEFAULT_KV_LIMIT_BYTES)
    num_blocks = spec.num_blocks_in(config.kv_cache_memory_bytes or default)
    # More blocks than every slot can fill would be memory for nothing.
    num_blocks = min(num_blocks, config.max_num_seqs * -(-wanted_len // config.block_size))
    if num_blocks * spec.block_bytes > free:
        raise ConfigError(
            f"a KV cache of {num_blocks * spec.block_bytes / 2**30:.1f} GiB does not fit beside the weights "
            f"in the {free / 2**30:.1f} GiB free on {device.device}; lower kv_cache_memory_bytes"
        )
    # A length that the user asked for must fit (SchedulerConfig checks it); the model's own may be cut.
    max_model_len = config.max_model_len or min(limit, num_blocks * config.block_size)
    budget = config.max_num_batched_tokens or default_token_budget(
        config.policy, max_model_len=max_model_len, max_num_seqs=config.max_num_seqs
    )
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        policy=config.policy,
        scheduling_policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        slo_mode=config.slo_mode,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
    )


def open_weights(config: EngineConfig) -> Checkpoint:
    """Open what the configuration names; read none of it yet.

    Raises
    ------
    ModelLoadError : naming the file and the tensor at fault.
    """
    if config.load_format == "dummy":
        return DummyCheckpoint(read_model_config(config.model), seed=config.seed)
    return open_checkpoint(config.model)


def _memory_beside_weights(weights: int, device: DeviceConfig) -> int:
    """Return how many bytes will be free once the weights are loaded."""
    free = available_memory_bytes(device.device)
    if weights >= free:
        raise ConfigError(
            f"the weights take {weights / 2**30:.1f} GiB in {device.dtype_name}, more than the "
            f"{free / 2**30:.1f} GiB free on {device.device}; use a smaller model, dtype or quantization"
        )
    return free - weights


def _make_runner(forward: ForwardPass, config: SchedulerConfig) -> ModelRunner:
    return ModelRunner(
        forward=forward,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        sampler=Sampler(forward.config.vocab_size, forward.device),
    )
