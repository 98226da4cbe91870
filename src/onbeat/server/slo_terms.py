"""From all that a request, its headers, its API key and the server say, to what the request is promised."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest
from onbeat.core.slo import SLO, ShedMode
from onbeat.server.config import ServerConfig
from onbeat.server.fields import near_match
from onbeat.server.slo_defaults import ClassDefaults, KeyDefaults, SLODefaults, key_digest
from onbeat.server.slo_fields import CLASS_OF_TIER, PromiseFields, SLOFields
from onbeat.server.slo_headers import bearer_key, read_tbt, read_tenant, read_ttft

_NO_KEY_DEFAULTS = KeyDefaults()
_NO_CLASS_DEFAULTS = ClassDefaults(slo=SLO())
_NOTHING_STATED = SLOFields.model_validate({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all choices of a request are promised, and for whom: the fields of a `core.Request`."""

    slo: SLO | None = None
    slo_class: str | None = None
    weight: float = 1.0
    tenant: str | None = None
    shed: ShedMode = ShedMode.OFF


def read_terms(fields: PromiseFields, headers: Headers, config: ServerConfig) -> Terms:
    """Return what a request is promised.

    Each field comes from the first that states it: the body's `slo`, the body's flat fields, headers,
    `service_tier`, the API key, the server. A class that one of them names gives the objectives that the
    request does not state itself; the server's own objectives are for requests without a class.

    Raises
    ------
    InvalidRequest : a header is out of range, or there is no such class.
    """
    defaults = config.slo
    stated = fields.slo or _NOTHING_STATED
    key = bearer_key(headers) if config.api_keys else None
    key_terms = _NO_KEY_DEFAULTS if key is None else defaults.keys.get(key_digest(key), _NO_KEY_DEFAULTS)
    named = _named_class(fields, stated, defaults) or key_terms.slo_class
    slo = _stated_objectives(fields, stated, headers)
    if named is None:
        slo, named = _filled(slo, defaults.slo), defaults.slo_class
    class_terms = _NO_CLASS_DEFAULTS if named is None else defaults.classes[named]
    slo = _filled(slo, class_terms.slo)
    weights = (stated.weight, key_terms.weight, class_terms.weight)
    return Terms(
        slo=None if slo.is_empty else slo,
        slo_class=named,
        weight=next((weight for weight in weights if weight is not None), 1.0),
        tenant=_tenant(fields, headers, key),
        shed=_stated_shed(stated) or class_terms.shed or defaults.shed,
    )


def _stated_objectives(fields: PromiseFields, stated: SLOFields, headers: Headers) -> SLO:
    """Return the objectives that the request itself states."""
    flat = SLO(
        ttft=_seconds(fields.ttft_slo_ms), tbt=_seconds(fields.tpot_slo_ms), e2e=_seconds(fields.ttlt_slo_ms)
    )
    slo = SLO(ttft=_seconds(stated.ttft_ms), tbt=_seconds(stated.tbt_ms), e2e=_seconds(stated.e2e_ms))
    return _filled(_filled(slo, flat), SLO(ttft=read_ttft(headers), tbt=read_tbt(headers)))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _filled(slo: SLO, other: SLO) -> SLO:
    """Return objectives with the missing ones from others."""
    missing = {name: getattr(other, name) for name in ("ttft", "tbt", "e2e") if getattr(slo, name) is None}
    return replace(slo, **missing)


def _named_class(fields: PromiseFields, stated: SLOFields, defaults: SLODefaults) -> str | None:
    """Return the class that the request itself names."""
    if stated.slo_class is not None:
        return _known_class(stated.slo_class, "slo.class", defaults.classes)
    if fields.service_tier in CLASS_OF_TIER:
        return _known_class(CLASS_OF_TIER[fields.service_tier], "service_tier", defaults.classes)
    return None


def _known_class(name: str, param: str, classes: Mapping[str, object]) -> str:
    if name in classes:
        return name
    near = near_match(name, classes)
    hint = f"did you mean {near!r}? " if near else ""
    raise InvalidRequest(
        f"there is no class {name[:100]!r} of objectives; {hint}known are {', '.join(sorted(classes))}",
        param=param,
        code="invalid_value",
    )


def _tenant(fields: PromiseFields, headers: Headers, key: str | None) -> str | None:
    """Return for whom the request is. Keys and users are shortened hashes: tenants are written to files."""
    if (named := read_tenant(headers)) is not None:
        return named
    if key is not None:
        return f"key:{key_digest(key)[:16]}"
    if fields.user:
        return f"user:{hashlib.sha256(fields.user.encode(errors='backslashreplace')).hexdigest()[:16]}"
    return None


def _stated_shed(stated: SLOFields) -> ShedMode | None:
    if stated.shed is None:
        return None
    return ShedMode.REJECT if stated.shed else ShedMode.RELEGATE
