"""What `onbeat replay` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.stream_fit import errors_by_kind
from onbeat.recording.fleet_log import FleetRecording
from onbeat.recording.reader import Recording
from onbeat.report.result import Column, Lines, Part, Result, Section, Table
from onbeat.simulator.replay.decisions import ReplayResult
from onbeat.simulator.replay.fleet_replay import FleetReplay
from onbeat.simulator.replay.forecast import COMPARED, Forecast
from onbeat.simulator.replay.history import RunHistory

_FORECAST = (
    *(Column("name", "Metric", str), Column("measured_ms", "Measured (ms)", "{:,.2f}".format)),
    *(Column("simulated_ms", "Simulated (ms)", "{:,.2f}".format), Column("error", "Error", "{:+.1%}".format)),
)


def replay_result(
    recording: Recording,
    history: RunHistory,
    identity: ReplayResult,
    forecasts: Mapping[str, Forecast],
    *,
    notes: list[str],
    is_interrupted: bool,
) -> Result:
    """Return whether the decisions are the same, and how well simulations tell the latencies.

    Parameters
    ----------
    forecasts : by where their step times came from.
    notes : what was left out, and why.
    is_interrupted : whether Ctrl-C ended it; what was found by then is here.
    """
    header = recording.header
    title = (
        f"{recording.path}: {header.engine.get('model_name')} on {header.engine.get('device')}, policy "
        f"{header.scheduler['policy']}, recorded {header.created} by onbeat {header.onbeat_version}"
    )
    overhead_ms = history.host_overhead * 1e3
    lines = Lines([title, *_identity_lines(identity), f"host overhead: {overhead_ms:.2f} ms a step"])
    compared = {name: _forecast_values(each) for name, each in forecasts.items()}
    parts = [part for name, each in forecasts.items() for part in _forecast_parts(name, each, compared[name])]
    return Result(
        kind="replay",
        title=title,
        sections=[Section("", [lines, *parts])],
        warnings=notes,
        is_interrupted=is_interrupted,
        values={
            "record": {
                "file": str(recording.path),
                "is_complete": recording.is_complete,
                "num_calls": recording.num_calls,
                "onbeat_version": header.onbeat_version,
                "created": header.created,
                "scheduler": dict(header.scheduler),
                "engine": dict(header.engine),
                "max_in_flight_steps": header.max_in_flight_steps,
            },
            "identity": {"is_identical": identity.is_identical, **asdict(identity)},
            "host_overhead_ms": overhead_ms,
            "forecasts": compared,
            "notes": notes,
        },
    )


def _identity_lines(identity: ReplayResult) -> Iterator[str]:
    found = identity.difference
    if found is None:
        yield (
            f"decisions: identical in {identity.num_steps:,} steps, {identity.num_rows:,} rows "
            f"({identity.num_requests:,} requests, {identity.num_preemptions:,} preemptions, "
            f"{identity.num_prefix_hits:,} prompt tokens from the prefix cache, "
            f"{identity.num_rejected:,} rejected, {identity.num_expired:,} expired, "
            f"{identity.num_aborted:,} aborted, {identity.num_failed:,} failed)"
        )
        if identity.num_predictions:
            yield f"predicted step times: identical in {identity.num_predictions:,} steps"
        return
    where = "" if found.step_id is None else f", step {found.step_id}"
    yield (
        f"decisions: DIFFERENT at call {found.call_index}{where}, after {identity.num_steps:,} steps: "
        f"{found.what}\n  recorded: {found.recorded}\n  replayed: {found.replayed}"
    )


def _forecast_values(forecast: Forecast) -> dict[str, Any]:
    errors = [
        {
            "metric": each.metric,
            "percentile": each.percentile,
            "measured_ms": each.measured * 1e3,
            "simulated_ms": each.simulated * 1e3,
            "relative_error": each.relative_error,
        }
        for each in forecast.errors
    ]
    return asdict(forecast) | {"errors": errors}


def _forecast_parts(name: str, forecast: Forecast, values: Mapping[str, Any]) -> Iterator[Part]:
    rows = [
        {**row, "name": f"{COMPARED[row['metric']]} P{row['percentile']:g}", "error": row["relative_error"]}
        for row in values["errors"]
    ]
    yield Table(f"Simulated with {name}", _FORECAST, rows)
    steps = f"{forecast.num_steps:,} steps simulated, {forecast.num_recorded_steps:,} recorded"
    if forecast.num_matched_steps is not None:
        steps += f", {forecast.num_matched_steps:,} with the very same batch"
    yield Lines([f"{forecast.num_requests:,} requests that ran to their end; {steps}"])


def fleet_result(recording: FleetRecording, found: FleetReplay) -> Result:
    """Return whether the decisions of a fleet are the same."""
    version, difference = recording.header.get("onbeat_version"), found.difference
    title = f"{recording.path}: a fleet behind router {found.router}, recorded by onbeat {version}"
    decided = f"decisions: identical in {found.num_calls:,} calls, {found.num_actions:,} actions"
    if difference is not None:
        decided = (
            f"decisions: DIFFERENT at line {difference.line} ({difference.event}), after "
            f"{found.num_calls - 1:,} calls:\n  recorded: {difference.recorded}\n"
            f"  replayed: {difference.replayed}"
        )
    counts = [
        f"{name}: " + ", ".join(f"{kind} {num:,}" for kind, num in sorted(own.items()))
        for name, own in (("events", found.events), ("actions", found.actions))
    ]
    return Result(
        kind="replay",
        title=title,
        sections=[Section("", [Lines([title, decided, *counts])])],
        warnings=() if found.is_complete else ["the record is cut short"],
        values={
            "is_identical": found.is_identical,
            **{each.name: getattr(found, each.name) for each in fields(found)},
        },
    )


def steps_result(path: Path, model: Predictor, timed: Any) -> Result:
    """Return how far predictions of recorded steps are off.

    Parameters
    ----------
    path : file of the steps.
    timed : the steps, with what their times are.
    """
    from onbeat.cli.profile_from import error_table

    errors = errors_by_kind(timed.steps, [model.step_time(step.shape) for step in timed.steps])
    seen = model.shape_range
    beyond = 0 if seen is None else sum(seen.inflation(step.shape) > 1 for step in timed.steps)
    warning = (
        f"{beyond:,} steps are outside of what the profile saw ({seen and seen.describe()}); predictions "
    )
    title = f"{path}: {len(timed.steps):,} steps; their times: {timed.basis}"
    table = error_table("Predicted against recorded steps", errors)
    return Result(
        kind="replay",
        title=title,
        sections=[Section("", [Lines([title]), table])],
        warnings=[f"{warning}of these are extrapolated"] if beyond else (),
        values={"times": timed.basis, "num_beyond": beyond},
    )
