"""What `onbeat simulate` shows and saves of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any

from onbeat.core.errors import counted
from onbeat.core.step import BatchShape
from onbeat.metrics.jobs import JobSummary, summarise_jobs
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import GroupSummary, SummaryOptions, summarise
from onbeat.metrics.summary_keys import milliseconds, run_keys
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.speculative import draft_pass
from onbeat.perfmodel.utilisation import StepOperations
from onbeat.report.drafts import SimulatedDrafts
from onbeat.report.result import SCHEDULED, Level, MachineSummary, RunHeader, RunResult
from onbeat.simulator.idle import IdleReplica
from onbeat.simulator.outcomes import GroupOutcomes, RunOutcomes, tell_outcomes
from onbeat.simulator.result import FleetSize, SimulationResult
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import Simulation
from onbeat.simulator.virtual_clients import call_times
from onbeat.workload.job_load import job_outcomes
from onbeat.workload.lanes import LANES
from onbeat.workload.offered import OfferedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun(RunResult[RequestRecord]):
    """One simulated run, and what it was made with."""

    settings: ReplicaSettings
    simulation: Simulation
    outcomes: RunOutcomes
    num_replicas: int
    num_interrupted_requests: int
    num_overlong: int
    """Requests left out because they are longer than the model takes."""
    machine: MachineSummary
    drafts: SimulatedDrafts | None
    decisions: Mapping[str, int]
    """What a fleet decided how often; empty where there is none."""
    replica_seconds: float | None
    """For which the replicas of a fleet were held, their starts included; None without."""
    jobs: Mapping[str, JobSummary]
    """By kind; empty where the load has none."""
    sizes: Sequence[FleetSize]
    """Of a fleet that changes its own size."""


def as_run(
    settings: ReplicaSettings,
    simulation: Simulation,
    load: OfferedLoad,
    result: SimulationResult,
    *,
    options: SummaryOptions,
    label: str | None = None,
) -> SimulatedRun:
    """Return a simulated run in the form in which measured runs are shown."""
    # Virtual time of an interrupted run may be 0.
    summary = summarise(result.records, duration=max(result.duration, 1e-9), options=options)
    idle = IdleReplica.of(simulation.step_time, simulation.config)
    outcomes = tell_outcomes(summary, result.records, idle)
    machine = _machine(simulation, result)
    return SimulatedRun(
        header=_header(settings, simulation, load, result, label),
        summary=outcomes.summary,
        num_gpus=simulation.num_devices,
        timing_origin=SCHEDULED,
        is_interrupted=not result.is_complete,
        records=result.records,
        warnings=(*_warnings(simulation, load, machine, outcomes), *filter(None, [result.beyond])),
        machine=machine,
        drafts=_drafts(simulation, result),
        settings=settings,
        simulation=simulation,
        outcomes=outcomes,
        num_replicas=len(result.replicas),
        num_interrupted_requests=0
        if result.is_complete  # calls of jobs may never have come
        else result.num_requests - len(result.records),
        num_overlong=load.num_skipped,
        decisions=result.decisions,
        replica_seconds=result.replica_seconds,
        jobs=_jobs(load, result),
        sizes=result.sizes,
    )


def _jobs(load: OfferedLoad, result: SimulationResult) -> dict[str, JobSummary]:
    if load.jobs is None or load.name == LANES:  # whose requests are nobody's jobs
        return {}
    calls = {int(each.request_id): call_times(each) for each in result.records}
    return summarise_jobs(job_outcomes(load.jobs, calls))


def _header(
    settings: ReplicaSettings,
    simulation: Simulation,
    load: OfferedLoad,
    result: SimulationResult,
    label: str | None,
) -> RunHeader:
    return RunHeader(
        model_id=simulation.model.name,
        backend="simulation",
        label=label,
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        dataset_name=load.name,
        num_prompts=result.num_requests,
        arrivals="closed loop" if load.arrivals is None else "offered",
        burstiness=None,
        level=Level(
            request_rate=inf if load.rate is None else load.rate, max_concurrency=settings.max_concurrency
        ),
    )


def _machine(simulation: Simulation, result: SimulationResult) -> MachineSummary:
    busy = sum(replica.busy_seconds for replica in result.replicas)
    mbu, mfu = _utilisation(simulation, result, busy)
    held = result.replica_seconds if result.is_complete else None  # known once all have been given back
    return MachineSummary(
        num_steps=result.num_steps,
        mean_step=_ratio(busy, result.num_steps),
        num_preemptions=result.num_preemptions,
        prefix_cache_hit_rate=_ratio(result.num_prefix_hits, result.num_prefix_queries),
        kv_cache_peak_usage=max(
            # A replica that had not run when Ctrl-C came has no blocks.
            (each.peak_used_blocks / each.num_blocks for each in result.replicas if each.num_blocks),
            default=None,
        ),
        replica_busy_share=_ratio(busy, result.duration * len(result.replicas) if held is None else held),
        pipeline_bubble_seconds=sum(replica.bubble_seconds for replica in result.replicas),
        mbu=mbu,
        mfu=mfu,
        wall_seconds=result.wall_seconds,
    )


def _drafts(simulation: Simulation, result: SimulationResult) -> SimulatedDrafts | None:
    """Return what was speculated and what became of it; None where nothing was."""
    config, counts = simulation.config.scheduler.speculation, result.drafts
    if config is None or counts is None:
        return None
    return SimulatedDrafts(
        num_speculative_tokens=config.num_speculative_tokens,
        draft_length=config.draft_length,
        num_drafted_tokens=counts.num_drafted,
        num_accepted_tokens=counts.num_accepted,
        accepted_share=_ratio(counts.num_accepted, counts.num_drafted),
        verifying_share=_ratio(counts.num_verify_rows, counts.num_rows),
        tokens_per_decode=counts.tokens_per_row,
    )


def _utilisation(
    simulation: Simulation, result: SimulationResult, busy: float
) -> tuple[float | None, float | None]:
    """Return MBU and MFU of the busy time, against the device's specification (`perfmodel.utilisation`)."""
    if not (result.num_steps and busy):
        return None, None
    target, draft = _operations(simulation, simulation.model), None
    if simulation.draft is not None:
        draft = _operations(simulation, simulation.draft)
    num_bytes = num_operations = 0.0
    for replica in result.replicas:
        total, num_steps = replica.work, max(1, replica.num_steps)
        mean = BatchShape(
            num_new_tokens=round(total.num_new_tokens / num_steps),
            chunk_cached_tokens=round(total.chunk_cached_tokens / num_steps),
            decode_context_tokens=round(total.decode_context_tokens / num_steps),
        )
        num_bytes += target.bytes_read(mean) * replica.num_steps
        num_operations += target.flops(total)
        if draft is not None:
            one = draft_pass(total)
            num_bytes += draft.bytes_read(one) * total.num_draft_passes
            num_operations += draft.flops(one) * total.num_draft_passes
    device = simulation.device
    return (
        num_bytes / busy / device.memory_bandwidth,
        num_operations / busy / device.peak(simulation.precision.compute),
    )


