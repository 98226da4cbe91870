"""From a configuration to a model that can run steps: device, limits, weights, KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.engine.backend import Backend, KeepsQuantized, MeasuresMemory, SettleLimits, choose_backend
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import DeviceConfig, detect_device, free_memory, missed_gpu, thread_advice
from onbeat.engine.engine_config import DEFAULT_GPU_UTILIZATION, EngineConfig
from onbeat.engine.footprint import Footprint
from onbeat.engine.kv_access import BlockMemory, GivesKV, KVLayout, block_bytes_of
from onbeat.engine.kv_cache import modest_kv_bytes
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.pooling import choose_pooling
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.build import ProposerBuilder, Target, choose_proposer
from onbeat.engine.step_time_spec import by_data_sheet
from onbeat.engine.weights import Checkpoint, DummyCheckpoint, open_checkpoint, read_model_config
from onbeat.engine.weights.rounding import loading_remarks
from onbeat.perfmodel.description import StepTimeDescription
from onbeat.scheduler.replica.policies import settle
from onbeat.scheduler.scheduler_config import SchedulerConfig


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
    stands_in_for: StepTimeDescription | None = None
    """What takes its time elsewhere; None where the model runs here."""

    @property
    def device_name(self) -> str:
        """Where the model runs, or what it stands in for."""
        return str(self.device.device) if self.stands_in_for is None else self.stands_in_for.device.id

    @property
    def gives_kv(self) -> bool:
        """Whether `kv_memory` can be had."""
        return isinstance(self.runner.forward, GivesKV) and self.device.device.type == "cpu"

    def kv_memory(self, activation_quantization: str = "auto") -> BlockMemory:
        """Return access to the KV blocks, for engines that hand requests over, where `gives_kv`.

        Parameters
        ----------
        activation_quantization : of what quantized weights are multiplied with.
        """
        forward, limits = self.runner.forward, self.limits
        assert isinstance(forward, GivesKV), "whoever asks has looked at gives_kv"
        settings, activations = self.runner.forward.settings, ""
        if self.weights_format is not None:
            activations = activation_quantization
            if activations == "auto":  # which the processor decides
                activations = f"as {settings.get('instruction_set', 'the backend')} has them"
        if "batch_invariant" in settings:
            activations += ", batch-invariant"
        layout = KVLayout(
            model=f"{self.name} ({self.config.architecture}, {self.config.num_layers} layers)",
            weights=self.weights_format or self.device.dtype.name,
            dtype=self.device.dtype.name,
            block_size=limits.block_size,
            block_bytes=block_bytes_of(forward),
            backend=settings["backend"],
            activations=activations,
        )
        return BlockMemory(forward, layout, num_blocks=limits.num_blocks)


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Everything that can be refused has been, and nothing large is loaded."""

    name: str
    checkpoint: Checkpoint
    device: DeviceConfig
    limits: SchedulerConfig
    backend: Backend
    settle: SettleLimits
    """From a number of KV blocks to limits that go with it."""
    proposer: ProposerBuilder | None = None
    spare_bytes: int = 0
    """Memory that is left beside all that the engine needs."""
    remarks: Sequence[str] = ()
    """Lines on weights that are rounded, and on options that change nothing here."""

    def load(self, on_progress: OnProgress) -> LoadedModel:
        """Load the weights, make the KV cache, and run a first step.

        Raises
        ------
        ConfigError : a weight is missing or cannot be read.
        """
        device, limits, config = self.device, self.limits, self.checkpoint.config
        on_progress(
            f"loading {self.name} ({config.architecture}) in {device.dtype.name} "
            f"on {device.device} with {device.num_threads} threads, {self.backend.description}"
        )
        for line in (thread_advice(device), *self.remarks):
            if line is not None:
                on_progress(line)
        if isinstance(self.backend, MeasuresMemory):
            draft = None if self.proposer is None else self.proposer.backend
            limits = self.backend.fit_limits(limits, self.settle, draft, on_progress=on_progress)
        forward = self.backend.build(limits, on_progress=on_progress, spare_bytes=self.spare_bytes)
        proposer = None
        if self.proposer is not None:
            on_progress(_describe_proposer(self.proposer, limits))
            proposer = self.proposer.build(forward, limits)
        say_limits(limits, on_progress)
        runner = ModelRunner.within(limits, forward, Sampler(forward.config.vocab_size), proposer)
        on_progress(Detail("warming up"))
        runner.warm_up()
        if isinstance(self.backend, MeasuresMemory):
            self.backend.tell_excess(on_progress)
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


def say_limits(limits: SchedulerConfig, on_progress: OnProgress) -> None:
    """Say how much room there is, and by which rules it is used."""
    on_progress(
        f"KV cache: room for {limits.num_blocks * limits.block_size:,} tokens; one request may have "
        f"{limits.max_model_len:,}"
    )
    on_progress(
        Detail(
            f"{limits.num_blocks} blocks of {limits.block_size} tokens, policy {limits.policy}, "
            f"{limits.max_num_batched_tokens} tokens a step"
        )
    )


