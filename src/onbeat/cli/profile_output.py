"""What `onbeat profile` shows: how well the fit predicts, what typical steps reach, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onbeat.cli.profile_drafts import DRAFT_HEADER, draft_figure, draft_rows
from onbeat.core.step import BatchShape
from onbeat.perfmodel.profile import MeasuredStep
from onbeat.perfmodel.utilisation import StepOperations, flops_utilisation, memory_bandwidth_utilisation
from onbeat.report.page import Page, heading, notes, table
from onbeat.report.plot import Figure, Trace, axis, figure, trace
from onbeat.report.table import filled_table

if TYPE_CHECKING:
    from rich.console import Console

    from onbeat.engine.profiling.profiler import ProfileResult

FIGURE_HEIGHT = 380
Row = tuple[str, ...]


def print_summary(console: Console, result: ProfileResult, *, profile: Path, report: Path) -> None:
    """Print errors, limits and typical steps."""
    console.print(_title(result), markup=False)
    for header, rows in (
        (ERROR_HEADER, error_rows(result)),
        (STEP_HEADER, typical_rows(result)),
        (DRAFT_HEADER, draft_rows(result)),
    ):
        console.print(filled_table("", header, rows, box=None, pad_edge=False))
    console.print(limits_line(result), markup=False)
    console.print(f"profile: {profile}\nplot: {report}", markup=False, soft_wrap=True)


def write_report(path: Path, result: ProfileResult) -> None:
    """Write the page with the plot.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    page = Page()
    errors = result.profile.fitted.errors
    tiles = [
        (f"error at {name}", f"{value:.1%}")
        for name, value in (("P50", errors.p50), ("P90", errors.p90), ("P95", errors.p95))
    ]
    body = heading("Step times", _title(result), tiles)
    body += page.grid([_scatter(result), _error_figure(result), draft_figure(result)])
    body += table(ERROR_HEADER, error_rows(result)) + table(STEP_HEADER, typical_rows(result))
    body += table(DRAFT_HEADER, draft_rows(result))
    body += notes([limits_line(result)], kind="note plain")
    page.write(path, "onbeat profile", body)


ERROR_HEADER = ("steps", "number", "P50", "P90", "P95", "mean")


def error_rows(result: ProfileResult) -> list[Row]:
    """Return the errors: of fitted steps, and of held-back ones, also by what they are made of."""
    kinds = {
        "held back": list(result.held_back),
        "held back, to 100 ms": [step for step in result.held_back if step.seconds <= 0.1],
        "held back, above 100 ms": [step for step in result.held_back if step.seconds > 0.1],
        "held back, with drafts": [step for step in result.held_back if step.shape.num_draft_tokens],
        "fitted": list(result.fitted_steps),
    }
    return [(name, str(len(steps)), *_errors(result, steps)) for name, steps in kinds.items() if steps]


STEP_HEADER = ("step", "measured ms", "predicted ms", "MBU", "MFU")


def typical_rows(result: ProfileResult) -> list[Row]:
    """Return what some plain and some mixed steps took and reached."""
    operations = StepOperations(result.target.model, result.target.precision)
    device = result.target.device
    dtype = result.target.precision.compute
    rows: list[Row] = []
    for step in _typical(result.fitted_steps):
        shape, seconds = step.shape, step.seconds
        predicted = float(result.target.predict(result.profile.fitted, [step])[0])
        mbu = memory_bandwidth_utilisation(operations, shape, seconds, device)
        mfu = flops_utilisation(operations, shape, seconds, device, dtype)
        rows.append(
            (describe(shape), f"{seconds * 1e3:.1f}", f"{predicted * 1e3:.1f}", f"{mbu:.0%}", f"{mfu:.0%}")
        )
    return rows


