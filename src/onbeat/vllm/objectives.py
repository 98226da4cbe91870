"""The objectives of a request of vLLM's engine: flat keys `slo_...` of its `extra_args`.

They get there by `vllm_xargs` of a body: from the middleware, which has worked out all of them and adds
`slo_id`, or from a client of a server without it, which states what it likes to and gets the rest from the
server's defaults.

===============  ====================================================================
`slo_ttft_ms`    milliseconds; likewise `slo_tbt_ms`, `slo_e2e_ms`
`slo_class`      name of a class
`slo_weight`     worth beside other requests
`slo_shed`       `off`, `relegate` or `reject`; from a client true (reject) or false
`slo_tenant`     for whom it is; of clients, nothing is taken
`slo_id`         by which the middleware knows it again
===============  ====================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest
from onbeat.core.slo import SLO, ShedMode
from onbeat.server.fields import validated
from onbeat.server.objectives import (
    ObjectiveFields,
    RequestObjectives,
    SLOFields,
    metadata_objectives,
    request_objectives,
)
from onbeat.server.slo_defaults import SLODefaults

PREFIX = "slo_"
ID = "slo_id"


@dataclass(frozen=True, slots=True)
class KnownCaller:
    """Who asks, as far as that is known: an `objectives.Caller`."""

    key_digest: str | None = None
    ignored_fields: list[str] = field(default_factory=list)


def read(extra_args: Mapping[str, Any] | None, defaults: SLODefaults) -> RequestObjectives:
    """Return what a request is held to.

    Parameters
    ----------
    extra_args : of its sampling parameters.
    defaults : the server's; for requests that did not come by the middleware.

    Raises
    ------
    InvalidRequest : a value is wrong, or there is no such class.
    """
    stated = metadata_objectives(extra_args) or {}
    if stated.pop("id", None) is None:
        stated.pop("tenant", None)
        if stated.get("shed") in tuple(ShedMode):
            stated["shed"] = _shed_flag(stated["shed"])
        fields = ObjectiveFields(slo=validated(SLOFields, stated, [])) if stated else ObjectiveFields()
        objectives = request_objectives(fields, Headers(), KnownCaller(), defaults)
        refuse_job(objectives.job)
        return objectives
    tenant, shed = stated.pop("tenant", None), stated.pop("shed", ShedMode.OFF)
    if shed not in tuple(ShedMode) or not (tenant is None or isinstance(tenant, str)):
        raise InvalidRequest(f"slo_shed is {shed!r} and slo_tenant {tenant!r}; let the middleware set them")
    body = validated(SLOFields, stated, [])
    refuse_job(body.job)
    slo = SLO(**{name: None if ms is None else ms / 1e3 for name, ms in _milliseconds(body)})
    return RequestObjectives(
        slo=None if slo.is_empty else slo,
        slo_class=body.slo_class,
        weight=1.0 if body.weight is None else min(body.weight, _largest_weight(defaults)),
        tenant=tenant,
        shed=ShedMode(shed),
    )


def as_extra_args(objectives: RequestObjectives, slo_id: str) -> dict[str, str | float]:
    """Return the keys from which `read` makes the same objectives again."""
    slo = objectives.slo or SLO()
    values = {
        "slo_ttft_ms": None if slo.ttft is None else slo.ttft * 1e3,
        "slo_tbt_ms": None if slo.tbt is None else slo.tbt * 1e3,
        "slo_e2e_ms": None if slo.e2e is None else slo.e2e * 1e3,
        "slo_class": objectives.slo_class,
        "slo_weight": objectives.weight,
        "slo_tenant": objectives.tenant,
        "slo_shed": str(objectives.shed),
        ID: slo_id,
    }
    return {name: value for name, value in values.items() if value is not None}


def _milliseconds(body: SLOFields) -> list[tuple[str, float | None]]:
    return [("ttft", body.ttft_ms), ("tbt", body.tbt_ms), ("e2e", body.e2e_ms)]


def _shed_flag(shed: str) -> bool | None:
    """Return a word of ours as the field `shed` has it; `off` is the server's to choose."""
    return {"reject": True, "relegate": False}.get(shed)


def _largest_weight(defaults: SLODefaults) -> float:
    """Return the most that any caller may state: who can write `slo_id` himself gets no further."""
    known = [each.weight for each in defaults.classes.values()]
    known += [each.weight for each in defaults.keys.values()]
    return max([1.0, *(weight for weight in known if weight is not None)])


def refuse_job(job: object | None) -> None:
    """Refuse calls of jobs, whose table only onbeat's own server keeps."""
    if job is not None:
        raise InvalidRequest(
            "a job is named, but vLLM's server divides no deadlines of jobs; leave slo.job out, and "
            "state slo.e2e_ms",
            param="slo.job",
            code="invalid_value",
        )
