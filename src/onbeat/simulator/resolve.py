"""From what a person names of a simulation to what it is: once, and in one direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.kinds import as_settings
from onbeat.core.options import change
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.engines import NO_ENGINE, described_terms
from onbeat.perfmodel.fitted import FitErrors, FitTarget
from onbeat.perfmodel.memory import (
    Change,
    Choices,
    KVCapacity,
    held_bytes_per_token,
    kv_bytes_in_blocks,
    kv_capacity,
    kv_groups,
    what_fits,
)
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.models import by_data_sheet, make_step_time_model
from onbeat.perfmodel.precision import Precision, narrower_formats, precision_by_weights
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.scheduler import scheduler_config
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.replica.policies import check_policy
from onbeat.scheduler.replica.token_budget import (
    choose_token_budget,
    mean_decode_context,
    most_step_tokens,
    settle,
)
from onbeat.simulator.deployment import AUTO, Deployment
from onbeat.simulator.replay.history import read_acceptance
from onbeat.simulator.simulation_config import FleetTerms, KVLink, ReplicaKind, SimulationConfig
from onbeat.simulator.speculation import Acceptance, beside_draft_model, draft_model
from onbeat.workload.load import Load, tightest_tbt
from onbeat.workload.offered import LongerThanContext, OfferedLoad
from onbeat.workload.slo_classes import SLOClass

POOL_BANDWIDTH = 200e9 / 8
"""Bytes per second between two pools, unless somebody says otherwise: an InfiniBand HDR link."""
CHOICES = Choices()
"""What `simulate` and `capacity` let their users change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a deployment is, without any names: what `simulate` takes beside a load, and what reports say."""

    config: SimulationConfig
    step_time: StepTimeModel
    errors: FitErrors | None
    """Of the step times on held-back steps; None where they were fitted to none."""
    target: FitTarget
    draft: ModelSpec | None
    """What makes drafts, where a model does."""
    memory: KVCapacity | None
    """None where the number of blocks was given."""
    num_devices: int

    @property
    def kind(self) -> ReplicaKind:
        """What one replica is, of the first kind."""
        return ReplicaKind(
            scheduler=self.config.scheduler,
            step_time=self.step_time,
            device=self.target.device.id,
            memory_bandwidth=self.target.device.memory_bandwidth * self.target.parallelism.num_devices,
        )


def resolve(
    deployment: Deployment,
    *,
    tbt: float | None = None,
    context_tokens: int | None = None,
    choices: Choices = CHOICES,
) -> Resolved:
    """Return what a deployment is.

    Parameters
    ----------
    tbt : objective that an automatic token budget keeps, seconds.
    context_tokens : mean context of the decodes beside which an automatic budget must do, tokens; None is
        half the longest request.
    choices : what may be changed where the model does not fit, and its flags.

    Raises
    ------
    DoesNotFit : memory holds no model and request of this size; the message says what was tried and fits.
    ConfigError : an unknown name, or sizes that do not fit together.
    """
    resolved = _fitted(deployment, choices)
    return _with_budget(resolved, tbt, context_tokens) if _is_auto(deployment) else resolved


def _is_auto(deployment: Deployment) -> bool:
    return deployment.limits.max_num_batched_tokens == AUTO


def _fitted(deployment: Deployment, choices: Choices = CHOICES) -> Resolved:
    """Return what a deployment is but for an automatic token budget, with the cure where it does not fit."""
    if deployment.fleet.kinds:
        return _resolve_kinds(deployment)
    try:
        return _resolve(deployment)
    except DoesNotFit as error:

        def attempt(to: Change) -> None:
            own = {"tensor_parallel": to.tensor, "pipeline_parallel": to.pipeline, "dtype": to.weights}
            _resolve(change(deployment, **own))

        now = Change(deployment.tensor_parallel, deployment.pipeline_parallel, deployment.dtype)
        choices = replace(choices, formats=narrower_formats(deployment.dtype))
        cure = what_fits(now, find_model_spec(deployment.model), choices, attempt)
        raise DoesNotFit(f"{error}. {cure}") from None


def _resolve(said: Deployment) -> Resolved:
    """Resolve a deployment of equal replicas, from its names to its numbers."""
    limits, speculative = said.limits, said.drafts.speculative
    if _is_auto(said):
        limits = replace(limits, max_num_batched_tokens=None)
    model, device = find_model_spec(said.model), find_device(said.device)
    draft = None if speculative is None else draft_model(speculative, model)
    parallelism = Parallelism(tensor=said.tensor_parallel, pipeline=said.pipeline_parallel)
    num_devices = said.fleet.most_replicas * parallelism.num_devices
    kv = None if said.kv_cache_dtype == AUTO else said.kv_cache_dtype
    precision = precision_by_weights(said.dtype, kv=kv, computes=device.peak_flops)
    engine = None if said.engine == NO_ENGINE else said.engine

    target = FitTarget(model=model, device=device, parallelism=parallelism, precision=precision)
    target_time = make_step_time_model(said.step_time, target, profile=said.profile, engine=engine)
    if (measured := target_time.precision) is not None:
        if kv not in (None, measured.kv):
            raise ConfigError(
                f"the profile {said.profile} is of a KV cache in {measured.kv}, not {kv}; leave "
                "--kv-cache-dtype out, or name a profile that matches"
            )
        precision, target = measured, replace(target, precision=measured)
    ahead = by_data_sheet(target)
    # A draft model has a roofline: what is measured, if anything is, is the target.
    step_time: StepTimeModel = target_time
    if draft is not None:
        draft_time = make_step_time_model("roofline", replace(target, model=draft), engine=engine)
        step_time = SpeculativeStepTime(target_time, draft_time)
    # What the KV cache must hold: the longest request, where somebody said how long that is.
    least = min(limits.max_model_len or 1, model.max_position_embeddings)
    longest = limits.max_model_len or model.max_position_embeddings
    windows = kv_groups(model).windows(model.sliding_window, longest) if draft is None else {}
    own, memory, num_blocks = None, None, said.num_blocks
    if num_blocks is None:
        holds = partial(
            kv_capacity,
            block_size=limits.block_size or scheduler_config.DEFAULT_BLOCK_SIZE,
            max_num_batched_tokens=most_step_tokens(limits, ahead),
            gpu_memory_utilization=said.gpu_memory_utilization,
            least_tokens=least,
            num_tables=windows.get("num_tables", 1),
            window_length=windows.get("window_length", 0),
        )
        own = memory = holds(target)
        if draft is not None:
            memory = beside_draft_model(own, holds(replace(target, model=draft)), least)
        num_blocks = memory.num_blocks
    num_snapshots = None
    if model.state_bytes:
        limits, num_snapshots, memory = _with_states(said, limits, own, memory, model, precision)
        num_blocks = num_blocks if memory is None else memory.num_blocks

    server, record = target_time.server, said.drafts.acceptance_record
    config = SimulationConfig(
        **{each.name: getattr(said, each.name) for each in fields(FleetTerms)},
        scheduler=settle(
            limits,
            num_blocks=num_blocks,
            model_len=model.max_position_embeddings,
            model=ahead,
            num_micro_batches=said.pipeline_parallel,
            speculation=None if speculative is None else speculative.for_scheduler(),
            **windows,
        ),
        request_overhead=server.request_seconds if said.request_overhead is None else said.request_overhead,
        # None through stages, where vLLM refuses it too.
        steps_ahead=0 if said.pipeline_parallel > 1 else server.steps_ahead,
        acceptance=said.drafts.acceptance(Acceptance() if record is None else read_acceptance(record)),
        kv_link=_link(said, target, windows.get("num_tables", 1)) if said.hands_over else None,
    )
    config = replace(config, scheduler=replace(config.scheduler, num_snapshots=num_snapshots))
    resolved = Resolved(
        config=config,
        step_time=step_time,
        errors=target_time.errors,
        target=target,
        draft=draft,
        memory=memory,
        num_devices=num_devices,
    )
    if config.kv_link is None:
        return resolved
    return replace(resolved, config=replace(config, kinds=_without_drafts(said, (resolved.kind,))))


def _state_bytes(said: Deployment, model: ModelSpec) -> int:
    """Return what a request's state takes, with the drafts that it may have."""
    speculative = said.drafts.speculative
    most_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    return model.state_bytes + most_drafts * model.draft_state_bytes


