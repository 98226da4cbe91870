"""The files of a plan: what a server and a load test take, the result as JSON, and a page."""

from __future__ import annotations

import argparse
import html
import os
from math import isfinite
from pathlib import Path
from typing import Any

from onbeat import __version__
from onbeat.cli.options import read_options
from onbeat.cli.outputs import shown_settings
from onbeat.cli.plan_answer import answer_of, facts_of
from onbeat.cli.plan_output import (
    FAILED_HEADER,
    FLEET_HEADER,
    FLEET_LEGEND,
    UNIT_HEADER,
    PlanReport,
    conclusions,
    failed_rows,
    fleet_rows,
    unit_rows,
    warnings_of,
)
from onbeat.core.kinds import ReplicaGroup
from onbeat.core.options import changed, settings_of
from onbeat.core.slo import SLO_CLASSES
from onbeat.planner.plan_charts import (
    bucket_figure,
    cost_figure,
    mix_figure,
    objective_figure,
    units_figure,
    use_figure,
)
from onbeat.planner.plan_file import digest_of, digest_of_classes, write_plan
from onbeat.planner.plan_task import Fleet, PlanTask
from onbeat.report.page import Page, answer, folded, notes, table
from onbeat.report.run_report import settings_section
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.simulator.settings import AUTO, ReplicaSettings
from onbeat.simulator.setup import described_times
from onbeat.workload.load import Load

SCHEMA_VERSION = 1
_SERVE_FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
}
"""Number formats of weights that a server runs, and its flags for them."""
_OWN = frozenset({"request_rate", "num_prompts", "seed", "tokenizer", "rate_scale", "max_concurrency"})
"""Settings of the load that a load test has of its own, or that the plan has been told otherwise."""


def save_plan(path: Path, report: PlanReport) -> None:
    """Write the file that `onbeat serve --config` takes.

    Raises
    ------
    ConfigError : it cannot be written.
    """
    best = report.plan.best
    assert best is not None
    load = load_flags(report.args, report.task, path.parent)
    write_plan(path, serve_settings(report, best), promise_section(report, best) | {"load": load})


def serve_settings(report: PlanReport, fleet: Fleet) -> dict[str, Any]:
    """Return the flags of a server with this fleet."""
    base, args = report.base, report.args
    settings: dict[str, Any] = {"model": args.model, "policy": "slo"}
    settings |= _SERVE_FORMATS.get(base.dtype, {})
    for setting in settings_of(SchedulerLimits):
        value = getattr(base.limits, setting.name)
        if setting.name != "policy" and value not in (setting.default, AUTO):
            settings[setting.key.replace("_", "-")] = value
    settings |= {
        key.replace("_", "-"): _plain(value)
        for key, value in (("slo_ttft_ms", args.slo_ttft_ms), ("slo_tbt_ms", args.slo_tbt_ms))
        if value is not None
    }
    settings["shed"] = str(base.shed)
    served = {"router": "slo", "replicas": fleet.num_replicas}
    if len(fleet.parts) == 1:
        ((unit, _),) = fleet.parts
        settings["device"] = unit.device
        if unit.num_devices > 1:
            settings["tensor-parallel-size"] = unit.num_devices
        if fleet.pools is not None:
            served = {"router": "slo", "disaggregate": str(fleet.pools)}
        return settings | {"fleet": served}
    kinds = [
        ReplicaGroup(device=unit.device, tensor_parallel_size=unit.num_devices, replicas=count)
        for unit, count in fleet.case.ordered()
    ]
    return settings | {"fleet": served | {"kinds": list(map(str, kinds))}}


def not_served(base: ReplicaSettings) -> str:
    """Return what a server does not do as it was simulated: its number formats; empty where it does all."""
    kv = "fp32" if base.dtype == "fp32" else "bf16"
    formats = [] if base.dtype in _SERVE_FORMATS else [f"weights in {base.dtype}"]
    if base.kv_cache_dtype not in (AUTO, kv):
        formats.append(f"KV cache in {base.kv_cache_dtype}")
    if not formats:
        return ""
    return (
        f"onbeat serve has no {' and no '.join(formats)}: what it serves by this plan is not what was "
        "simulated, and the promise does not hold of it"
    )


def promise_section(report: PlanReport, fleet: Fleet) -> dict[str, Any]:
    """Return the promise, and where it comes from."""
    task, attainment, capacity = report.task, fleet.attainment, fleet.capacity
    file = report.args.trace or report.args.dataset_path
    classes = report.args.slo_config
    by_class = {name: round(share, 5) for name, share in fleet.by_class.items()}
    devices = {unit.device for unit, _ in fleet.parts}
    return {
        "promise": {
            "attainment": task.objective.share,
            "slo-mode": str(task.objective.mode),
            "request-rate": _plain(task.rate),
            **({"headroom": _plain(round(task.headroom * 100, 6))} if task.headroom else {}),
        },
        "fleet": fleet.name,
        "cost-per-hour": round(fleet.usd_per_hour, 4),
        "watts": round(fleet.watts, 1),
        "verified": {
            "runs": len(fleet.runs),
            "requests-a-run": len(task.runs[0]),
            "attainment": None if attainment is None else [round(share, 5) for share in attainment],
            **({"by-class": by_class} if len(by_class) > 1 else {}),
            "capacity": None
            if capacity is None
            else [round(each, 4) if isfinite(each) else None for each in capacity],
            "more-load-misses": fleet.binds,
            "mean-tpot-ms": None if fleet.mean_tpot is None else round(fleet.mean_tpot * 1e3, 4),
        },
        "prices": {device: report.prices.of(device).text for device in sorted(devices)},
        "dtype": report.base.dtype,
        "kv-cache-dtype": report.base.kv_cache_dtype,
        "gpu-memory-utilization": report.base.gpu_memory_utilization,
        **({"note": note} if (note := not_served(report.base)) else {}),
        "step-times": described_times(report.base),
        "host-overhead-ms": _plain(report.base.host_overhead * 1e3),
        "trace-sha256": None if file is None else digest_of(file),
        **({} if classes is None else {"classes-sha256": digest_of_classes(classes)}),
        "made-by": f"onbeat {__version__}",
    }


