"""From a configuration to a stand-in: sizes, device, limits, vocabulary, step times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.protocols import Tokenizer
from onbeat.core.step import BatchShape
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import DTYPES
from onbeat.engine.engine_config import EngineConfig, MemoryShare, native_settings
from onbeat.engine.load import LoadedModel, say_limits
from onbeat.engine.model_config import ModelConfig, RopeConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.progress import OnProgress
from onbeat.engine.stand_in.forward import StandInForward, StandInSampler
from onbeat.engine.step_time_source import StepTime
from onbeat.engine.step_time_spec import model_spec_of, precision_of
from onbeat.engine.step_watch import StepWatch
from onbeat.engine.weights import read_model_config
from onbeat.hub.files import ModelFiles
from onbeat.hub.known import KNOWN_MODELS
from onbeat.perfmodel.description import StepTimeDescription
from onbeat.perfmodel.device_spec import device_ids, find_device
from onbeat.perfmodel.memory import Change, Choices, kv_capacity, what_fits
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import roofline_predictor
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.utilisation import StepOperations
from onbeat.scheduler.replica.policies import composition, largest_step, settle
from onbeat.scheduler.replica.token_budget import LARGEST_BUDGET
from onbeat.scheduler.scheduler_config import DEFAULT_POLICY, SchedulerConfig, SchedulerLimits
from onbeat.text.tokenizer import load_tokenizer

SOURCES = ("auto", "roofline", "none")
"""What may predict the steps of a stand-in (`EngineConfig.step_time_profile`)."""
_UNUSED = (
    ("backend", "auto", "--backend chooses what computes steps"),
    ("enforce_eager", False, "--enforce-eager is of a GPU's graphs"),
    ("cuda_graph_pieces", False, "--cuda-graph-pieces is of a GPU's graphs"),
    ("threads", None, "--threads are of a forward pass"),
    ("speculative", None, "--speculative-config needs a model that verifies drafts"),
)


_PROCESS_BYTES = 128 << 20
"""Of a stand-in: its interpreter and tokenizer, as measured; its KV is a number a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInLoader:
    """Everything that can be refused has been; see `engine.load.ModelLoader`."""

    name: str
    description: StepTimeDescription
    """What it stands in for."""
    device: DeviceConfig
    """Where the stand-in itself runs, and the type that it stands in for."""
    limits: SchedulerConfig
    tokenizer_path: Path

    @property
    def deployment(self) -> str:
        """What it stands in for, in words."""
        tensor = self.description.parallelism.tensor
        devices = self.description.device.id if tensor == 1 else f"{tensor} x {self.description.device.id}"
        return f"{self.description.model.name} on {devices}"

    def step_seconds(self) -> Callable[[BatchShape], float]:
        """Return how long a step takes."""
        return roofline_predictor(self.description).step_time

    def load(self, on_progress: OnProgress) -> LoadedModel:
        """Make the KV cache, and run a first step."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        limits = self.limits
        on_progress(
            f"stand-in for {self.deployment} ({self.description.precision}): steps take their "
            f"predicted time, answers mean nothing; tokenizer of {self.tokenizer_path}"
        )
        say_limits(limits, on_progress)
        config = _model_config(self.description.model, tokenizer)
        forward = StandInForward(
            config,
            ordinary_ids=_ordinary_ids(tokenizer),
            step_seconds=self.step_seconds(),
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            settings={"backend": "stand-in", "stands_in_for": self.deployment},
        )
        runner = ModelRunner.within(limits, forward, StandInSampler())
        runner.warm_up()
        return LoadedModel(
            name=self.name,
            config=config,
            device=self.device,
            limits=limits,
            runner=runner,
            weights_format=None,
            embedding_format=None,
            stands_in_for=self.description,
        )


def stand_in_step_time(source: str, loaded: LoadedModel, on_progress: OnProgress) -> StepTime:
    """Return what predicts a stand-in's steps: the roofline that they follow, which learns all the same.

    Parameters
    ----------
    source : of `SOURCES`.
    """
    if source == "none":
        on_progress("step times: not predicted")
        return StepTime(None, None)
    what = loaded.stands_in_for
    assert what is not None
    model, tensor = what.predictor(), what.parallelism.tensor
    watch = StepWatch(
        StepOperations(what.model, what.precision),
        memory_bandwidth=tensor * what.device.memory_bandwidth,
        peak_flops=tensor * what.device.peak(what.precision.compute),
        drift=lambda: model.drift,
        was_measured=False,
    )
    return StepTime(model, watch, what)


def prepare_stand_in(config: EngineConfig) -> StandInLoader:
    """Look at what the stand-in is for, and at the limits.

    Raises
    ------
    ConfigError : the model, the device or a number format is not known, something does not go together, or
        the machine has no memory for so many.
    """
    _check(config)
    _check_memory(config.memory_share)
    device = find_device(config.device)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    precision = _precision(dtype)
    device.peak(precision.compute)
    description = StepTimeDescription(
        model=sizes_of(config.model),
        device=device,
        parallelism=Parallelism(tensor=config.tensor_parallel_size),
        precision=precision,
    )
    return StandInLoader(
        name=config.model.name,
        description=description,
        device=DeviceConfig(CPU, DTYPES[dtype], num_threads=1),
        limits=_limits(config, description),
        tokenizer_path=config.model.path,
    )


def _check_memory(share: MemoryShare | None) -> None:
    """Check that replicas beside one another have memory for their processes."""
    if share is None or share.num_shares == 1 or share.num_shares * _PROCESS_BYTES <= share.total_bytes:
        return
    raise ConfigError(
        f"each replica is a process of some {_PROCESS_BYTES >> 20} MiB, but this machine has "
        f"{share.total_bytes >> 20} MiB left for {share.num_shares} of them; "
        f"use --replicas {max(1, share.total_bytes // _PROCESS_BYTES)}"
    )


def sizes_of(files: ModelFiles) -> ModelSpec:
    """Return the sizes of a model: of the file's own, or by the name of a known one.

    Raises
    ------
    ConfigError : the model is not known, or its configuration cannot be used.
    """
    if files.kind == "gguf" and (files.name in KNOWN_MODELS or files.name.endswith(".gguf")):
        return model_spec_of(read_model_config(files), files.name)
    return find_model_spec(files.name)


def _check(config: EngineConfig) -> None:
    """Refuse what has no meaning without a model."""
    if config.device == "auto":
        raise ConfigError(
            f"a stand-in needs a device to stand in for: give --device, one of {', '.join(device_ids())}"
        )
    for name, unused, why in _UNUSED:
        if getattr(config, name) != unused:
            raise ConfigError(f"a stand-in computes nothing, but {why}; leave it out")
    for name, value in native_settings(config):
        flag = name.replace("_", "-")
        raise ConfigError(f"a stand-in has no weights for --{flag} {value}; leave it out")
    if config.step_time_profile not in SOURCES:
        raise ConfigError(
            f"the steps of a stand-in take the roofline's time, so --step-time-profile "
            f"{config.step_time_profile} cannot predict them; choose one of {', '.join(SOURCES)}"
        )


def _limits(config: EngineConfig, description: StepTimeDescription) -> SchedulerConfig:
    """Decide what the user left open, as the device's memory allows."""
    limits, kv_bytes = config.limits, config.kv_cache_memory_bytes
    model, size = description.model, limits.block_size
    if kv_bytes is None:
        num_blocks = _blocks_that_fit(limits, description, config.gpu_memory_utilization)
    else:
        block_bytes = int(model.kv_bytes_per_token(description.precision) * size)
        num_blocks = kv_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"{kv_bytes} bytes of KV cache hold no block: one of {size} tokens of {model.name} takes "
                f"{block_bytes} bytes; give the KV cache more memory"
            )
    longest = limits.max_model_len or model.max_position_embeddings
    num_blocks = min(num_blocks, limits.max_num_seqs * -(-longest // size))
    return settle(
        limits, num_blocks=num_blocks, model_len=model.max_position_embeddings, model=description.predictor()
    )


def _blocks_that_fit(limits: SchedulerLimits, what: StepTimeDescription, utilization: float) -> int:
    """Return the KV blocks that the device holds beside the weights.

    Raises
    ------
    DoesNotFit : it does not hold the longest request; the message says what was tried and fits.
    """
    largest = limits.max_num_batched_tokens
    if not isinstance(largest, int):
        is_by_time = composition(limits.policy or DEFAULT_POLICY).is_bound_by_time
        largest = largest_step(what.predictor(), limits.max_num_seqs) if is_by_time else LARGEST_BUDGET

    def num_blocks(parallelism: Parallelism, precision: Precision) -> int:
        return kv_capacity(
            what.model,
            what.device,
            parallelism=parallelism,
            precision=precision,
            block_size=limits.block_size,
            max_num_batched_tokens=largest,
            gpu_memory_utilization=utilization,
            least_tokens=min(limits.max_model_len or 1, what.model.max_position_embeddings),
        ).num_blocks

    def attempt(to: Change) -> None:
        replace(what, parallelism=Parallelism(to.tensor), precision=_precision(to.weights)).predictor()
        num_blocks(Parallelism(to.tensor), _precision(to.weights))

    try:
        return num_blocks(what.parallelism, what.precision)
    except DoesNotFit as error:
        is_wide = what.precision.weights == "fp32"
        now = Change(what.parallelism.tensor, 1, "float32" if is_wide else "bfloat16")
        formats = ("bfloat16",) if is_wide else ()
        choices = Choices(tensor="--tensor-parallel-size", pipeline=None, formats=formats)
        raise DoesNotFit(f"{error}. {what_fits(now, what.model, choices, attempt)}") from None


def _precision(dtype: str) -> Precision:
    """Return the number formats of a stand-in.

    Raises
    ------
    ConfigError : no step-time model knows them.
    """
    precision = precision_of(DTYPES[dtype])
    if precision is None:
        raise ConfigError(f"no step-time model knows {dtype}; choose --dtype bfloat16 or float32")
    return precision


def _model_config(spec: ModelSpec, tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        family="llama",
        architecture="stand-in",
        vocab_size=tokenizer.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        eos_token_ids=tokenizer.eos_token_ids,
    )


def _ordinary_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that have text."""
    special = {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}
    ids = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in special]
    return [token_id for token_id in ids if tokenizer.token_bytes(token_id)] or ids
