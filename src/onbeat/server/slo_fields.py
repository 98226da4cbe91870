"""The fields of a body that say what a request is promised."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from onbeat.core.errors import InvalidRequest
from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE
from onbeat.server.fields import near_match
from onbeat.server.slo_defaults import LARGEST_WEIGHT

ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]

CLASS_OF_TIER: dict[ServiceTier, str] = {"priority": "interactive", "default": "standard", "flex": "batch"}
"""OpenAI's service tiers that name a class; the others (`auto`, `scale`) name none."""

Milliseconds = Annotated[
    float, Field(ge=SHORTEST_OBJECTIVE * 1e3, le=LONGEST_OBJECTIVE * 1e3, allow_inf_nan=False)
]


class SLOFields(BaseModel):
    """What the caller wants to be promised. Null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ttft_ms: Milliseconds | None = None
    """From arrival to the first delivery."""
    tbt_ms: Milliseconds | None = None
    """Between tokens."""
    e2e_ms: Milliseconds | None = None
    """From arrival to the last delivery."""
    slo_class: str | None = Field(None, alias="class")
    """One of the server's classes; it gives the objectives that nobody states."""
    weight: float | None = Field(None, gt=0, le=LARGEST_WEIGHT, allow_inf_nan=False)
    """Worth beside other requests; the larger, the more important."""
    shed: bool | None = None
    """If TTFT is predicted to be missed: true refuses the request at once, false serves it when it can."""

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, value: Any) -> Any:
        """Say which key was probably meant, which pydantic would not."""
        known = sorted(field.alias or name for name, field in cls.model_fields.items())
        for key in value if isinstance(value, dict) else ():
            if key not in known:
                near = near_match(key, known)
                cure = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
                name = f"slo.{key}"[:100]
                raise InvalidRequest(f"unknown field {name!r}; {cure}", param=name, code="unknown_parameter")
        return value


class PromiseFields(BaseModel):
    """All fields of a body that bear on promises: onbeat's own, xLLM's flat ones, OpenAI's tier and user."""

    slo: SLOFields | None = None
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    """The same as `slo.tbt_ms`."""
    ttlt_slo_ms: Milliseconds | None = None
    """The same as `slo.e2e_ms`."""
    service_tier: ServiceTier | None = None
    user: str | None = None
    """Who shares the server fairly with others, where neither a gateway nor an API key says so."""
