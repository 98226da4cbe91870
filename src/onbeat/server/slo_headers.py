"""The headers of a request that say what it is promised, and for whom it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest
from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""llm-d's name, then its old one, which load generators still send; the first that is there counts."""
TBT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
TENANT_HEADER = "x-llm-d-inference-fairness-id"
PREDICTED_TTFT_HEADER = "x-onbeat-predicted-ttft-ms"

LONGEST_TENANT = 128
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", re.ASCII)


def read_ttft(headers: Headers) -> float | None:
    """Return the TTFT objective that headers state, seconds.

    Raises
    ------
    InvalidRequest : it is no number between 1 ms and 24 h. Whatever a gateway makes of its own mistakes (0,
        a negative number, an overflow), it never becomes the most urgent request.
    """
    return _read_first(headers, TTFT_HEADERS)


def read_tbt(headers: Headers) -> float | None:
    """Return the TBT objective that headers state, seconds. Raises as `read_ttft` does."""
    return _read_first(headers, TBT_HEADERS)


def read_tenant(headers: Headers) -> str | None:
    """Return the tenant that a gateway names.

    Raises
    ------
    InvalidRequest : the name is longer than 128 characters.
    """
    tenant = headers.get(TENANT_HEADER, "").strip()
    if len(tenant) > LONGEST_TENANT:
        raise _wrong(TENANT_HEADER, f"{len(tenant)} characters long; at most {LONGEST_TENANT} are allowed")
    return tenant or None


def bearer_key(headers: Headers) -> str | None:
    """Return the API key that a request carries, known or not."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def predicted_ttft_header(predicted: float | None) -> Mapping[str, str]:
    """Return the header that tells a prediction, if there is one.

    Parameters
    ----------
    predicted : seconds from the request's arrival to its first token.
    """
    return {} if predicted is None else {PREDICTED_TTFT_HEADER: f"{predicted * 1e3:.1f}"}


def _read_first(headers: Headers, names: Sequence[str]) -> float | None:
    """Return the first of several headers, in seconds; all that are there must be right."""
    found = [_read(name, headers[name]) for name in names if name in headers]
    return found[0] if found else None


def _read(name: str, text: str) -> float:
    text = text.strip()
    value = float(text) / 1e3 if _NUMBER.fullmatch(text) else None
    if value is None or not SHORTEST_OBJECTIVE <= value <= LONGEST_OBJECTIVE:
        raise _wrong(
            name, f"{text[:40]!r}; it should be milliseconds, from 1 to {LONGEST_OBJECTIVE * 1e3:.0f}"
        )
    return value


def _wrong(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"the header {name} is {what}", param=name, code="invalid_value")
