"""What a client gets to know whose request nobody serves."""

from __future__ import annotations

from onbeat.cluster.open_request import OpenRequest
from onbeat.core.errors import EngineError, OnbeatError, Overloaded, PromptTooLong, SLOUnattainable
from onbeat.scheduler.cluster.events import Refuse
from onbeat.scheduler.cluster.fleet import MOST_LIVES

LOSSES = ("replica_lost", "too_many_lives")
"""The reasons of a refusal that are deaths of replicas."""


def refusal(action: Refuse, open_request: OpenRequest) -> OnbeatError:
    """Return what a request's client gets to know."""
    rejection = open_request.rejection
    match action.reason:
        case "overloaded" | "invalid" if rejection is not None:
            if isinstance(rejection, Overloaded | SLOUnattainable) and action.retry_after is not None:
                rejection.retry_after = action.retry_after
            return rejection
        case "too_long":
            return PromptTooLong("no replica that is ready takes a prompt as long; shorten it")
        case "unattainable":
            wait = action.retry_after or 0.0
            return SLOUnattainable(
                f"the TTFT objective cannot be met: a replica is starting, which takes another {wait:.0f} s",
                predicted_ttft=wait,
                retry_after=wait,
            )
        case "no_replica" if action.retry_after is not None:
            return Overloaded(
                "no replica takes requests at present, and the request cannot wait as long; the next is "
                f"expected in {action.retry_after:.0f} s: try again then",
                code="no_replica",
                retry_after=action.retry_after,
            )
        case "no_replica" | "overloaded":
            return Overloaded(
                "no replica takes requests at present; try again later",
                code="no_replica" if action.reason == "no_replica" else "server_overloaded",
                retry_after=action.retry_after,
                reason="no_replica",
            )
        case "replica_lost":
            return EngineError(
                "the engine process that had the request has ended, and the request was not to be resumed; "
                "send it again"
            )
    return EngineError(
        f"{MOST_LIVES} replicas in a row ended while they had the request, before its next token; it may be "
        "the cause, and is not tried again"
    )
