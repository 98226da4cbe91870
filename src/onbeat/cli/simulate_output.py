"""What `onbeat simulate` shows and saves of a run."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from onbeat.core.step import BatchShape
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import SummaryOptions, summarise
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.speculative import draft_pass
from onbeat.perfmodel.utilisation import StepWork
from onbeat.report.result import SCHEDULED, RunResult
from onbeat.simulator.idle import IdleReplica
from onbeat.simulator.outcomes import add_outcomes
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.setup import ReplicaSettings, Simulation
from onbeat.workload.offered import OfferedLoad

HIDDEN_SETTINGS = frozenset({"run", "command"})


def as_run(
    settings: ReplicaSettings,
    simulation: Simulation,
    load: OfferedLoad,
    result: SimulationResult,
    *,
    options: SummaryOptions,
    label: str | None = None,
) -> RunResult[RequestRecord]:
    """Return a simulated run in the form in which measured runs are shown."""
    limits = simulation.config.scheduler
    summary: dict[str, Any] = {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "backend": "simulation",
        "label": label,
        "model_id": simulation.model.name,
        "device": simulation.device.id,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "replicas": len(result.replicas),
        "router": settings.router,
        "policy": limits.policy,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "num_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "step_time": settings.step_time,
        "step_noise": settings.step_noise,
        "shed": settings.shed.value,
        "shed_order": limits.shed_order,
        "max_num_queued_reqs": limits.max_num_queued_reqs,
        "max_num_queued_tokens": limits.max_num_queued_tokens,
        "max_queue_seconds": limits.max_queue_seconds,
        "num_prompts": result.num_requests,
        "request_rate": load.rate if load.arrivals is not None else "inf",
        "burstiness": None,
        "max_concurrency": settings.max_concurrency,
        "arrivals": "closed loop" if load.arrivals is None else "offered",
        "dataset_name": load.name,
        "title": "",
        "series": "",
        "seed": settings.seed,
    }
    # Virtual time of an interrupted run may be 0.
    summary |= summarise(result.records, duration=max(result.duration, 1e-9), options=options)
    idle = IdleReplica(simulation.step_time, host_overhead=settings.host_overhead)
    add_outcomes(summary, result.records, idle)
    busy = sum(replica.busy_seconds for replica in result.replicas)
    summary |= {
        "interrupted": not result.is_complete,
        "num_interrupted_requests": result.num_requests - len(result.records),
        "timing_origin": SCHEDULED,
        "num_gpus": simulation.num_devices,
        "output_throughput_per_gpu": summary["output_throughput"] / simulation.num_devices,
        "num_steps": result.num_steps,
        "mean_step_ms": busy / result.num_steps * 1e3 if result.num_steps else None,
        "num_preemptions": result.num_preemptions,
        "prefix_cache_hit_rate": _ratio(result.num_prefix_hits, result.num_prefix_queries),
        "kv_cache_peak_usage": max(
            # A replica that had not run when Ctrl-C came has no blocks.
            (each.peak_used_blocks / each.num_blocks for each in result.replicas if each.num_blocks),
            default=None,
        ),
        "replica_busy_share": _ratio(busy, result.duration * len(result.replicas)),
        "pipeline_bubble_seconds": sum(replica.bubble_seconds for replica in result.replicas),
        "speculation": _speculation(simulation, result),
        "wall_seconds": result.wall_seconds,
    }
    summary |= {"num_overlong": load.num_skipped, **_utilisation(simulation, result, busy)}
    return RunResult(summary=summary, records=result.records, warnings=_warnings(summary))


def _speculation(simulation: Simulation, result: SimulationResult) -> dict[str, Any] | None:
    """Return what was speculated and what became of it; None where nothing was."""
    config, counts = simulation.config.scheduler.speculation, result.drafts
    if config is None or counts is None:
        return None
    return {
        "num_speculative_tokens": config.num_speculative_tokens,
        "draft_length": config.draft_length,
        "num_drafted_tokens": counts.num_drafted,
        "num_accepted_tokens": counts.num_accepted,
        "accepted_share": _ratio(counts.num_accepted, counts.num_drafted),
        "verifying_share": _ratio(counts.num_verify_rows, counts.num_rows),
        "tokens_per_decode": counts.tokens_per_row,
    }


def _utilisation(simulation: Simulation, result: SimulationResult, busy: float) -> dict[str, float | None]:
    """Return MBU and MFU of the busy time, against the device's specification (`perfmodel.utilisation`)."""
    if not (result.num_steps and busy):
        return {"mbu": None, "mfu": None}
    step_work, draft_work = _work(simulation, simulation.model), None
    if simulation.draft is not None:
        draft_work = _work(simulation, simulation.draft)
    num_bytes = num_operations = 0.0
    for replica in result.replicas:
        total, num_steps = replica.work, max(1, replica.num_steps)
        mean = BatchShape(
            num_new_tokens=round(total.num_new_tokens / num_steps),
            chunk_cached_tokens=round(total.chunk_cached_tokens / num_steps),
            decode_context_tokens=round(total.decode_context_tokens / num_steps),
        )
        num_bytes += step_work.bytes_read(mean) * replica.num_steps
        num_operations += step_work.flops(total)
        if draft_work is not None:
            one = draft_pass(total)
            num_bytes += draft_work.bytes_read(one) * total.num_draft_passes
            num_operations += draft_work.flops(one) * total.num_draft_passes
    device = simulation.device
    return {
        "mbu": num_bytes / busy / device.memory_bandwidth,
        "mfu": num_operations / busy / device.peak(simulation.precision.compute),
    }


def _work(simulation: Simulation, model: ModelSpec) -> StepWork:
    return StepWork(model, simulation.precision, simulation.parallelism)


def shown_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that were given or have a value, for the end of a report."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in sorted(vars(args).items())
        if name not in HIDDEN_SETTINGS and value not in (None, [], False) and _is_plain(value)
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, list, Path))


def _warnings(summary: dict[str, Any]) -> tuple[str, ...]:
    warnings = []
    if summary["num_overlong"]:
        warnings.append(
            f"{summary['num_overlong']:,} requests were left out: longer than {summary['max_model_len']:,} "
            "tokens"
        )
    if summary["num_preemptions"]:
        warnings.append(
            f"{summary['num_preemptions']:,} preemptions: the KV cache ran full, and prompts were computed "
            "again"
        )
    if summary["relegated"] or summary["expired"]:
        warnings.append(
            f"{summary['relegated']:,} requests were relegated to best effort, {summary['expired']:,} were "
            "given up in the queue"
        )
    if summary["hopeless"]:
        warnings.append(
            f"{summary['hopeless']:,} requests are hopeless: even an idle machine would miss their objectives"
        )
    return tuple(warnings)
