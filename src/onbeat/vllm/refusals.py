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
from collections.abc import Iterator
from typing import Literal

import msgspec

from onbeat.core.errors import InvalidRequest, RequestRejected, SLOUnattainable
from onbeat.core.request import RequestOutput
from onbeat.core.slo import Fate
from onbeat.server.errors import HasObjectives, unattainable

_MARK = "onbeat refused it: "
_LONGEST_TEXT = 2**14
LATE: Literal["slo_unattainable"] = "slo_unattainable"
TOO_LONG: Literal["server_overloaded"] = "server_overloaded"
VAIN: Literal["deadline_exceeded"] = "deadline_exceeded"
WRONG: Literal["invalid_value"] = "invalid_value"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request is not served."""

    code: Literal["slo_unattainable", "server_overloaded", "deadline_exceeded", "invalid_value"]
    """As clients get it."""
    reason: str = ""
    """A sentence for the caller."""
    predicted_ttft: float | None = None
    """Seconds; None where nobody knows."""
    retry_after: float | None = None
    """Seconds after which it is predicted to fit; None where nobody knows."""

    @property
    def counted_as(self) -> str:
        """The reason, as metrics count it (`metrics.tracker.REFUSALS`)."""
        return "queue_too_long" if self.code == TOO_LONG else self.code

    def text(self) -> str:
        """Return the text that vLLM is to carry to the client."""
        return _MARK + msgspec.json.encode(self).decode()

    def error(self, request: HasObjectives) -> RequestRejected:
        """Return the error that its client gets, the same as from our own server."""
        if self.code == WRONG:
            return InvalidRequest(self.reason, param="slo", code=WRONG)
        error = SLOUnattainable(
            self.reason,
            predicted_ttft=math.inf if self.predicted_ttft is None else self.predicted_ttft,
            # None is of objectives that not even an idle engine would keep.
            retry_after=self.retry_after if self.code == LATE else self.retry_after or 0.0,
            code=self.code,
        )
        return unattainable(error, request)


def refusal_by(error: SLOUnattainable | InvalidRequest) -> Refusal:
    """Return the refusal that an error of the scheduler's is."""
    if isinstance(error, InvalidRequest):
        return Refusal(code=WRONG, reason=str(error))
    return Refusal(
        code=TOO_LONG if error.code == TOO_LONG else LATE,
        reason=str(error),
        predicted_ttft=error.predicted_ttft,
        retry_after=error.retry_after,
    )


def refusal_after(output: RequestOutput) -> Refusal:
    """Return the refusal that the last output of a request is which waited in vain."""
    return Refusal(
        code=VAIN if output.fate is Fate.EXPIRED else TOO_LONG,
        reason=output.error or "",
        predicted_ttft=output.predicted_ttft,
        retry_after=output.retry_after,
    )


def refusal_in(content: object) -> Refusal | None:
    """Return the refusal that one of the texts of an answer carries; None if none does."""
    try:
        for text in _texts(content):
            if (at := text.find(_MARK, 0, _LONGEST_TEXT)) >= 0:
                details, _ = json.JSONDecoder().raw_decode(text, at + len(_MARK))
                return msgspec.convert(details, Refusal)
    except (ValueError, RecursionError):
        pass
    return None


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            yield from _texts(each)
