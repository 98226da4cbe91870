"""From what a person names (model, device, policy, limits) to what a simulation needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.kinds import as_settings
from onbeat.core.options import change
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.device_spec import DeviceSpec, find_device
from onbeat.perfmodel.engines import NO_ENGINE, described_terms
from onbeat.perfmodel.fit_errors import FitErrors
from onbeat.perfmodel.memory import Change, Choices, KVCapacity, kv_capacity, what_fits
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision, narrower_formats, precision_by_weights
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.replica.policies import composition, largest_step, settle
from onbeat.scheduler.replica.token_budget import LARGEST_BUDGET, choose_token_budget, mean_decode_context
from onbeat.scheduler.scheduler_config import DEFAULT_POLICY, SchedulerConfig
from onbeat.simulator.draft_acceptance import Acceptance
from onbeat.simulator.settings import AUTO, ReplicaSettings
from onbeat.simulator.simulation_config import FleetTimes, KVLink, ReplicaKind, SimulationConfig
from onbeat.simulator.speculation import beside_draft_model
from onbeat.workload.offered import LongerThanContext, OfferedLoad

POOL_BANDWIDTH = 200e9 / 8
"""Bytes per second between replicas that compute prompts and those that generate, unless somebody says
otherwise: an InfiniBand HDR link."""
CHOICES = Choices()
"""What `simulate` and `capacity` let their users change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Everything that `simulate` takes but the load, and what a report says of it."""

    config: SimulationConfig
    step_time: StepTimeModel
    step_times: str
    """What predicts them, for a reader: with its error on held-back steps, where it was fitted to some."""
    model: ModelSpec
    draft: ModelSpec | None
    """What makes drafts, where a model does."""
    device: DeviceSpec
    parallelism: Parallelism
    precision: Precision
    memory: KVCapacity | None
    """None where the number of blocks was given."""
    kind: ReplicaKind
    """What one replica is, of the first kind."""
    num_devices: int


def build_simulation(
    settings: ReplicaSettings,
    *,
    tbt: float | None = None,
    context_tokens: int | None = None,
    choices: Choices = CHOICES,
) -> Simulation:
    """Resolve a configuration.

    Parameters
    ----------
    settings : what was asked for.
    tbt : objective that an automatic token budget keeps, seconds.
    context_tokens : mean context of the decodes beside which an automatic budget must do, tokens; None is
        half the longest request.
    choices : what may be changed where the model does not fit, and its flags.

    Raises
    ------
    DoesNotFit : memory holds no model and request of this size; the message says what was tried and fits.
    ConfigError : an unknown name, or sizes that do not fit together.
    """
    if settings.fleet.kinds:
        return _build_mixed(settings, tbt=tbt, context_tokens=context_tokens)
    try:
        return _build(settings, tbt, context_tokens)
    except DoesNotFit as error:

        def attempt(to: Change) -> None:
            own = {"tensor_parallel": to.tensor, "pipeline_parallel": to.pipeline, "dtype": to.weights}
            _build(change(settings, **own), tbt, context_tokens)

        now = Change(settings.tensor_parallel, settings.pipeline_parallel, settings.dtype)
        choices = replace(choices, formats=narrower_formats(settings.dtype))
        cure = what_fits(now, find_model_spec(settings.model), choices, attempt)
        raise DoesNotFit(f"{error}. {cure}") from None


def _build(settings: ReplicaSettings, tbt: float | None, context_tokens: int | None) -> Simulation:
    """Resolve a configuration of equal replicas."""
    model = find_model_spec(settings.model)
    device = find_device(settings.device)
    parallelism = _parallelism(settings)
    precision = _precision(settings, device)
    draft = None if settings.speculation is None else settings.speculation.draft_spec(model)
    target_time = make_step_time_model(
        settings.step_time,
        model=model,
        device=device,
        parallelism=parallelism,
        precision=precision,
        profile=settings.profile,
        engine=_engine(settings),
    )
    draft_time = None if draft is None else _roofline(settings, draft, device, precision)
    step_time = target_time if draft_time is None else SpeculativeStepTime(target_time, draft_time)
    has_own_kv = settings.speculation is not None and settings.speculation.draft_model is not None
    memory = None
    if settings.num_blocks is None:
        largest = _largest_step(settings, target_time)
        memory = _memory(settings, model, device, precision, largest)
        if draft is not None and has_own_kv:
            own = _memory(settings, draft, device, precision, largest)
            memory = beside_draft_model(memory, own, _least_tokens(settings, model))
    num_blocks = settings.num_blocks if memory is None else memory.num_blocks
    assert num_blocks is not None
    scheduler = settle(
        settings.limits,
        num_blocks=num_blocks,
        model_len=model.max_position_embeddings,
        choose_budget=lambda longest: _choose_budget(
            step_time, settings, tbt, context_tokens or longest // 2
        ),
        model=target_time,
        num_micro_batches=settings.pipeline_parallel,
        speculation=None if settings.speculation is None else settings.speculation.for_scheduler(),
    )
    kv_link = make_link(settings, model, precision)
    kind = ReplicaKind(
        scheduler=scheduler,
        step_time=step_time,
        device=device.id,
        memory_bandwidth=device.memory_bandwidth * parallelism.num_devices,
    )
    return Simulation(
        config=SimulationConfig(
            scheduler=scheduler,
            fleet=settings.fleet,
            fleet_changes=settings.fleet_changes,
            fleet_times=FleetTimes(start=settings.start_seconds, drain=settings.drain_seconds),
            host_overhead=settings.host_overhead,
            request_overhead=_request_overhead(settings, target_time),
            pipeline=settings.pipeline_parallel,
            seed=settings.seed,
            max_concurrency=settings.max_concurrency,
            declared_max_tokens=settings.declared_max_tokens,
            shed=settings.shed,
            step_noise=settings.step_noise,
            guided_share=settings.guided_share,
            steps_ahead=_steps_ahead(settings, target_time),
            acceptance=Acceptance() if settings.speculation is None else settings.speculation.acceptance,
            kv_link=kv_link,
            kinds=() if kv_link is None else _without_drafts(settings, (kind,)),
        ),
        step_time=step_time,
        step_times=_described(settings, target_time.errors),
        model=model,
        draft=draft,
        device=device,
        parallelism=parallelism,
        precision=precision,
        memory=memory,
        kind=kind,
        num_devices=settings.fleet.most_replicas * parallelism.num_devices,
    )


def _build_mixed(settings: ReplicaSettings, *, tbt: float | None, context_tokens: int | None) -> Simulation:
    """Resolve a fleet of several kinds; what is said of one replica is said of the first."""
    built = []
    alone = replace(settings, fleet=FleetConfig(), kv_bandwidth=None, kv_latency=0.0)
    for each in settings.fleet.kinds:
        own = as_settings(each, "device", "tensor_parallel", "policy")
        simulation = build_simulation(
            change(alone, **own),
            tbt=tbt,
            context_tokens=context_tokens,
            choices=Choices(tensor="tp of that kind"),
        )
        built.append((simulation, each.replicas))
    first = built[0][0]
    kinds = tuple(simulation.kind for simulation, count in built for _ in range(count))
    config = replace(
        first.config,
        fleet=settings.fleet,
        kv_link=make_link(settings, first.model, first.precision),
        kinds=_without_drafts(settings, kinds),
    )
    num_devices = sum(simulation.num_devices * count for simulation, count in built)
    return replace(first, config=config, num_devices=num_devices)


def make_link(settings: ReplicaSettings, model: ModelSpec, precision: Precision) -> KVLink | None:
    """Return what lies between the replicas; None where requests do not go on elsewhere with their KV."""
    bandwidth = settings.kv_bandwidth
    if bandwidth is None and settings.fleet.disaggregate is None:
        return None
    return KVLink(
        bytes_per_token=model.kv_bytes_per_token(precision),
        bandwidth=bandwidth or POOL_BANDWIDTH,
        latency=settings.kv_latency,
    )


def _without_drafts(settings: ReplicaSettings, kinds: tuple[ReplicaKind, ...]) -> tuple[ReplicaKind, ...]:
    """Return what the replicas are; those that compute prompts plan no drafts.

    A prompt's first token is nearly all that its replica delivers: there is nothing to draft.
    """
    pools = settings.fleet.disaggregate
    if pools is None or settings.speculation is None:
        return kinds
    kinds += (kinds[-1],) * (pools.prefill + 1 - len(kinds))
    prefill = [replace(each, scheduler=replace(each.scheduler, speculation=None)) for each in kinds]
    return (*prefill[: pools.prefill], *kinds[pools.prefill :])


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
    is_auto = settings.limits.max_num_batched_tokens == AUTO
    first = change(settings, max_num_batched_tokens=None) if is_auto else settings
    simulation = build_simulation(first, tbt=tbt)
    try:
        load = make(simulation.config.max_model_len)
    except LongerThanContext as error:
        raise what_binds(first, error) from None
    if not is_auto:
        return simulation, load
    context = decode_context(load, simulation.config.scheduler)
    return build_simulation(settings, tbt=tbt, context_tokens=context), load


def what_binds(
    settings: ReplicaSettings, error: LongerThanContext, choices: Choices = CHOICES
) -> ConfigError:
    """Return why a replica's context is too short for a load: what was given, the model, or memory."""
    longest = find_model_spec(settings.model).max_position_embeddings
    if error.num_tokens > longest:
        return ConfigError(f"{error}. The model was made for {longest} tokens")
    given = settings.limits.max_model_len
    try:
        build_simulation(change(settings, max_model_len=error.num_tokens), choices=choices)
    except ConfigError as cause:
        return type(cause)(f"{error}. A longer context: {cause}")
    return ConfigError(f"{error}. --max-model-len is {given}; give --max-model-len {error.num_tokens}")


