"""What `onbeat profile` shows of steps that verify drafts: how much longer they take than plain decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onbeat.core.step import BatchShape
from onbeat.perfmodel.profile import MeasuredStep
from onbeat.report.plot import COLOURS, Figure, Trace, figure, trace

if TYPE_CHECKING:
    from onbeat.engine.profiling.profiler import ProfileResult

DRAFT_HEADER = ("decodes", "drafts each", "context", "measured ms", "predicted ms", "of a step with none")


def draft_rows(result: ProfileResult) -> list[tuple[str, ...]]:
    """Return the measured steps in which all decodes verify drafts, those of fewest rows first."""
    steps = _verifying(result.fitted_steps)
    predicted, plain = _predicted(result, steps)
    return [
        (
            f"{step.shape.num_decodes:,}",
            f"{_drafts_each(step):g}",
            f"{step.shape.decode_context_tokens // step.shape.num_decodes:,}",
            f"{step.seconds * 1e3:.1f}",
            f"{with_drafts * 1e3:.1f}",
            f"{step.seconds / without:.2f}x",
        )
        for step, with_drafts, without in zip(steps, predicted, plain, strict=True)
    ]


def draft_figure(result: ProfileResult) -> Figure:
    """Return how step time grows with the drafts of each row: measured, and as the fit has it."""
    steps = _verifying(result.fitted_steps)
    predicted, plain = _predicted(result, steps)
    data: list[Trace] = []
    for number in dict.fromkeys(step.shape.num_decodes for step in steps):
        points = [
            (_drafts_each(step), step.seconds / without, with_drafts / without)
            for step, with_drafts, without in zip(steps, predicted, plain, strict=True)
            if step.shape.num_decodes == number
        ]
        name = f"{number} decode" + ("" if number == 1 else "s")
        drafts, measured, fitted = zip((0, 1.0, 1.0), *points, strict=True)
        look = {"color": COLOURS[len(data) // 2 % len(COLOURS)]}
        data.append(trace(f"{name}, measured", drafts, measured, "markers", marker=look))
        data.append(trace(f"{name}, predicted", drafts, fitted, line=look))
    return figure(
        "Steps that verify drafts", data, "drafts of each decode", "times a step with none", height=380
    )


def _verifying(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the steps of decodes alone, all with drafts."""
    found = [
        step
        for step in steps
        if not step.shape.num_chunks and 0 < step.shape.num_decodes == step.shape.num_verify_rows
    ]
    return sorted(found, key=lambda step: (step.shape.num_decodes, step.shape.num_draft_tokens))


def _drafts_each(step: MeasuredStep) -> float:
    return step.shape.num_draft_tokens / step.shape.num_decodes


def _predicted(result: ProfileResult, steps: Sequence[MeasuredStep]) -> tuple[list[float], list[float]]:
    """Return the fit's seconds of each step, and of the same rows without their drafts."""
    if not steps:
        return [], []
    plain = [MeasuredStep(_without_drafts(step.shape), step.seconds) for step in steps]
    with_drafts, without = (result.target.predict(result.profile.fitted, part) for part in (steps, plain))
    return [float(seconds) for seconds in with_drafts], [float(seconds) for seconds in without]


def _without_drafts(shape: BatchShape) -> BatchShape:
    return BatchShape.of_decodes(shape.num_decodes, shape.decode_context_tokens - shape.num_draft_tokens)
