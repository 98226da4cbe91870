"""What a request says of the job that it is a call of: the object `slo.job`, or headers."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest
from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE
from onbeat.jobs.call import JobCall
from onbeat.server.checked_fields import validated
from onbeat.server.fields import refuse_unknown

LONGEST_ID = 128
MOST_CALLS_LEFT = 10_000

HEADERS = {
    "x-slo-job-id": "id",
    "x-slo-job-deadline-ms": "deadline_ms",
    "x-slo-job-e2e-ms": "e2e_ms",
    "x-slo-job-calls-left": "calls_left",
    "x-slo-job-class": "class",
}
"""Headers that say the same as the object `slo.job`."""
_NUMBERS = ("deadline_ms", "e2e_ms")
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?", re.ASCII)


class JobFields(BaseModel):
    """The object `slo.job`: which job a call is part of. Null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(min_length=1, max_length=LONGEST_ID)
    """The same in all calls of the job; another caller's job may have the same."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """When the last call is to have ended, milliseconds since 1970."""
    e2e_ms: (
        Annotated[float, Field(ge=SHORTEST_OBJECTIVE * 1e3, le=LONGEST_OBJECTIVE * 1e3, allow_inf_nan=False)]
        | None
    ) = None
    """The same, from the arrival of the job's first call."""
    calls_left: Annotated[int, Field(ge=0, le=MOST_CALLS_LEFT)] | None = None
    """Calls that follow this one, one after another; 0 is the last. Learnt from earlier jobs if absent."""
    job_class: str | None = Field(None, alias="class", min_length=1, max_length=LONGEST_ID)
    """Jobs of a class are expected to be alike."""

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            refuse_unknown(
                value, [field.alias or name for name, field in cls.model_fields.items()], where="slo.job."
            )
        return value


def stated_job(fields: JobFields | None, headers: Headers, tenant: str | None) -> JobCall | None:
    """Return what a request says of its job; its body counts before its headers. None without a job.

    Raises
    ------
    InvalidRequest : a header is wrong.
    """
    if fields is None:
        given = {name: headers[header].strip() for header, name in HEADERS.items() if header in headers}
        if not given:
            return None
        fields = _of_headers(given)
    return JobCall(
        job_id=fields.id,
        tenant=tenant,
        deadline=None if fields.deadline_ms is None else fields.deadline_ms / 1e3,
        e2e=None if fields.e2e_ms is None else fields.e2e_ms / 1e3,
        calls_left=fields.calls_left,
        kind=fields.job_class or "",
    )


def _of_headers(given: dict[str, str]) -> JobFields:
    if "id" not in given:
        raise InvalidRequest(
            "headers of a job are given without x-slo-job-id; send it too, or none of them",
            param="x-slo-job-id",
            code="invalid_value",
        )
    read: dict[str, Any] = dict(given)
    for header, name in HEADERS.items():
        text = given.get(name)
        if text is None:
            continue
        if name in _NUMBERS and _NUMBER.fullmatch(text):
            read[name] = float(text)
        elif name == "calls_left" and text.isascii() and text.isdecimal() and len(text) < 10:
            read[name] = int(text)
        elif name in (*_NUMBERS, "calls_left"):
            raise InvalidRequest(
                f"the header {header} is {text[:40]!r}; it should be a number",
                param=header,
                code="invalid_value",
            )
    return validated(JobFields, read, [])