def decode_context(load: OfferedLoad, limits: SchedulerConfig) -> int:
    """Return the mean context of a decode: the load's, or what a full batch has KV memory for."""
    context = mean_decode_context(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist())
    return max(1, min(context, limits.num_blocks * limits.block_size // limits.max_num_seqs))


def _roofline(
    settings: ReplicaSettings, draft: ModelSpec, device: DeviceSpec, precision: Precision
) -> Predictor:
    """Return the step times of a draft model: what is measured, if anything is, is the target."""
    return make_step_time_model(
        "roofline",
        model=draft,
        device=device,
        parallelism=_parallelism(settings),
        precision=precision,
        engine=_engine(settings),
    )


def _engine(settings: ReplicaSettings) -> str | None:
    return None if settings.engine == NO_ENGINE else settings.engine


def _described(settings: ReplicaSettings, errors: FitErrors | None) -> str:
    name = described_times(settings)
    return name if errors is None else f"{name}, fitted to measured steps (relative error: {errors})"


def described_times(settings: ReplicaSettings) -> str:
    """Return the name of the step times, and from which version of an engine on its terms hold."""
    engine = _engine(settings)
    if engine is None:
        return settings.step_time
    return f"{settings.step_time} of {described_terms(engine)}"


def _steps_ahead(settings: ReplicaSettings, step_time: Predictor) -> int:
    """Return how many steps the engine plans ahead: none through stages, where vLLM refuses it too."""
    return 0 if settings.pipeline_parallel > 1 else step_time.server.steps_ahead


def _request_overhead(settings: ReplicaSettings, step_time: Predictor) -> float:
    given = settings.request_overhead
    return step_time.server.request_seconds if given is None else given


def _memory(
    settings: ReplicaSettings, model: ModelSpec, device: DeviceSpec, precision: Precision, largest: int
) -> KVCapacity:
    return kv_capacity(
        model,
        device,
        parallelism=_parallelism(settings),
        precision=precision,
        block_size=settings.limits.block_size,
        max_num_batched_tokens=largest,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        least_tokens=_least_tokens(settings, model),
    )


def _least_tokens(settings: ReplicaSettings, model: ModelSpec) -> int:
    """Return what the KV cache must hold: the longest request, where somebody said how long that is."""
    return min(settings.limits.max_model_len or 1, model.max_position_embeddings)


def _parallelism(settings: ReplicaSettings) -> Parallelism:
    return Parallelism(tensor=settings.tensor_parallel, pipeline=settings.pipeline_parallel)


def _precision(settings: ReplicaSettings, device: DeviceSpec) -> Precision:
    kv = settings.kv_cache_dtype
    return precision_by_weights(settings.dtype, kv=None if kv == AUTO else kv, computes=device.peak_flops)


def _largest_step(settings: ReplicaSettings, step_time: StepTimeModel) -> int:
    """Return the tokens of the largest step, for the memory of its activations."""
    limits = settings.limits
    if isinstance(limits.max_num_batched_tokens, int):
        return limits.max_num_batched_tokens
    if composition(limits.policy or DEFAULT_POLICY).is_bound_by_time:
        return largest_step(step_time, limits.max_num_seqs)
    return LARGEST_BUDGET


def _choose_budget(
    model: StepTimeModel, settings: ReplicaSettings, tbt: float | None, context_tokens: int
) -> int:
    """Return the largest token budget that keeps the objective (Sarathi-Serve, OSDI 2024, section 4.3)."""
    if tbt is None:
        raise ConfigError(
            "--max-num-batched-tokens auto chooses the largest step that keeps the TBT objective, but there "
            "is none; give --slo-tbt-ms"
        )
    return choose_token_budget(
        model,
        tbt=tbt - settings.host_overhead,
        max_num_seqs=settings.limits.max_num_seqs,
        context_tokens=context_tokens,
    )
