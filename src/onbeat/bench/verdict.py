"""What the server itself says of how it kept a request's objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVerdict:
    """The object `slo` of an answer's last chunk. Times are seconds of the server's clock."""

    is_met: bool | None = None
    ttft: float | None = None
    """From the arrival of the request's body to the end of the step that made its first token."""
    tbt_p99: float | None = None
    token_attainment: float | None = None
    """Share of the tokens that met their deadlines."""
    predicted_ttft: float | None = None
    is_relegated: bool = False

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> ServerVerdict:
        """Read the object; what is missing or no number is None."""
        met = fields.get("met")
        return cls(
            is_met=met if isinstance(met, bool) else None,
            ttft=milliseconds(fields.get("ttft_ms")),
            tbt_p99=milliseconds(fields.get("tbt_p99_ms")),
            token_attainment=_number(fields.get("token_attainment")),
            predicted_ttft=milliseconds(fields.get("predicted_ttft_ms")),
            is_relegated=fields.get("relegated") is True,
        )


def milliseconds(value: Any) -> float | None:
    """Return a number of milliseconds as seconds; None for anything else."""
    number = _number(value)
    return None if number is None else number / 1e3


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
