"""How the scheduler's process says that a request is refused, and what its client then gets.

vLLM carries a text to the client, in the message of an error, or as the stop reason of a choice that was
aborted: a mark, and a `Refusal` in JSON. 429 is a refusal for what is predicted: that the request would be
late (`slo_unattainable`), or would wait for too long (`server_overloaded`). 504 is of one that waited in
vain, 400 of one with wrong objectives. 503 is vLLM's own, for an engine that is not there: gateways take a
server out that says it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from onbeat.core.errors import InvalidRequest, RequestRejected, SLOUnattainable
from onbeat.server.errors import HasObjectives, unattainable

_MARK = "onbeat refused it: "
_LONGEST_TEXT = 2**14
LATE, TOO_LONG = "slo_unattainable", "server_overloaded"
"""Codes of a refusal with 429."""
_CODES = {429: LATE, 504: "deadline_exceeded"}
"""Status -> code where none is said; of others it is `invalid_value`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is not served."""

    status: Literal[400, 429, 504]
    reason: str = ""
    """A sentence for the caller, or a word."""
    predicted_ttft: float | None = None
    """Seconds; None where nobody knows."""
    retry_after: float | None = None
    """Seconds after which it is predicted to fit; None where nobody knows."""

    code: str = ""
    """As clients get it; by default that of the status."""

    def __post_init__(self) -> None:
        if not self.code:
            object.__setattr__(self, "code", _CODES.get(self.status, "invalid_value"))

    @property
    def counted_as(self) -> str:
        """The reason, as metrics count it (`metrics.tracker.REFUSALS`)."""
        return "queue_too_long" if self.code == TOO_LONG else self.code

    def text(self) -> str:
        """Return the text that vLLM is to carry to the client."""
        return _MARK + msgspec.json.encode(self).decode()

    def error(self, request: HasObjectives) -> RequestRejected:
        """Return the error that its client gets, the same as from our own server."""
        if self.status == 400:
            return InvalidRequest(
                self.reason or "the objectives are wrong", param="slo", code="invalid_value"
            )
        error = SLOUnattainable(
            self._message(request),
            predicted_ttft=math.inf if self.predicted_ttft is None else self.predicted_ttft,
            # None is of objectives that not even an idle engine would keep.
            retry_after=self.retry_after if self.code == LATE else self.retry_after or 0.0,
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
        if self.code == TOO_LONG:
            return "the request would wait for longer than the server lets it; try again later"
        predicted = "late" if self.predicted_ttft is None else f"after {self.predicted_ttft * 1e3:.0f} ms"
        return f"the first token is predicted {predicted}{objective}; try again later, or ask for less"


def refusal_by(error: SLOUnattainable | InvalidRequest) -> Refusal:
    """Return the refusal that an error of the scheduler's is."""
    if isinstance(error, InvalidRequest):
        return Refusal(status=400, reason=str(error))
    return Refusal(
        status=429,
        reason=str(error),
        predicted_ttft=error.predicted_ttft,
        retry_after=error.retry_after,
        code=error.code or LATE,
    )


def refusal_in(text: object) -> Refusal | None:
    """Return the refusal that a text of vLLM's carries; None if it carries none."""
    if not isinstance(text, str) or (at := text.find(_MARK, 0, _LONGEST_TEXT)) < 0:
        return None
    try:
        details, _ = json.JSONDecoder().raw_decode(text, at + len(_MARK))
        return msgspec.convert(details, Refusal)
    except (ValueError, RecursionError):
        return None
