"""What `onbeat profile` shows: how well the fit predicts, what typical steps reach, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onbeat.core.errors import counted
from onbeat.core.step import BatchShape
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.perfmodel.utilisation import StepOperations, flops_utilisation, memory_bandwidth_utilisation
from onbeat.report.plot import (
    QUEUE_COLOUR,
    STREAM_COLOUR,
    WAIT_COLOUR,
    Figure,
    Trace,
    axis,
    figure,
    log_scale,
    trace,
)
from onbeat.report.result import Column, Lines, Part, Plots, Result, Section, Table
from onbeat.report.units import exact_percent, whole_percent

if TYPE_CHECKING:
    from onbeat.engine.profiling.profiler import ProfileResult

FIGURE_HEIGHT = 380
_ERRORS = tuple(
    Column(name, title, exact_percent)
    for name, title in zip(("p50", "p90", "p95", "mean"), ("P50", "P90", "P95", "mean"), strict=True)
)
ERROR_COLUMNS = (Column("steps", "steps", str), Column("number", "number"), *_ERRORS)
STEP_COLUMNS = (
    *(Column("step", "step", str), Column("measured_ms", "measured ms", "{:.1f}".format)),
    *(Column("predicted_ms", "predicted ms", "{:.1f}".format), Column("mbu", "MBU", whole_percent)),
    *(Column("mfu", "MFU", whole_percent),),
)
DRAFT_COLUMNS = (
    *(Column("decodes", "decodes"), Column("drafts_each", "drafts each", "{:g}".format)),
    *(Column("context", "context"), Column("measured_ms", "measured ms", "{:.1f}".format)),
    *(Column("predicted_ms", "predicted ms", "{:.1f}".format),),
    *(Column("ratio", "of a step with none", "{:.2f}x".format),),
)


def profile_result(result: ProfileResult, files: Sequence[str] = ()) -> Result:
    """Return errors, typical steps and plots of a profile.

    Parameters
    ----------
    files : where it is, in sentences for a terminal.
    """
    errors = result.profile.fitted.errors
    tiles = [(f"error at {name.upper()}", f"{getattr(errors, name):.1%}") for name in ("p50", "p90", "p95")]
    drafts = draft_rows(result)
    plots = Plots([_scatter(result), _error_figure(result)], per_row=2)
    parts: list[Part] = [
        plots,
        Table("Errors", ERROR_COLUMNS, error_rows(result), key="errors"),
        Table("Typical steps", STEP_COLUMNS, typical_rows(result), key="steps"),
        Table("Steps that verify drafts", DRAFT_COLUMNS, drafts, key="drafts"),
        Lines([limits_line(result)]),
    ]
    return Result(
        kind="profile",
        title="Step times",
        lead=_title(result),
        tiles=tiles,
        sections=[
            Section("", [Lines([_title(result)])], "terminal"),
            Section("", parts),
            Section("", [Lines(files)], "terminal"),
        ],
    )


def error_rows(result: ProfileResult) -> list[dict[str, Any]]:
    """Return the errors: of fitted steps, and of held-back ones, also by what they are made of."""
    from onbeat.perfmodel.fitted import FitErrors

    kinds = {
        "held back": list(result.held_back),
        "held back, to 100 ms": [step for step in result.held_back if step.seconds <= 0.1],
        "held back, above 100 ms": [step for step in result.held_back if step.seconds > 0.1],
        "held back, with drafts": [step for step in result.held_back if step.shape.num_draft_tokens],
        "fitted": list(result.fitted_steps),
    }
    rows = []
    for name, steps in kinds.items():
        if steps:
            predicted = result.target.predict(result.profile.fitted, steps)
            errors = FitErrors.of(predicted, [step.seconds for step in steps])
            rows.append({"steps": name, "number": len(steps), **asdict(errors)})
    return rows


def typical_rows(result: ProfileResult) -> list[dict[str, Any]]:
    """Return what some plain and some mixed steps took and reached."""
    operations = StepOperations(result.target.model, result.target.precision)
    device, dtype = result.target.device, result.target.precision.compute
    return [
        {
            "step": describe(step.shape),
            "measured_ms": step.seconds * 1e3,
            "predicted_ms": _predicted(result, [step], 1e3)[0],
            "mbu": memory_bandwidth_utilisation(operations, step.shape, step.seconds, device),
            "mfu": flops_utilisation(operations, step.shape, step.seconds, device, dtype),
        }
        for step in _typical(result.fitted_steps)
    ]


def describe(shape: BatchShape) -> str:
    """Return a batch in words."""
    parts = []
    if shape.num_decodes:
        context = shape.decode_context_tokens // shape.num_decodes
        drafts = f" with {counted(shape.num_draft_tokens, 'draft', ',')}" if shape.num_draft_tokens else ""
        parts.append(f"{counted(shape.num_decodes, 'decode', ',')} at {context:,} tokens{drafts}")
    if shape.num_chunks:
        tokens = shape.num_chunk_tokens
        after = f" after {shape.chunk_cached_tokens:,}" if shape.chunk_cached_tokens else ""
        parts.append(f"{counted(shape.num_chunks, 'chunk', ',')} of {tokens:,} tokens{after}")
    return ", ".join(parts)


def limits_line(result: ProfileResult) -> str:
    """Return what MBU and MFU are shares of."""
    device = result.target.device
    origin = "measured" if result.profile.limits is not None else "data sheet"
    peak = device.peak(result.target.precision.compute)
    return (
        f"MBU and MFU are shares of {device.memory_bandwidth / 1e9:,.1f} GB/s and {peak / 1e9:,.0f} GFLOP/s "
        f"({origin}, {result.target.precision.compute})"
    )


def _title(result: ProfileResult) -> str:
    key = result.profile.key
    return (
        f"{key.model} on {key.device_name} ({key.threads} threads, {key.precision.compute}): "
        f"{len(result.profile.steps)} batches, fitted by {result.profile.fitted.method}"
    )


def _typical(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the least and the most of plain decodes, of one request and of many, of prompts and of mixes."""
    steps = [step for step in steps if not step.shape.num_draft_tokens]
    decodes = [step for step in steps if not step.shape.num_chunks]
    most = max((step.shape.num_decodes for step in decodes), default=0)
    groups = [[step for step in decodes if step.shape.num_decodes == number] for number in (1, most)]
    groups.append([step for step in steps if not step.shape.num_decodes])
    groups.append([step for step in steps if step.shape.num_chunks and step.shape.num_decodes])
    ends = [end(group, key=_work) for group in groups if group for end in (min, max)]
    return [step for index, step in enumerate(ends) if step not in ends[:index]]


