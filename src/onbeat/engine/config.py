"""Configuration of one engine; imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.slo import DEFAULT_SHED_ORDER, SLO, ShedOrder, SLOMode
from onbeat.engine.speculation.config import SpeculativeConfig
from onbeat.hub.files import ModelFiles

DTYPES = ("auto", "float32", "bfloat16", "float64")
LOAD_FORMATS = ("auto", "dummy")
BackendName = Literal["auto", "native", "torch"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
Quantization = Literal["auto", "none", "int8"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
DEFAULT_STEP_TIME = "auto"
STEP_TIME_CHOICES = ("auto", "calibrate", "roofline", "none")
"""`auto`: the profile of this model and machine in the cache, else the roofline. `calibrate`: some seconds of
measuring at start. `roofline`: the sizes of the model and the limits of the device alone. `none`: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine loads and how it runs. None means: decided at start, and said."""

    model: ModelFiles
    dtype: str = "auto"
    """`auto` is bfloat16 where the device computes in it natively, else float32."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    load_format: str = "auto"
    """`dummy` gives random weights of the model's configuration."""
    seed: int = 0
    """Seed of dummy weights."""
    threads: int | None = None
    """CPU threads of a forward pass, of all ranks together."""
    tensor_parallel_size: int = 1
    """Processes that the model is split among: on the CPU, by torch."""
    backend: BackendName = "auto"
    """What computes steps. `native`: onbeat's own CPU engine. `torch`: any device and dtype. `auto`: native
    where it can run, else torch."""
    quantization: Quantization = "auto"
    """Of weights. `auto`: as in the file, which the torch backend dequantizes. `none`: all in `dtype`.
    `int8`: all matrices in 8 bits, with a scale for 32 neighbours (native backend only)."""
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    policy: str = "slo"
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    """Plan the next step while the current one runs."""
    speculative: SpeculativeConfig | None = None
    """Draft tokens and what proposes them; None decodes without."""
    slo_mode: SLOMode = "stream"
    """What keeping a TBT objective means (`core.slo.SLO_MODES`)."""
    shed_order: ShedOrder = DEFAULT_SHED_ORDER
    """Which prompts the policy `slo` leaves behind where not all can be in time (`core.slo.SHED_ORDERS`)."""
    max_num_queued_reqs: int | None = None
    """Most requests that wait; more are refused. None sets no limit."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that wait, likewise."""
    max_queue_seconds: float | None = None
    """Longest predicted wait for which another request is taken that is not in time or has no objective,
    seconds. 0 sets no limit; None is the policy's (`scheduler.replica.policies.queue_seconds`)."""
    slo_classes: Mapping[str, SLO] = field(default_factory=dict)
    """Objectives that requests may carry, by class: at start the engine says which it cannot meet."""
    step_time_profile: str = DEFAULT_STEP_TIME
    """What predicts step times: a file of `onbeat profile`, or one of `STEP_TIME_CHOICES`."""
    record: Path | None = None
    """File that takes every call of the scheduler, for a replay."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        for name, value, choices in (
            ("load format", self.load_format, LOAD_FORMATS),
            ("backend", self.backend, BACKENDS),
            ("quantization", self.quantization, QUANTIZATIONS),
        ):
            if value not in choices:
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")
        if self.max_queue_seconds is not None and not 0 <= self.max_queue_seconds < inf:
            raise ConfigError(
                f"max_queue_seconds is {self.max_queue_seconds}; it must be seconds, 0 for no limit"
            )
        for name in (
            *("threads", "tensor_parallel_size", "kv_cache_memory_bytes", "max_model_len"),
            *("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens"),
        ):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}; it must be at least 1")