def _operations(simulation: Simulation, model: ModelSpec) -> StepOperations:
    return StepOperations(model, simulation.precision, simulation.parallelism)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _warnings(
    simulation: Simulation, load: OfferedLoad, machine: MachineSummary, outcomes: RunOutcomes
) -> Iterator[str]:
    if load.num_skipped:
        longest = simulation.config.scheduler.max_model_len
        yield f"left out {counted(load.num_skipped, 'request', ',')} longer than {longest:,} tokens"
    if machine.num_preemptions:
        preemptions = counted(machine.num_preemptions, "preemption", ",")
        yield f"{preemptions}: the KV cache ran full, and prompts were computed again"
    num_relegated, num_expired = outcomes.whole.num_relegated, outcomes.summary.counts.num_expired
    if num_relegated or num_expired:
        relegated = counted(num_relegated, "request", ",")
        yield f"relegated {relegated} to best effort, and ended {num_expired:,} in the queue"
    if num_infeasible := outcomes.whole.num_infeasible:
        infeasible = counted(num_infeasible, "request", ",")
        yield f"even an idle machine would miss the objectives of {infeasible}"


def result_keys(run: SimulatedRun) -> dict[str, Any]:
    """Return what is saved of a run: keys of `onbeat bench serve`, and those of a simulation."""
    keys = _header_keys(run) | run_keys(run.summary) | _outcome_keys(run.summary, run.outcomes.whole)
    for name, own in keys["classes"].items():
        own |= _outcome_keys(run.summary.classes[name], run.outcomes.classes[name])
    return keys | {
        "interrupted": run.is_interrupted,
        "num_interrupted_requests": run.num_interrupted_requests,
        "timing_origin": run.timing_origin,
        "num_gpus": run.num_gpus,
        "output_throughput_per_gpu": run.point.output_throughput_per_gpu,
        **_machine_keys(run),
    }


