"""From what a person names (model, device, policy, limits) to what a simulation needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from onbeat.core.errors import ConfigError
from onbeat.core.slo import DEFAULT_SHED_ORDER, ShedMode, ShedOrder, SLOMode
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.device_spec import DeviceSpec, find_device
from onbeat.perfmodel.memory import KVCapacity, kv_capacity
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import default_token_budget, make_policy, queue_seconds
from onbeat.scheduler.replica.token_budget import choose_token_budget, mean_decode_context
from onbeat.simulator.acceptance import Acceptance
from onbeat.simulator.config import DisaggregationConfig, KVTransfer, PoolConfig, SimulationConfig
from onbeat.simulator.speculation import SpeculationSettings, beside_draft_model
from onbeat.workload.offered import OfferedLoad

AUTO = "auto"
DEFAULT_POLICY = "slo"
POOL_POLICY = "sarathi"
"""Where prompts and decodes have replicas of their own: each sees a part of a request only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationSettings:
    """Two pools instead of one: who runs prompts, who generates, and what lies between."""

    prefill_replicas: int
    decode_replicas: int
    bandwidth: float
    """Of one KV transfer, bytes per second."""
    latency: float = 0.0
    """Of one KV transfer, seconds."""
    decode_kv_tokens: int | None = None
    """Most KV tokens that a decode replica holds; None: what its memory takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """One configuration to simulate. None means: from the model and the memory."""

    model: str
    """A packaged name, a config.json or its directory."""
    device: str
    dtype: str = "bf16"
    kv_cache_dtype: str = AUTO
    """`auto` is bf16 for narrower weights, else the weights' own type."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    router: str = "round-robin"
    policy: str = DEFAULT_POLICY
    scheduling_policy: str = "fcfs"
    max_num_seqs: int = 256
    max_num_batched_tokens: int | Literal["auto"] | None = None
    """`auto`: the largest that keeps the TBT objective (Sarathi-Serve, OSDI 2024, section 4.3)."""
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    step_time: str = "roofline"
    profile: Path | None = None
    host_overhead: float = 0.0
    """Added to every step, seconds."""
    seed: int = 0
    max_concurrency: int | None = None
    declared_max_tokens: int | None = None
    """Output limit that every request declares; None: exactly its output length."""
    slo_mode: SLOMode = "stream"
    """What keeping a TBT objective means to a policy that plans with deadlines."""
    shed: ShedMode = ShedMode.RELEGATE
    """What every request asks for where its TTFT objective is predicted to be missed."""
    shed_order: ShedOrder = DEFAULT_SHED_ORDER
    """Which prompts the policy `slo` leaves behind where not all can be in time (`core.slo.SHED_ORDERS`)."""
    max_num_queued_reqs: int | None = None
    """Most requests that wait at a replica; None sets no limit."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that wait at a replica."""
    max_queue_seconds: float | None = None
    """Longest predicted wait for which a replica takes another request that is not in time or has no
    objective, seconds. 0 sets no limit; None is the policy's (`default_queue_seconds`)."""
    step_noise: float = 0.0
    """Standard deviation of the logarithm of a step's time over its prediction."""
    speculation: SpeculationSettings | None = None
    """None plans no drafts."""
    disaggregation: DisaggregationSettings | None = None

    @property
    def num_devices(self) -> int:
        """Devices that all replicas take."""
        pools = self.disaggregation
        count = self.replicas if pools is None else pools.prefill_replicas + pools.decode_replicas
        return count * self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Everything that `simulate` takes but the load, and what a report says of it."""

    config: SimulationConfig
    step_time: StepTimeModel
    model: ModelSpec
    draft: ModelSpec | None
    """What makes drafts, where a model does."""
    device: DeviceSpec
    parallelism: Parallelism
    precision: Precision
    memory: KVCapacity | None
    """None where the number of blocks was given."""
    num_devices: int


def build_simulation(
    settings: ReplicaSettings, *, tbt: float | None = None, context_tokens: int | None = None
) -> Simulation:
    """Resolve a configuration.

    Parameters
    ----------
    settings : what was asked for.
    tbt : objective that an automatic token budget keeps, seconds.
    context_tokens : mean context of the decodes beside which an automatic budget must do, tokens; None is
        half the longest request.

    Raises
    ------
    ConfigError : an unknown name, sizes that do not fit together, or a model that does not fit the devices.
    """
    model = find_model_spec(settings.model)
    device = find_device(settings.device)
    parallelism = _parallelism(settings)
    precision = _precision(settings)
    draft = None if settings.speculation is None else settings.speculation.draft_spec(model)
    target_time = make_step_time_model(
        settings.step_time,
        model=model,
        device=device,
        parallelism=parallelism,
        precision=precision,
        profile=settings.profile,
    )
    draft_time = None if draft is None else _roofline(settings, draft, device, precision)
    step_time = target_time if draft_time is None else SpeculativeStepTime(target_time, draft_time)
    has_own_kv = settings.speculation is not None and settings.speculation.draft_model is not None
    memory = None
    if settings.num_blocks is None:
        memory = _memory(settings, model, device, precision)
        if draft is not None and has_own_kv:
            memory = beside_draft_model(memory, _memory(settings, draft, device, precision))
    num_blocks = settings.num_blocks if memory is None else memory.num_blocks
    assert num_blocks is not None
    max_model_len = _max_model_len(settings, model, num_blocks)
    context = context_tokens or max_model_len // 2
    scheduler = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=_token_budget(
            settings, max_model_len, lambda tbt_: _choose(step_time, settings, tbt_, context), tbt
        ),
        policy=settings.policy,
        scheduling_policy=settings.scheduling_policy,
        enable_prefix_caching=settings.enable_prefix_caching,
        num_micro_batches=settings.pipeline_parallel,
        slo_mode=settings.slo_mode,
        shed_order=settings.shed_order,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        max_queue_seconds=queue_seconds(settings.policy, settings.max_queue_seconds),
        speculation=None if settings.speculation is None else settings.speculation.for_scheduler(),
    )
    make_policy(scheduler)  # refuses what does not go together before anything runs
    return Simulation(
        config=SimulationConfig(
            scheduler=scheduler,
            num_replicas=settings.replicas,
            router=settings.router,
            host_overhead=settings.host_overhead,
            pipeline=settings.pipeline_parallel,
            seed=settings.seed,
            max_concurrency=settings.max_concurrency,
            declared_max_tokens=settings.declared_max_tokens,
            shed=settings.shed,
            step_noise=settings.step_noise,
            acceptance=Acceptance() if settings.speculation is None else settings.speculation.acceptance,
            disaggregation=_disaggregation(settings, scheduler, step_time, model, precision),
        ),
        step_time=step_time,
        model=model,
        draft=draft,
        device=device,
        parallelism=parallelism,
        precision=precision,
        memory=memory,
        num_devices=settings.num_devices,
    )


def build_for_load(
    settings: ReplicaSettings, make: Callable[[int], OfferedLoad], *, tbt: float | None = None
) -> tuple[Simulation, OfferedLoad]:
    """Resolve a configuration and the load that it gets.

    An automatic token budget is chosen beside decodes with the load's own mean context, as far as a full
    batch has KV memory for it.

    Parameters
    ----------
    make : from the longest request that the replica takes, in tokens, to the load.
    tbt : objective that an automatic token budget keeps, seconds.

    Raises
    ------
    ConfigError : see `build_simulation`; and whatever `make` raises.
    """
    if settings.max_num_batched_tokens != AUTO:
        simulation = build_simulation(settings, tbt=tbt)
        return simulation, make(simulation.config.scheduler.max_model_len)
    limits = build_simulation(replace(settings, max_num_batched_tokens=None)).config.scheduler
    load = make(limits.max_model_len)
    context = decode_context(load, limits)
    return build_simulation(settings, tbt=tbt, context_tokens=context), load


def decode_context(load: OfferedLoad, limits: SchedulerConfig) -> int:
    """Return the mean context of a decode: the load's, or what a full batch has KV memory for."""
    context = mean_decode_context(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist())
    return max(1, min(context, limits.num_blocks * limits.block_size // limits.max_num_seqs))


def _roofline(
    settings: ReplicaSettings, draft: ModelSpec, device: DeviceSpec, precision: Precision
) -> Predictor:
    """Return the step times of a draft model: what is measured, if anything is, is the target."""
    return make_step_time_model(
        "roofline", model=draft, device=device, parallelism=_parallelism(settings), precision=precision
    )


def _memory(
    settings: ReplicaSettings, model: ModelSpec, device: DeviceSpec, precision: Precision
) -> KVCapacity:
    return kv_capacity(
        model,
        device,
        parallelism=_parallelism(settings),
        precision=precision,
        block_size=settings.block_size,
        max_num_batched_tokens=_largest_step(settings),
        gpu_memory_utilization=settings.gpu_memory_utilization,
    )


def _parallelism(settings: ReplicaSettings) -> Parallelism:
    return Parallelism(tensor=settings.tensor_parallel, pipeline=settings.pipeline_parallel)


def _precision(settings: ReplicaSettings) -> Precision:
    weights, kv = settings.dtype, settings.kv_cache_dtype
    if kv == AUTO:
        kv = weights if weights in ("fp32", "bf16", "fp16") else "bf16"
    compute = {"int8": "int8", "fp8": "fp8", "int4": "bf16"}.get(weights, weights)
    return Precision(weights=weights, kv=kv, compute=compute)


def _largest_step(settings: ReplicaSettings) -> int:
    """Return the tokens of the largest step, for the memory of its activations."""
    given = settings.max_num_batched_tokens
    return given if isinstance(given, int) else 8192


def _max_model_len(settings: ReplicaSettings, model: ModelSpec, num_blocks: int) -> int:
    """Return the longest request: what was asked for, or the model's own, cut to the KV cache."""
    limit = model.max_position_embeddings
    if settings.max_model_len is None:
        return min(limit, num_blocks * settings.block_size)
    if settings.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len is {settings.max_model_len}, but {model.name} was made for {limit} tokens; "
            "give a smaller one"
        )
    return settings.max_model_len


def _token_budget(
    settings: ReplicaSettings, max_model_len: int, choose: Callable[[float], int], tbt: float | None
) -> int:
    given = settings.max_num_batched_tokens
    if given is None:
        return default_token_budget(
            settings.policy, max_model_len=max_model_len, max_num_seqs=settings.max_num_seqs
        )
    if given != AUTO:
        assert isinstance(given, int)
        return given
    if tbt is None:
        raise ConfigError(
            "--max-num-batched-tokens auto chooses the largest step that keeps the TBT objective, but there "
            "is none; give --slo-tbt-ms"
        )
    return choose(tbt)


def _choose(model: StepTimeModel, settings: ReplicaSettings, tbt: float, context_tokens: int) -> int:
    return choose_token_budget(
        model,
        tbt=tbt - settings.host_overhead,
        max_num_seqs=settings.max_num_seqs,
        context_tokens=context_tokens,
    )


def _disaggregation(
    settings: ReplicaSettings,
    scheduler: SchedulerConfig,
    step_time: StepTimeModel,
    model: ModelSpec,
    precision: Precision,
) -> DisaggregationConfig | None:
    pools = settings.disaggregation
    if pools is None:
        return None
    return DisaggregationConfig(
        # A prompt's first token is all that its replica delivers: there is nothing to draft.
        prefill=PoolConfig(
            num_replicas=pools.prefill_replicas,
            scheduler=replace(scheduler, speculation=None),
            step_time=step_time,
        ),
        decode=PoolConfig(num_replicas=pools.decode_replicas, scheduler=scheduler, step_time=step_time),
        transfer=KVTransfer(
            bytes_per_token=model.kv_bytes_per_token(precision),
            bandwidth=pools.bandwidth,
            latency=pools.latency,
        ),
        decode_kv_cap_tokens=pools.decode_kv_tokens,
    )
