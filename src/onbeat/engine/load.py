"""From a configuration to a model that can run steps: device, limits, weights, KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onbeat.engine.backend import Backend, choose_backend
from onbeat.engine.config import EngineConfig
from onbeat.engine.device import DeviceConfig, detect_device, free_memory
from onbeat.engine.footprint import Footprint
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.build import ProposerBuilder, Target, choose_proposer
from onbeat.engine.speculation.proposer import Proposer
from onbeat.engine.weights import Checkpoint, DummyCheckpoint, open_checkpoint, read_model_config
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import settle

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
    embedding_format: str | None
    """Of the LM head, likewise."""
    proposer: ProposerBuilder | None = None
    """What proposes drafts; None where nothing does."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Everything that can be refused has been, and nothing large is loaded."""

    name: str
    checkpoint: Checkpoint
    device: DeviceConfig
    limits: SchedulerConfig
    backend: Backend
    proposer: ProposerBuilder | None = None

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
        proposer = None
        if self.proposer is not None:
            on_progress(_describe_proposer(self.proposer, limits))
            proposer = self.proposer.build(forward, limits)
        torch.set_num_threads(self._torch_threads)
        on_progress(
            f"KV cache of {limits.num_blocks} blocks ({limits.num_blocks * limits.block_size} tokens), "
            f"longest request {limits.max_model_len} tokens, policy {limits.policy}, "
            f"{limits.max_num_batched_tokens} tokens a step"
        )
        runner = _make_runner(forward, limits, proposer)
        on_progress("warming up")
        runner.warm_up()
        return LoadedModel(
            name=self.name,
            config=config,
            device=device,
            limits=limits,
            runner=runner,
            weights_format=self.backend.weights_format,
            embedding_format=self.backend.embedding_format,
            proposer=self.proposer,
        )

    @property
    def _torch_threads(self) -> int:
        """Threads that torch gets while steps run: as many as any part of a step needs."""
        wanted = self.backend.torch_threads
        return wanted if self.proposer is None else max(wanted, self.proposer.torch_threads)


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
    target = Target(checkpoint.config, device)
    proposer = choose_proposer(config, target, open_weights)
    limits = resolve_limits(
        config,
        checkpoint.config,
        device,
        Footprint.of(checkpoint.config, backend, proposer, config.limits.block_size),
    )
    return ModelLoader(config.model.name, checkpoint, device, limits, backend, proposer)


def resolve_limits(
    config: EngineConfig, model: ModelConfig, device: DeviceConfig, footprint: Footprint
) -> SchedulerConfig:
    """Decide what the user left open, from the model, the memory that it takes and the memory there is.

    Raises
    ------
    ConfigError : what the user gave cannot be kept.
    """
    limits = config.limits
    wanted_len = limits.max_model_len or model.max_position_embeddings
    free = free_memory(device.device)
    footprint.check_weights(free)
    default = min(int((free.num_bytes - footprint.weight_bytes) * DEFAULT_KV_SHARE), DEFAULT_KV_LIMIT_BYTES)
    num_blocks = footprint.num_blocks_in(config.kv_cache_memory_bytes or default)
    # More blocks than every slot can fill would be memory for nothing.
    num_blocks = min(num_blocks, limits.max_num_seqs * -(-wanted_len // limits.block_size))
    settled = settle(
        limits,
        num_blocks=num_blocks,
        model_len=model.max_position_embeddings,
        speculation=None if config.speculative is None else config.speculative.for_scheduler(),
    )
    footprint.check_fits(
        free,
        num_blocks=num_blocks,
        num_tokens=settled.max_num_batched_tokens,
        num_rows=settled.max_num_seqs,
    )
    return settled


def open_weights(config: EngineConfig) -> Checkpoint:
    """Open what the configuration names; read none of it yet.

    Raises
    ------
    ModelLoadError : naming the file and the tensor at fault.
    """
    if config.load_format == "dummy":
        return DummyCheckpoint(read_model_config(config.model), seed=config.seed)
    return open_checkpoint(config.model)


def _describe_proposer(proposer: ProposerBuilder, limits: SchedulerConfig) -> str:
    """Say what proposes drafts, how many, and what memory it takes of its own."""
    assert limits.speculation is not None
    weights, blocks = proposer.weight_bytes(), limits.num_blocks * proposer.block_bytes(limits.block_size)
    most = limits.speculation.num_speculative_tokens
    length = {"adaptive": f"as many as the load makes worthwhile, at most {most}", "fixed": f"always {most}"}
    memory = (
        f"{weights / 2**20:.0f} MiB of weights and {blocks / 2**20:.0f} MiB of KV cache"
        if weights or blocks
        else "no weights or KV cache of its own"
    )
    return (
        f"speculative decoding by {proposer.description}: drafts of a request in a step: "
        f"{length[limits.speculation.draft_length]}; {memory}"
    )


def _make_runner(forward: ForwardPass, config: SchedulerConfig, proposer: Proposer | None) -> ModelRunner:
    return ModelRunner(
        forward=forward,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        sampler=Sampler(forward.config.vocab_size, forward.device),
        proposer=proposer,
    )