def load_flags(args: argparse.Namespace, task: PlanTask, folder: Path) -> dict[str, Any]:
    """Return the flags of the planned load, as a load test of a server takes them.

    Parameters
    ----------
    folder : of the plan, from where the paths of files are told.
    """
    given = changed(read_options(args, Load))
    flags = {each.key: getattr(args, each.key) for each in given if each.name not in _OWN}
    for name, value in flags.items():
        if isinstance(value, Path) or (name == "slo_config" and value not in SLO_CLASSES):
            flags[name] = os.path.relpath(value, folder)
    return {
        **{key.replace("_", "-"): _plain(value) for key, value in flags.items()},
        "request-rate": _plain(task.rate),
        "num-prompts": len(task.runs[0]),
    }


def _plain(value: Any) -> Any:
    """Return a value as a file holds it."""
    if isinstance(value, Path):
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_document(report: PlanReport) -> dict[str, Any]:
    """Return what `--json` saves."""
    plan = report.plan

    def entry(fleet: Fleet) -> dict[str, Any]:
        return {
            "fleet": {unit.name: count for unit, count in fleet.parts},
            "pools": None if fleet.pools is None else str(fleet.pools),
            "usd_per_hour": fleet.usd_per_hour,
            "watts": fleet.watts,
            "is_kept": fleet.is_kept,
            "attainment": fleet.attainment,
            "by_class": fleet.by_class,
            "capacity": fleet.capacity,
            "binds": fleet.binds,
            "busy": fleet.busy,
            "runs": [run.as_dict() for run in fleet.runs],
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "plan",
        "onbeat_version": __version__,
        "promise": {
            "request_rate": plan.rate,
            "attainment": report.task.objective.share,
            "text": report.promise,
        },
        "best": None if plan.best is None else entry(plan.best),
        "alternatives": [entry(fleet) for fleet in plan.alternatives],
        "failed": [entry(fleet) for fleet in plan.failed],
        "units": {each.unit.name: each.rate(plan.buckets) for each in plan.units},
        "left_out": plan.left_out,
        "costs_by_estimate": [
            {"objectives_times": each.scale, "usd_per_hour": each.usd_per_hour, "fleet": each.fleet}
            for each in plan.costs
        ],
        "cost_bound": plan.cost_bound,
        "is_exhausted": plan.is_exhausted,
        "warnings": warnings_of(report),
        "infeasible": plan.infeasible or None,
        "nearest": list(plan.nearest),
    }


def plan_page(path: Path, report: PlanReport) -> None:
    """Write one self-contained page.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    plan = report.plan
    page = Page()
    body = answer(report.title, answer_of(report), facts_of(report))
    body += notes([f"Warning: {line}" for line in warnings_of(report)])
    figures = [objective_figure(plan, *_shown_objective(report)), cost_figure(plan)]
    body += page.grid(figures, per_row=2)
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in conclusions(report))
    body += folded("What the search says", lines)
    if plan.best is not None:
        kept = table(FLEET_HEADER, fleet_rows(plan), texts=(8,)) + f"<p>{FLEET_LEGEND}</p>"
        kept += page.grid([mix_figure(plan), use_figure(plan)], per_row=2)
        body += folded("Fleets that keep the promise", kept)
    if plan.failed:
        failed = table(FAILED_HEADER, failed_rows(plan), texts=(2,))
        body += folded("Fleets that do not keep it", failed)
    alone = table(UNIT_HEADER, unit_rows(plan), texts=(4,)) + page.grid([units_figure(plan)], per_row=2)
    body += folded("Kinds of replica, alone", alone)
    body += folded("The load", page.grid([bucket_figure(plan)], per_row=2))
    body += f"<h2>How it was found</h2>\n<p class='lead'>{html.escape(report.lead)}.</p>\n"
    flags = shown_settings(report.args, hidden=("json", "report", "config", "output"))
    page.write(path, report.title, body + settings_section(flags))


def _shown_objective(report: PlanReport) -> tuple[float | None, str]:
    """Return the objective that an axis shows: the TBT of the only class, else its TTFT, else none."""
    classes = report.task.load.classes
    if len(classes) != 1:
        return None, ""
    slo = classes[0].slo
    return (slo.tbt, "TBT") if slo.tbt is not None else (slo.ttft, "TTFT")