def _work(step: MeasuredStep) -> int:
    return step.shape.query_key_pairs + step.shape.decode_context_tokens


def _scatter(result: ProfileResult) -> Figure:
    times = [step.seconds * 1e3 for step in result.profile.steps]
    ends = [min(times), max(times)]
    data = [
        _points(name, colour, steps, [step.seconds * 1e3 for step in steps], _predicted(result, steps, 1e3))
        for name, colour, steps in _parts(result)
    ]
    data.append(trace("exact", ends, ends, line={"dash": "dot", "color": QUEUE_COLOUR}))
    scale = log_scale(ends)
    axes = axis("measured (ms)", **scale), axis("predicted (ms)", **{**scale, "range": None})
    return figure("Predicted against measured", data, *axes, height=FIGURE_HEIGHT)


def _parts(result: ProfileResult) -> tuple[tuple[str, str, Sequence[MeasuredStep]], ...]:
    """Return the steps that were fitted and those that were held back, each with a colour."""
    return ("fitted", STREAM_COLOUR, result.fitted_steps), ("held back", WAIT_COLOUR, result.held_back)


def _points(
    name: str, colour: str, steps: Sequence[MeasuredStep], x: Sequence[float], y: Sequence[float]
) -> Trace:
    marker = {"color": colour, "size": 6, "opacity": 0.8}
    return trace(name, x, y, "markers", text=[describe(step.shape) for step in steps], marker=marker)


def _error_figure(result: ProfileResult) -> Figure:
    """Return how far off each step was, over its new tokens: a pattern is what the fit cannot express."""
    data = []
    for name, colour, steps in _parts(result):
        pairs = zip(_predicted(result, steps), steps, strict=True)
        errors = [100 * (seconds / step.seconds - 1) for seconds, step in pairs]
        data.append(_points(name, colour, steps, [step.shape.num_new_tokens for step in steps], errors))
    sizes = log_scale([step.shape.num_new_tokens for step in result.profile.steps])
    axes = axis("new tokens of the step", **sizes), axis("predicted too much (%)", zeroline=True)
    return figure("Error by size", data, *axes, height=FIGURE_HEIGHT)


def _predicted(result: ProfileResult, steps: Sequence[MeasuredStep], unit: float = 1.0) -> list[float]:
    if not steps:
        return []
    return [float(seconds) * unit for seconds in result.target.predict(result.profile.fitted, steps)]


# ---- steps that verify drafts ----


def draft_rows(result: ProfileResult) -> list[dict[str, Any]]:
    """Return the measured steps in which all decodes verify drafts, those of fewest rows first."""
    steps = [
        step
        for step in result.fitted_steps
        if not step.shape.num_chunks and 0 < step.shape.num_decodes == step.shape.num_verify_rows
    ]
    steps.sort(key=lambda step: (step.shape.num_decodes, step.shape.num_draft_tokens))
    plain = [MeasuredStep(_without_drafts(step.shape), step.seconds) for step in steps]
    predicted, without = (_predicted(result, part, 1e3) for part in (steps, plain))
    return [
        {
            "decodes": step.shape.num_decodes,
            "drafts_each": step.shape.num_draft_tokens / step.shape.num_decodes,
            "context": step.shape.decode_context_tokens // step.shape.num_decodes,
            "measured_ms": step.seconds * 1e3,
            "predicted_ms": with_drafts,
            "without_ms": bare,
            "ratio": step.seconds * 1e3 / bare,
        }
        for step, with_drafts, bare in zip(steps, predicted, without, strict=True)
    ]


def _without_drafts(shape: BatchShape) -> BatchShape:
    return BatchShape.of_decodes(shape.num_decodes, shape.decode_context_tokens - shape.num_draft_tokens)
