"""What a request is held to: where it states its objectives, and which statement counts.

One rule: **each value comes from the first of these that states it.**

1. the request's body: the object `slo`; OpenAI's `service_tier` where `slo` names no class;
2. its headers, which gateways set;
3. the defaults of its API key: class and weight;
4. the server's flags: class and objectives, for requests for which nobody above has named a class.

What nobody states comes from the class so named, and then from the server (`--shed`).

What gives a caller a share of the others' is not its own word. Its weight is at most that of its key, else
of its key's class, else of the class in force, else 1. With API keys all requests of a key are one tenant,
unless the server's owner lets the key name others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest
from onbeat.core.slo import SLO, ShedMode
from onbeat.jobs.call import JobCall
from onbeat.server.fields import NUMBER, Closed, Flag, near_match
from onbeat.server.jobs import JOB_HEADERS, JobFields, Milliseconds, stated_by_headers, stated_job
from onbeat.server.slo_defaults import LARGEST_WEIGHT, ClassDefaults, KeyDefaults, SLODefaults, shed_mode

TTFT_HEADER = "x-llm-d-slo-ttft-ms"
TBT_HEADER = "x-llm-d-slo-tpot-ms"
_STATED_BY_HEADERS = {
    # as the first versions of llm-d's gateway had them; clients such as inference-perf still send these
    "x-slo-ttft-ms": "ttft_ms",
    "x-slo-tpot-ms": "tbt_ms",
    TTFT_HEADER: "ttft_ms",
    TBT_HEADER: "tbt_ms",
}
"""Headers that say the same as fields of `slo`."""
_FAMILIES_OF_HEADERS = ("x-slo-", "x-llm-d-slo-")
TENANT_HEADER = "x-llm-d-inference-fairness-id"
LONGEST_TENANT = 128

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "standard_only"]
_CLASS_OF_TIER: dict[ServiceTier, str] = {"priority": "interactive", "default": "standard", "flex": "batch"}
"""OpenAI's service tiers that name a class; the others, and Anthropic's `standard_only`, name none."""


class SLOFields(Closed):
    """The object `slo` of a body. Null is the same as leaving a field out."""

    ttft_ms: Milliseconds | None = None
    """From arrival to the first delivery."""
    tbt_ms: Milliseconds | None = None
    """Between tokens."""
    e2e_ms: Milliseconds | None = None
    """From arrival to the last delivery."""
    slo_class: str | None = Field(None, alias="class")
    """One of the server's classes; it gives the objectives that nobody states."""
    weight: Annotated[float, Field(gt=0, le=LARGEST_WEIGHT, allow_inf_nan=False), NUMBER] | None = None
    """Worth beside other requests; the larger, the more important."""
    job: JobFields | None = None
    """Which job it is a call of; the job's deadline then gives it objectives, too."""
    shed: Flag | None = None
    """If TTFT is predicted to be missed: true refuses the request at once, false serves it when it can."""


_NOTHING_STATED = SLOFields.model_validate({})
_NO_KEY_DEFAULTS = KeyDefaults()
_NO_CLASS_DEFAULTS = ClassDefaults(slo=SLO())


class ObjectiveFields(BaseModel):
    """The fields of a body that bear on its objectives."""

    slo: SLOFields | None = None
    service_tier: ServiceTier | None = None
    resume: Flag | None = None
    """Whether it goes on elsewhere where the replica that has it is lost; true if absent."""
    user: str | None = None
    """Who shares the server fairly with others, where neither a gateway nor an API key says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestObjectives:
    """What all choices of a request are held to, and for whom they are: fields of a `core.Request`."""

    slo: SLO | None = None
    slo_class: str | None = None
    weight: float = 1.0
    tenant: str | None = None
    shed: ShedMode = ShedMode.OFF
    resumes: bool = True
    job: JobCall | None = None
    """Of which job the request is a call: no engine hears of that."""

    @property
    def of_request(self) -> dict[str, Any]:
        """All but the job, as arguments of a `core.Request`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "job"}


class Caller(Protocol):
    """Who sent a request, as far as that bears on its objectives."""

    @property
    def key_digest(self) -> str | None:
        """SHA-256 of the API key that let it in, hexadecimal; None where none was asked for."""

    @property
    def ignored_fields(self) -> list[str]:
        """Gets the names of headers without effect."""


