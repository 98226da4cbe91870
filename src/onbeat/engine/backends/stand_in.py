"""From a configuration to a stand-in: sizes, device, limits, vocabulary, step times."""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.protocols import Tokenizer
from onbeat.core.step_time import StepTimeModel
from onbeat.engine.backends.base import Backend, CheckpointBackend, Room, SettleLimits
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import DTYPES
from onbeat.engine.engine_config import EngineConfig, MemoryShare, native_settings
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_config import ModelConfig, RopeConfig
from onbeat.engine.progress import OnProgress
from onbeat.engine.speculation.verifier import TokenSampler
from onbeat.engine.stand_in.forward import StandInForward, StandInSampler
from onbeat.engine.step_time_spec import model_spec_of, precision_of
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
from onbeat.scheduler.replica.policies import composition, largest_step
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


class StandInBackend(Backend):
    """No model: steps take the time that the roofline predicts for another device.

    Parameters
    ----------
    config : what it stands in for, and the limits.

    Raises
    ------
    ConfigError : the model, the device or a number format is not known, something does not go together, or
        the machine has no memory for so many.
    """

    description = "by a stand-in"

    def __init__(self, config: EngineConfig) -> None:
        _check(config)
        _check_memory(config.memory_share)
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        device, precision = find_device(config.device), _precision(dtype)
        device.peak(precision.compute)
        self.name = config.model.name
        self.stands_in_for = self._what = StepTimeDescription(
            model=sizes_of(config.model),
            device=device,
            parallelism=Parallelism(tensor=config.tensor_parallel_size),
            precision=precision,
        )
        self.device = DeviceConfig(CPU, DTYPES[dtype], num_threads=1)
        self._tokenizer_path = config.model.path
        self._tokenizer = load_tokenizer(config.model.path)
        self.model = _model_config(self._what.model, self._tokenizer)
        tensor = self._what.parallelism.tensor
        devices = device.id if tensor == 1 else f"{tensor} x {device.id}"
        self.deployment = f"{self._what.model.name} on {devices}"
        """What it stands in for, in words."""

    def headline(self) -> str:
        """Say what it stands in for, and that answers mean nothing."""
        return (
            f"stand-in for {self.deployment} ({self._what.precision}): steps take their predicted time, "
            f"answers mean nothing; tokenizer of {self._tokenizer_path}"
        )

    def ahead(self) -> StepTimeModel:
        """Return what steps will take."""
        return self._what.predictor()

    def fit(
        self,
        config: EngineConfig,
        settle: SettleLimits,
        draft: CheckpointBackend | None = None,  # noqa: ARG002 -- which `_check` refuses
    ) -> SchedulerConfig:
        """Decide what the user left open, as the memory of the other device allows."""
        return settle(_num_blocks(config, self._what))

    def build(
        self,
        limits: SchedulerConfig,
        say: OnProgress,  # noqa: ARG002
        room: Room | None = None,  # noqa: ARG002
    ) -> tuple[ForwardPass, SchedulerConfig]:
        """Make the KV cache."""
        forward = StandInForward(
            self.model,
            ordinary_ids=_ordinary_ids(self._tokenizer),
            step_seconds=roofline_predictor(self._what).step_time,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            settings={"backend": "stand-in", "stands_in_for": self.deployment},
        )
        return forward, limits

    def sampler(self) -> TokenSampler:
        """Return what takes the tokens that the stand-in makes up."""
        return StandInSampler()


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


def _num_blocks(config: EngineConfig, description: StepTimeDescription) -> int:
    limits, kv_bytes, model = config.limits, config.kv_cache_memory_bytes, description.model
    if kv_bytes is None:
        return _blocks_that_fit(limits, description, config.gpu_memory_utilization)
    block_bytes = int(model.kv_bytes_per_token(description.precision) * limits.block_size)
    if kv_bytes < block_bytes:
        raise ConfigError(
            f"{kv_bytes} bytes of KV cache hold no block: one of {limits.block_size} tokens of {model.name} "
            f"takes {block_bytes} bytes; give the KV cache more memory"
        )
    return kv_bytes // block_bytes


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