def _with_states(
    said: Deployment,
    limits: scheduler_config.SchedulerLimits,
    own: KVCapacity | None,
    memory: KVCapacity | None,
    model: ModelSpec,
    precision: Precision,
) -> tuple[scheduler_config.SchedulerLimits, int, KVCapacity | None]:
    """Return limits, states that are kept for prefix hits, and the memory left for KV, as an engine has them.

    Parameters
    ----------
    own : memory as if nothing made drafts.
    memory : None where it is not asked for: then there are as many states as may be wanted.
    """
    if memory is None or own is None:
        return *scheduler_config.with_states(limits, 5 * limits.max_num_seqs), None
    share = own.block_bytes / (held_bytes_per_token(model, precision) * own.block_size)  # of one device
    state_bytes = _state_bytes(said, model) * share
    limits, num_snapshots = scheduler_config.with_states(
        limits, max(int(memory.kv_bytes / 2 // state_bytes), 1)
    )
    block_bytes = model.kv_bytes_per_token(precision) * share * memory.block_size
    block_bytes += memory.block_bytes - own.block_bytes  # a draft model's
    left = memory.kv_bytes - (limits.max_num_seqs + num_snapshots) * state_bytes
    return (
        limits,
        num_snapshots,
        replace(memory, num_blocks=int(left // block_bytes), block_bytes=block_bytes),
    )


def _resolve_kinds(said: Deployment) -> Resolved:
    """Resolve a fleet of several kinds; what is said of one replica is said of the first."""
    alone = replace(said, fleet=FleetConfig(), kv_bandwidth=None, kv_latency=0.0)
    of_kind = Choices(tensor="tp of that kind")
    built = [
        _fitted(change(alone, **as_settings(each, "device", "tensor_parallel", "policy")), of_kind)
        for each in said.fleet.kinds
    ]
    first, counts = built[0], [each.replicas for each in said.fleet.kinds]
    kinds = tuple(each.kind for each, count in zip(built, counts, strict=True) for _ in range(count))
    config = replace(
        first.config,
        fleet=said.fleet,
        kv_link=_link(said, first.target, first.config.scheduler.num_tables) if said.hands_over else None,
        kinds=_without_drafts(said, kinds),
    )
    num_devices = sum(each.num_devices * count for each, count in zip(built, counts, strict=True))
    return replace(first, config=config, num_devices=num_devices)


def _with_budget(resolved: Resolved, tbt: float | None, context_tokens: int | None) -> Resolved:
    """Return it with the largest steps that keep the objective (Sarathi-Serve, OSDI 2024, section 4.3)."""
    config = resolved.config
    if tbt is None:
        raise ConfigError(
            "--max-num-batched-tokens auto chooses the largest step that keeps the TBT objective, but "
            "there is none; give --slo-tbt-ms"
        )

    def limits(
        own: scheduler_config.SchedulerConfig, step_time: StepTimeModel
    ) -> scheduler_config.SchedulerConfig:
        budget = choose_token_budget(
            step_time,
            tbt=tbt - config.host_overhead,
            max_num_seqs=own.max_num_seqs,
            context_tokens=context_tokens or own.max_model_len // 2,
        )
        chosen = replace(own, max_num_batched_tokens=budget)
        check_policy(chosen)
        return chosen

    kinds = tuple(replace(each, scheduler=limits(each.scheduler, each.step_time)) for each in config.kinds)
    first = limits(config.scheduler, resolved.step_time)
    return replace(resolved, config=replace(config, scheduler=first, kinds=kinds))


def _link(said: Deployment, target: FitTarget, num_tables: int) -> KVLink:
    """Return what lies between the replicas, where requests go on elsewhere with their KV: whole blocks."""
    return KVLink(
        bytes_per_token=kv_bytes_in_blocks(target.model, target.precision, num_tables),
        bandwidth=said.kv_bandwidth or POOL_BANDWIDTH,
        latency=said.kv_latency,
        state_bytes=_state_bytes(said, target.model),
    )


def _without_drafts(said: Deployment, kinds: tuple[ReplicaKind, ...]) -> tuple[ReplicaKind, ...]:
    """Return what the replicas are; those that compute prompts plan no drafts.

    A prompt's first token is nearly all that its replica delivers: there is nothing to draft.
    """
    pools = said.fleet.disaggregate
    if pools is None or said.drafts.speculative is None:
        return kinds
    kinds += (kinds[-1],) * (pools.prefill + 1 - len(kinds))
    prefill = [replace(each, scheduler=replace(each.scheduler, speculation=None)) for each in kinds]
    return (*prefill[: pools.prefill], *kinds[pools.prefill :])


def resolve_for(
    deployment: Deployment, asked: Load | OfferedLoad, classes: Sequence[SLOClass] | None = None
) -> tuple[Resolved, OfferedLoad]:
    """Return what a deployment is, and the load that it gets.

    An automatic token budget is chosen beside decodes with the load's own mean context, as far as a full
    batch has KV memory for it.

    Parameters
    ----------
    classes : of objectives, the tightest TBT of which an automatic token budget keeps; None leaves the load
        with its own.

    Raises
    ------
    ConfigError : see `resolve` and `Load.offered`.
    """
    if isinstance(asked, Load) and deployment.max_concurrency is None:
        deployment = replace(deployment, max_concurrency=asked.max_concurrency)
    resolved = _fitted(deployment)
    longest, overlong = resolved.config.max_model_len, deployment.overlong
    try:
        if isinstance(asked, Load):
            load = asked.offered(classes, max_model_len=longest, overlong=overlong)
        else:
            load = asked.check_lengths(longest, overlong=overlong)
            load = load.with_classes(classes, seed=deployment.seed) if classes else load
    except LongerThanContext as error:
        raise what_binds(deployment, error) from None
    if deployment.drafts.acceptance_rate:
        deployment.drafts.check_classes([each.name for each in load.classes])
    if _is_auto(deployment):
        context = decode_context(load, resolved.config.scheduler)
        resolved = _with_budget(resolved, tightest_tbt(load.classes), context)
    return resolved, load


def what_binds(deployment: Deployment, error: LongerThanContext, choices: Choices = CHOICES) -> ConfigError:
    """Return why a replica's context is too short for a load: what was given, the model, or memory."""
    longest = find_model_spec(deployment.model).max_position_embeddings
    if error.num_tokens > longest:
        return ConfigError(f"{error}. The model was made for {longest} tokens")
    given = deployment.limits.max_model_len
    try:
        _fitted(change(deployment, max_model_len=error.num_tokens), choices)
    except ConfigError as cause:
        return type(cause)(f"{error}. A longer context: {cause}")
    return ConfigError(f"{error}. --max-model-len is {given}; give --max-model-len {error.num_tokens}")


def decode_context(load: OfferedLoad, limits: scheduler_config.SchedulerConfig) -> int:
    """Return the mean context of a decode: the load's, or what a full batch has KV memory for."""
    context = mean_decode_context(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist())
    num_kept = limits.windows.num_token_blocks(limits.num_pages // limits.max_num_seqs) * limits.block_size
    return max(1, min(context, max(num_kept, limits.num_blocks * limits.block_size // limits.max_num_seqs)))


def step_times_text(deployment: Deployment, errors: FitErrors | None = None) -> str:
    """Return what predicts step times, from which version of an engine on its terms hold, and the error."""
    name = deployment.step_time
    if deployment.engine != NO_ENGINE:
        name += f" of {described_terms(deployment.engine)}"
    return name if errors is None else f"{name}, fitted to measured steps (relative error: {errors})"
