"""How the scheduler's process says that a request is refused, and what its client then gets.

vLLM carries a text to the client, in the message of an error, or as the stop reason of a choice that was
aborted: `onbeat:429:{"predicted_ttft_ms": ..., "retry_after_s": ..., "reason": ...}`. 429 is a refusal at
arrival, 504 of a request that waited in vain, 503 of one whose wait would be too long, 400 of one with wrong
objectives.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onbeat.core.errors import InvalidRequest, Overloaded, RequestRejected, SLOUnattainable
from onbeat.server.errors import HasObjectives, unattainable

_MARK = re.compile(r"onbeat:(400|429|503|504):(?=\{)")
_LONGEST_TEXT = 2**14
_CODES = {429: "slo_unattainable", 504: "deadline_exceeded", 503: "queue_too_long"}
"""Status -> the reason, as metrics count refusals (`metrics.tracker.REFUSALS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is not served."""

    status: int
    reason: str = ""
    """A sentence for the caller, or a word."""
    predicted_ttft: float | None = None
    """Seconds; None where nobody knows."""
    retry_after: float | None = None
    """Seconds after which it is predicted to fit; None where nobody knows."""

    @property
    def code(self) -> str:
        """The reason, as metrics count it."""
        return _CODES.get(self.status, "invalid_value")

    def error(self, request: HasObjectives) -> RequestRejected:
        """Return the error that its client gets, the same as from our own server."""
        if self.status == 400:
            return InvalidRequest(
                self.reason or "the objectives are wrong", param="slo", code="invalid_value"
            )
        if self.status == 503:
            return Overloaded(self._message(request), retry_after=self.retry_after, reason=self.code)
        error = SLOUnattainable(
            self._message(request),
            predicted_ttft=math.inf if self.predicted_ttft is None else self.predicted_ttft,
            retry_after=self.retry_after or 0.0,
            code=self.code,
        )
        return unattainable(error, request)

    def _message(self, request: HasObjectives) -> str:
        if " " in self.reason:
            return self.reason
        ttft = None if request.slo is None else request.slo.ttft
        objective = "" if ttft is None else f"; its objective is {ttft * 1e3:.0f} ms"
        if self.status == 504:
            return f"the request waited until its first token could not be in time any more{objective}"
        if self.status == 503:
            return "the request would wait for longer than the server lets it; try again later"
        predicted = "late" if self.predicted_ttft is None else f"after {self.predicted_ttft * 1e3:.0f} ms"
        return f"the first token is predicted {predicted}{objective}; try again later, or ask for less"


def refusal_text(
    status: int,
    *,
    reason: str = "",
    predicted_ttft: float | None = None,
    retry_after: float | None = None,
) -> str:
    """Return the text that vLLM is to carry to the client.

    Parameters
    ----------
    predicted_ttft, retry_after : seconds; None, or infinite, where nobody knows.
    """
    return f"onbeat:{status}:" + json.dumps(
        {
            "predicted_ttft_ms": _finite(predicted_ttft, 1e3),
            "retry_after_s": _finite(retry_after, 1.0),
            "reason": reason,
        }
    )


def refusal_in(text: object) -> Refusal | None:
    """Return the refusal that a text of vLLM's carries; None if it carries none."""
    if not isinstance(text, str) or (found := _MARK.search(text[:_LONGEST_TEXT])) is None:
        return None
    try:
        details, _ = json.JSONDecoder().raw_decode(text, found.end())
    except (ValueError, RecursionError):
        return None
    return refusal_of(int(found[1]), details) if isinstance(details, dict) else None


def refusal_of(status: int, details: Mapping[str, Any]) -> Refusal:
    """Return a refusal from what is told of it; what is no number counts as not known."""
    reason = details.get("reason")
    return Refusal(
        status=status,
        reason=reason if isinstance(reason, str) else "",
        predicted_ttft=_number(details.get("predicted_ttft_ms"), 1e-3),
        retry_after=_number(details.get("retry_after_s"), 1.0),
    )


def _number(value: object, factor: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _finite(float(value), factor)


def _finite(value: float | None, factor: float) -> float | None:
    return value * factor if value is not None and math.isfinite(value) and value >= 0 else None