def describe(shape: BatchShape) -> str:
    """Return a batch in words."""
    parts = []
    if shape.num_decodes:
        context = shape.decode_context_tokens // shape.num_decodes
        drafts = f" with {_number(shape.num_draft_tokens, 'draft')}" if shape.num_draft_tokens else ""
        parts.append(f"{_number(shape.num_decodes, 'decode')} at {context:,} tokens{drafts}")
    if shape.num_chunks:
        tokens = shape.num_chunk_tokens
        after = f" after {shape.chunk_cached_tokens:,}" if shape.chunk_cached_tokens else ""
        parts.append(f"{_number(shape.num_chunks, 'chunk')} of {tokens:,} tokens{after}")
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


def _errors(result: ProfileResult, steps: Sequence[MeasuredStep]) -> Row:
    from onbeat.perfmodel.fit_errors import FitErrors

    predicted = result.target.predict(result.profile.fitted, steps)
    errors = FitErrors.of(predicted, [step.seconds for step in steps])
    return tuple(f"{value:.1%}" for value in (errors.p50, errors.p90, errors.p95, errors.mean))


def _typical(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the smallest and the largest plain steps, and the largest mix, all without drafts."""
    steps = [step for step in steps if not step.shape.num_draft_tokens]
    decodes = [step for step in steps if not step.shape.num_chunks]
    chunks = [step for step in steps if not step.shape.num_decodes]
    first_chunks = [step for step in chunks if not step.shape.chunk_cached_tokens]
    mixes = [step for step in steps if step.shape.num_chunks and step.shape.num_decodes]
    few = [step for step in decodes if step.shape.num_decodes == 1]
    most = max((step.shape.num_decodes for step in decodes), default=0)
    many = [step for step in decodes if step.shape.num_decodes == most]
    found: list[MeasuredStep] = []
    for group, key in (
        (few, _context),
        (many, _context),
        (first_chunks, _tokens),
        (chunks, _pairs),
        (mixes, _tokens),
    ):
        if group:
            lowest = [min(group, key=key)] if group in (few, many) else []
            found += [*lowest, max(group, key=key)]
    return [step for index, step in enumerate(found) if step not in found[:index]]


def _context(step: MeasuredStep) -> int:
    return step.shape.decode_context_tokens


def _tokens(step: MeasuredStep) -> int:
    return step.shape.num_new_tokens


def _pairs(step: MeasuredStep) -> int:
    return step.shape.query_key_pairs


def _scatter(result: ProfileResult) -> Figure:
    data = [
        _points(name, steps, [step.seconds * 1e3 for step in steps], _predicted(result, steps, 1e3))
        for name, steps in (("fitted", result.fitted_steps), ("held back", result.held_back))
    ]
    times = [step.seconds * 1e3 for step in result.profile.steps]
    ends = [min(times), max(times)]
    data.append(trace("exact", ends, ends, line={"dash": "dot"}))
    axes = axis("measured (ms)", type="log"), axis("predicted (ms)", type="log")
    return figure("Predicted against measured", data, *axes, height=FIGURE_HEIGHT)


def _points(name: str, steps: Sequence[MeasuredStep], x: Sequence[float], y: Sequence[float]) -> Trace:
    return trace(name, x, y, "markers", text=[describe(step.shape) for step in steps])


def _error_figure(result: ProfileResult) -> Figure:
    """Return how far off each step was, over its new tokens: a pattern is what the fit cannot express."""
    data = []
    for name, steps in (("fitted", result.fitted_steps), ("held back", result.held_back)):
        pairs = zip(_predicted(result, steps), steps, strict=True)
        errors = [100 * (seconds / step.seconds - 1) for seconds, step in pairs]
        data.append(_points(name, steps, [step.shape.num_new_tokens for step in steps], errors))
    axes = axis("new tokens of the step", type="log"), axis("predicted too much (%)", zeroline=True)
    return figure("Error by size", data, *axes, height=FIGURE_HEIGHT)


def _predicted(result: ProfileResult, steps: Sequence[MeasuredStep], unit: float = 1.0) -> list[float]:
    if not steps:
        return []
    return [float(seconds) * unit for seconds in result.target.predict(result.profile.fitted, steps)]


def _number(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