def _header_keys(run: SimulatedRun) -> dict[str, Any]:
    header, settings, limits = run.header, run.settings, run.simulation.config.scheduler
    return {
        "date": header.date,
        "backend": header.backend,
        "label": header.label,
        "model_id": header.model_id,
        "device": run.simulation.device.id,
        "dtype": settings.dtype,
        "tensor_parallel_size": run.simulation.parallelism.tensor,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "replicas": run.num_replicas,
        **({"kinds": list(map(str, settings.fleet.kinds))} if settings.fleet.kinds else {}),
        "router": run.simulation.config.router,
        "policy": limits.policy,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "num_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "step_time": settings.step_time,
        "engine": settings.engine,
        "step_noise": settings.step_noise,
        **({"guided_share": settings.guided_share} if settings.guided_share else {}),
        "shed": settings.shed.value,
        "shed_order": limits.shed_order,
        "max_num_queued_reqs": limits.max_num_queued_reqs,
        "max_num_queued_tokens": limits.max_num_queued_tokens,
        "max_queue_seconds": limits.max_queue_seconds,
        "num_prompts": header.num_prompts,
        "request_rate": header.level.saved_rate,
        "burstiness": header.burstiness,
        "max_concurrency": header.level.max_concurrency,
        "arrivals": header.arrivals,
        "dataset_name": header.dataset_name,
        "title": run.title,
        "series": run.series,
        "seed": settings.seed,
    }


def _outcome_keys(summary: GroupSummary, outcomes: GroupOutcomes) -> dict[str, Any]:
    return {
        "expired": summary.counts.num_expired,
        "relegated": outcomes.num_relegated,
        "admitted": summary.counts.num_admitted,
        "attainment_admitted": summary.attainment_admitted,
        "hopeless": outcomes.num_infeasible,
        "median_predicted_ttft_error": outcomes.median_predicted_ttft_error,
    }


def _machine_keys(run: SimulatedRun) -> dict[str, Any]:
    machine = run.machine
    return {
        "num_steps": machine.num_steps,
        "mean_step_ms": milliseconds(machine.mean_step),
        "num_preemptions": machine.num_preemptions,
        "prefix_cache_hit_rate": machine.prefix_cache_hit_rate,
        "kv_cache_peak_usage": machine.kv_cache_peak_usage,
        "replica_busy_share": machine.replica_busy_share,
        "pipeline_bubble_seconds": machine.pipeline_bubble_seconds,
        "speculation": None if run.drafts is None else run.drafts.keys(),
        "wall_seconds": machine.wall_seconds,
        "num_overlong": run.num_overlong,
        **({"jobs": {kind: own.keys() for kind, own in run.jobs.items()}} if run.jobs else {}),
        "fleet_decisions": dict(run.decisions) or None,
        "replica_seconds": run.replica_seconds,
        "fleet_sizes": [each._asdict() for each in run.sizes] or None,
        "mbu": machine.mbu,
        "mfu": machine.mfu,
    }
