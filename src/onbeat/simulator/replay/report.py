"""What a replay found, as one object and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onbeat import __version__
from onbeat.recording.reader import Recording
from onbeat.simulator.replay.decisions import ReplayResult
from onbeat.simulator.replay.forecast import Forecast
from onbeat.simulator.replay.history import RunHistory

SCHEMA_VERSION = 1


@dataclass(slots=True)
class ReplayReport:
    """Identity of the decisions, and how well simulations tell the latencies."""

    recording: Recording
    history: RunHistory
    identity: ReplayResult
    forecasts: dict[str, Forecast] = field(default_factory=dict)
    """By where their step times came from."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended it; what was found by then is here."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values; times in milliseconds, errors as fractions of what was measured."""
        header = self.recording.header
        return {
            "schema_version": SCHEMA_VERSION,
            "onbeat_version": __version__,
            "record": {
                "file": str(self.recording.path),
                "is_complete": self.recording.is_complete,
                "num_calls": self.recording.num_calls,
                "onbeat_version": header.onbeat_version,
                "created": header.created,
                "scheduler": dict(header.scheduler),
                "engine": dict(header.engine),
                "max_in_flight_steps": header.max_in_flight_steps,
            },
            "interrupted": self.is_interrupted,
            "identity": {"is_identical": self.identity.is_identical, **asdict(self.identity)},
            "host_overhead_ms": self.history.host_overhead * 1e3,
            "forecasts": {name: _forecast_json(each) for name, each in self.forecasts.items()},
            "notes": list(self.notes),
        }


def _forecast_json(forecast: Forecast) -> Mapping[str, Any]:
    return {
        "num_requests": forecast.num_requests,
        "num_steps": forecast.num_steps,
        "num_recorded_steps": forecast.num_recorded_steps,
        "num_matched_steps": forecast.num_matched_steps,
        "errors": [
            {
                "metric": error.metric,
                "percentile": error.percentile,
                "measured_ms": error.measured * 1e3,
                "simulated_ms": error.simulated * 1e3,
                "relative_error": error.relative_error,
            }
            for error in forecast.errors
        ],
    }