def request_objectives(
    fields: ObjectiveFields, headers: Headers, caller: Caller, defaults: SLODefaults
) -> RequestObjectives:
    """Return what a request is held to, by the rule above.

    Parameters
    ----------
    fields : of its body.
    headers : the request's.
    caller : which API key let it in, if any. A header without effect is named there.
    defaults : the server's.

    Raises
    ------
    InvalidRequest : a header is out of range, whether or not it counts, there is no such class, or the
        weight is more than the caller may state.
    """
    body = fields.slo or _NOTHING_STATED
    of_key = defaults.keys.get(caller.key_digest or "", _NO_KEY_DEFAULTS)
    named = _class_of_body(fields, defaults.classes) or of_key.slo_class
    of_headers = stated_by_headers(SLOFields, _STATED_BY_HEADERS, headers)
    alike = [name for name in headers if name.startswith(_FAMILIES_OF_HEADERS)]
    caller.ignored_fields.extend({*alike} - _STATED_BY_HEADERS.keys() - JOB_HEADERS.keys())
    slo = _filled(_slo_of(body), _slo_of(of_headers or _NOTHING_STATED))
    if named is None:
        slo, named = _filled(slo, defaults.slo), defaults.slo_class
    of_class = _NO_CLASS_DEFAULTS if named is None else defaults.classes[named]
    slo = _filled(slo, of_class.slo)
    tenant = _tenant(fields, headers, caller, of_key)
    if body.job is not None:
        caller.ignored_fields.extend(header for header in JOB_HEADERS if header in headers)
    return RequestObjectives(
        slo=None if slo.is_empty else slo,
        slo_class=named,
        weight=_weight(body.weight, of_key, of_class, defaults.classes),
        tenant=tenant,
        shed=shed_mode(is_refused=body.shed) or of_class.shed or defaults.shed,
        resumes=fields.resume is not False,
        job=stated_job(body.job, headers, tenant),
    )


def metadata_objectives(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the object `slo` that metadata states, for clients whose requests have no other place for it.

    Parameters
    ----------
    metadata : keys such as `slo_ttft_ms`, `slo_class` and `slo_job_id`. Other keys are the caller's own.
    """
    stated = {name[4:]: value for name, value in (metadata or {}).items() if name.startswith("slo_")}
    job = {name[4:]: stated.pop(name) for name in list(stated) if name.startswith("job_")}
    return (stated | {"job": job} if job else stated) or None


def _slo_of(stated: SLOFields) -> SLO:
    in_ms = {"ttft": stated.ttft_ms, "tbt": stated.tbt_ms, "e2e": stated.e2e_ms}
    return SLO(**{name: value / 1e3 for name, value in in_ms.items() if value is not None})


def _filled(slo: SLO, other: SLO) -> SLO:
    """Return objectives with the missing ones from others."""
    missing = {name: getattr(other, name) for name in ("ttft", "tbt", "e2e") if getattr(slo, name) is None}
    return replace(slo, **missing)


def _class_of_body(fields: ObjectiveFields, classes: Mapping[str, object]) -> str | None:
    if fields.slo is not None and fields.slo.slo_class is not None:
        return _known_class(fields.slo.slo_class, "slo.class", classes)
    if fields.service_tier in _CLASS_OF_TIER:
        return _known_class(_CLASS_OF_TIER[fields.service_tier], "service_tier", classes)
    return None


def _known_class(name: str, param: str, classes: Mapping[str, object]) -> str:
    if name in classes:
        return name
    near = near_match(name, classes)
    hint = f"did you mean {near!r}? " if near else ""
    raise InvalidRequest(
        f"there is no class {name[:100]!r} of objectives; {hint}known are {', '.join(sorted(classes))}",
        param=param,
    )


def _weight(
    stated: float | None, of_key: KeyDefaults, of_class: ClassDefaults, classes: Mapping[str, ClassDefaults]
) -> float:
    """Return what a request is worth: as it says, within what its caller may say."""
    usual = 1.0 if of_class.weight is None else of_class.weight
    most = of_key.weight
    if most is None and of_key.slo_class is not None:
        most = classes[of_key.slo_class].weight
    if most is None:
        most = max(usual, 1.0)
    if stated is not None and stated > most:
        raise InvalidRequest(
            f"{{field}} is {stated:g}; this caller may state at most {most:g}. State less, or have the "
            "server's owner give its API key or its class more (--slo-classes)",
            param="slo.weight",
        )
    if stated is None:
        stated = min(usual, most) if of_key.weight is None else of_key.weight
    return stated


def _tenant(fields: ObjectiveFields, headers: Headers, caller: Caller, of_key: KeyDefaults) -> str | None:
    """Return for whom the request is. Keys and users are shortened hashes: tenants are written to files."""
    key_digest = caller.key_digest
    tenant = headers.get(TENANT_HEADER, "").strip()
    if len(tenant) > LONGEST_TENANT:
        raise InvalidRequest(
            f"the header {{field}} is {len(tenant)} characters long; at most {LONGEST_TENANT} are allowed",
            param=TENANT_HEADER,
        )
    if tenant and (key_digest is None or of_key.names_tenants):
        return tenant
    if key_digest is not None:
        caller.ignored_fields.extend([TENANT_HEADER] if tenant else [])
        return f"key:{key_digest[:16]}"
    if fields.user:
        return f"user:{hashlib.sha256(fields.user.encode(errors='backslashreplace')).hexdigest()[:16]}"
    return None