def prepare_model(config: EngineConfig) -> ModelLoader:
    """Look at the machine, the model's files and the limits.

    Raises
    ------
    ConfigError : the model cannot be loaded, or limits and memory do not go together.
    """
    if config.load_format == "stand-in":
        raise ConfigError("a stand-in has no model that could be run here; leave --load-format out")
    device = detect_device(config.device, config.dtype, config.threads)
    checkpoint = open_weights(config)
    choose_pooling(config.pooling, checkpoint.config)
    backend = choose_backend(config, checkpoint, device)
    target = Target(checkpoint.config, device)
    proposer = choose_proposer(config, target, open_weights)
    ahead = by_data_sheet(checkpoint.config, config.model.name, device)
    settle = partial(_settle, config, checkpoint.config, ahead)
    limits, spare_bytes = resolve_limits(
        config,
        free=_free_memory(config, device),
        footprint=Footprint.of(
            checkpoint.config,
            backend,
            None if proposer is None else proposer.backend,
            config.limits.block_size,
        ),
        backend=backend,
        settle=settle,
    )
    return ModelLoader(
        config.model.name,
        checkpoint,
        device,
        limits,
        backend,
        settle,
        proposer,
        spare_bytes,
        tuple(_remarks(config, checkpoint, backend, device)),
    )


def _remarks(
    config: EngineConfig, checkpoint: Checkpoint, backend: Backend, device: DeviceConfig
) -> Iterator[str]:
    """Yield lines on what of the checkpoint is rounded or left out, and on options of another engine."""
    plain = backend.plain_names() if isinstance(backend, KeepsQuantized) else checkpoint.names()
    yield from loading_remarks(checkpoint, plain, device.dtype)
    if config.device == "auto" and (lacks := missed_gpu()) is not None:
        yield lacks
    if isinstance(backend, MeasuresMemory):
        return
    if config.gpu_memory_utilization != DEFAULT_GPU_UTILIZATION:
        yield "ignored: --gpu-memory-utilization (this engine's KV cache has --kv-cache-memory-bytes)"
    for name in ("enforce_eager", "cuda_graph_pieces"):
        if getattr(config, name):
            yield f"ignored: --{name.replace('_', '-')} (this engine has no CUDA graphs)"


def resolve_limits(
    config: EngineConfig, *, free: FreeMemory, footprint: Footprint, backend: Backend, settle: SettleLimits
) -> tuple[SchedulerConfig, int]:
    """Decide what the user left open, from the memory that the model takes and the memory there is.

    Parameters
    ----------
    backend : says what the KV cache takes by default, if it finds that out.
    settle : from a number of KV blocks to limits.

    Returns
    -------
    tuple
        The limits, and the bytes that are left beside all that they let the engine take.

    Raises
    ------
    ConfigError : what the user gave cannot be kept.
    """
    footprint.check_weights(free, kv_cache_bytes=config.kv_cache_memory_bytes or 0)
    spare_bytes = free.num_bytes - footprint.weight_bytes
    default = (
        backend.default_kv_bytes(spare_bytes, footprint.step_bytes(config.limits))
        if isinstance(backend, MeasuresMemory)
        else modest_kv_bytes(spare_bytes)
    )
    settled = settle(footprint.num_blocks_in(config.kv_cache_memory_bytes or default))
    return settled, footprint.check_fits(
        free,
        num_blocks=settled.num_blocks,
        num_tokens=settled.max_num_batched_tokens,
        num_rows=settled.max_num_seqs,
    )


def _settle(
    config: EngineConfig, model: ModelConfig, step_time: StepTimeModel | None, num_blocks: int
) -> SchedulerConfig:
    """Return limits that go with a number of KV blocks, or with fewer.

    Parameters
    ----------
    step_time : derives how many tokens the largest step has; None where nothing is known of the device yet.
    """
    limits = config.limits
    wanted_len = limits.max_model_len or model.max_position_embeddings
    return settle(
        limits,
        # More blocks than every slot can fill would be memory for nothing.
        num_blocks=min(num_blocks, limits.max_num_seqs * -(-wanted_len // limits.block_size)),
        model_len=model.max_position_embeddings,
        model=step_time,
        speculation=None if config.speculative is None else config.speculative.for_scheduler(),
    )


def _free_memory(config: EngineConfig, device: DeviceConfig) -> FreeMemory:
    """Return how much memory the engine may take: what is free, or its share of that."""
    free, share = free_memory(device.device), config.memory_share
    if share is None or device.device.type != "cpu":
        return free
    own = FreeMemory(
        share.total_bytes // share.num_shares,
        f"this machine, shared by {share.num_shares} replicas,",
        share.num_shares,
    )
    return min(own, free)


def open_weights(config: EngineConfig) -> Checkpoint:
    """Open what the configuration names; read none of it yet.

    Raises
    ------
    ModelLoadError : naming the file and the tensor at fault.
    """
    served_len = config.limits.max_model_len
    if config.load_format == "dummy":
        return DummyCheckpoint(read_model_config(config.model, served_len=served_len), seed=config.seed)
    return open_checkpoint(config.model, served_len=served_len)


def _describe_proposer(proposer: ProposerBuilder, limits: SchedulerConfig) -> str:
    """Say what proposes drafts, how many, and what memory it takes of its own."""
    assert limits.speculation is not None
    most = limits.speculation.num_speculative_tokens
    length = {"adaptive": f"as many as the load makes worthwhile, at most {most}", "fixed": f"always {most}"}
    memory = "no weights or KV cache of its own"
    if (backend := proposer.backend) is not None:
        weights = backend.weight_bytes()
        kv_bytes = limits.num_blocks * backend.kv_cache_spec(limits.block_size).block_bytes
        memory = f"{weights / 2**20:.0f} MiB of weights and {kv_bytes / 2**20:.0f} MiB of KV cache"
    return (
        f"speculative decoding by {proposer.description}: drafts of a request in a step: "
        f"{length[limits.speculation.draft_length]}; {memory}"
    )
