"""What requests to vLLM are held to: what the server's owner sets for onbeat, and what a request states.

The owner's part is the mapping `onbeat` of `--additional-config`. Of a request it is the keys `slo_...` of
its `extra_args`.

They get there by `vllm_xargs` of a body. The middleware, which has worked out all of them, sets `slo_id`, by
which it knows the request again, and `slo_held`, the objectives in JSON. A client of a server without it
states what it likes to, as flat keys such as `slo_ttft_ms`, and gets the rest from the server's defaults.

`read_request` returns what a request to a route of vLLM's is held to, and its body as vLLM is to get it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson
from starlette.datastructures import Headers

from onbeat.core.errors import ConfigError, InvalidRequest, quoted
from onbeat.core.slo import SLO_MODES, ShedMode, SLOMode
from onbeat.server.fields import refuse_misplaced, validated
from onbeat.server.objectives import (
    Caller,
    ObjectiveFields,
    RequestObjectives,
    SLOFields,
    metadata_objectives,
    request_objectives,
)
from onbeat.server.slo_defaults import NO_LIMITS, SLODefaults, read_classes_file
from onbeat.typed import Size, Text, convert
from onbeat.workload.slo_classes import Objectives

Calibrate = Literal["auto", "always", "off"]

MAX_BODY_BYTES = 2**26
"""Largest body by default: pictures come within it."""


class PluginConfig(Objectives, kw_only=True):
    """What is configured, for the scheduler's process and for the API server alike.

    Raises
    ------
    ConfigError : a value is out of range.
    """

    slo_class: Text | None = msgspec.field(name="class", default=None)
    shed: ShedMode = ShedMode.RELEGATE
    mode: SLOMode = SLO_MODES[0]
    classes: Text | None = None
    """Path of a file as of `--slo-classes`."""
    telemetry: Text | None = None
    """ZeroMQ address on which the scheduler tells what it does; None: it tells nobody."""
    calibrate: Calibrate = "auto"
    """Whether steps are measured at the start: `auto` where no earlier start with the same model, machine and
    settings has, `always` each time, `off` never."""
    profile: Text | None = None
    """File of measured step times."""
    max_body_bytes: Size = MAX_BODY_BYTES
    """Largest body of a request that is read for its objectives."""

    def __post_init__(self) -> None:
        if self.calibrate == "always" and self.profile is not None:
            raise ConfigError(
                f"calibrate is 'always', but the profile {self.profile} is named too; leave one of them out"
            )
        if self.telemetry is not None and not self.telemetry.startswith(("tcp://", "ipc://", "inproc://")):
            raise ConfigError(
                f"telemetry is {self.telemetry!r}; it must be a ZeroMQ address such as tcp://127.0.0.1:5557"
            )

    def defaults(self, environment: Mapping[str, str]) -> SLODefaults:
        """Return what requests get that state nothing.

        Parameters
        ----------
        environment : where the classes file's `key_env` finds keys.

        Raises
        ------
        ConfigError : no such class, or a classes file that is wrong.
        """
        file = SLODefaults()
        if self.classes is not None:
            file = read_classes_file(Path(self.classes), environment)
            if any(its.limits != NO_LIMITS for its in file.keys.values()):
                raise ConfigError(
                    f"{self.classes} limits what an API key may take, which only onbeat serve does; "
                    "leave that out"
                )
        return SLODefaults(
            classes=file.classes,
            keys=file.keys,
            slo=self.slo(),
            slo_class=self.slo_class,
            shed=self.shed,
            mode=self.mode,
        )


def read_config(
    additional: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> tuple[PluginConfig, SLODefaults]:
    """Return what vLLM's `additional_config` says under `onbeat`; all of it may be left out.

    Raises
    ------
    ConfigError : an unknown key, or a wrong value; names it.
    """
    where = "additional_config, onbeat"
    config = convert(PluginConfig, (additional or {}).get("onbeat", {}), where)
    try:
        return config, config.defaults(environment)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def log_as_vllm_does() -> None:
    """Let what onbeat says come where vLLM's own lines come, which sets up its own logger alone."""
    ours, theirs = logging.getLogger("onbeat"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ROUTES = frozenset((CHAT, COMPLETIONS, RESPONSES, MESSAGES))
"""The paths whose requests and answers are understood; to others the server's defaults apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """What a client asked for."""

    path: str
    slo_id: str
    body: bytes
    """For vLLM."""
    objectives: RequestObjectives
    is_streamed: bool


def read_request(
    path: str, raw: bytes, headers: Headers, caller: Caller, defaults: SLODefaults, *, slo_id: str
) -> ReadRequest | None:
    """Return a request with its objectives in `vllm_xargs`; None if its body is no JSON object.

    What is no object is for vLLM to refuse, in its own words. Of the body `slo` is taken out, and replaced
    by what it comes to; keys `slo_...` of `vllm_xargs` and of `metadata` state objectives where there is
    no `slo`.

    Raises
    ------
    InvalidRequest : an objective is wrong, wherever it is stated.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(body, dict):
        return None
    refuse_misplaced(body)
    stated = body.pop("slo", None)
    others = _mapping(body, "vllm_xargs")
    if stated is None:
        stated = metadata_objectives(others) or metadata_objectives(_mapping(body, "metadata"))
    fields = validated(ObjectiveFields, {"slo": stated, **_shared(path, body)}, [])
    objectives = request_objectives(fields, headers, caller, defaults)
    refuse_job(objectives.job)
    kept = {name: value for name, value in others.items() if not name.startswith(PREFIX)}
    body["vllm_xargs"] = kept | as_extra_args(objectives, slo_id)
    return ReadRequest(
        path=path,
        slo_id=slo_id,
        body=orjson.dumps(body),
        objectives=objectives,
        is_streamed=body.get("stream") is True,
    )


def _mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {quoted(value)}; it should be an object", param=name)
    return value


def _shared(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that bear on objectives and that vLLM gets, too."""
    if path == MESSAGES:  # whose tiers name no class
        user = _mapping(body, "metadata").get("user_id")
        return {"user": user if isinstance(user, str) else None}
    return {"service_tier": body.get("service_tier"), "user": body.get("user")}


PREFIX = "slo_"
ID, HELD = "slo_id", "slo_held"


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
    if extra_args and ID in extra_args:
        return _given(extra_args.get(HELD), defaults)
    stated = metadata_objectives(extra_args) or {}
    stated.pop("tenant", None)
    shed = stated.get("shed")
    if isinstance(shed, str):  # a word of ours, of which `off` is the server's to choose
        stated["shed"] = {"reject": True, "relegate": False, "off": None}.get(shed, shed)
    fields = ObjectiveFields(slo=validated(SLOFields, stated, [])) if stated else ObjectiveFields()
    objectives = request_objectives(fields, Headers(), KnownCaller(), defaults)
    refuse_job(objectives.job)
    return objectives


def _given(text: Any, defaults: SLODefaults) -> RequestObjectives:
    """Return what the middleware says; who feigns it gets no more weight than any caller may state."""
    known = [1.0]
    known += [each.weight for each in defaults.classes.values() if each.weight is not None]
    known += [each.weight for each in defaults.keys.values() if each.weight is not None]
    try:
        held = msgspec.json.decode(text, type=RequestObjectives)
    except (msgspec.MsgspecError, TypeError, ConfigError) as error:
        raise InvalidRequest(f"{HELD} is {quoted(text)} ({error}); let the middleware set it") from error
    refuse_job(held.job)
    if held.weight <= 0:
        raise InvalidRequest(f"{HELD} has the weight {held.weight:g}; it must be above 0")
    return replace(held, weight=min(held.weight, max(known)))


def as_extra_args(objectives: RequestObjectives, slo_id: str) -> dict[str, str]:
    """Return the keys from which `read` makes the same objectives again."""
    return {ID: slo_id, HELD: msgspec.json.encode(objectives).decode()}


def refuse_job(job: object | None) -> None:
    """Refuse calls of jobs, whose table only onbeat's own server keeps."""
    if job is not None:
        raise InvalidRequest(
            "a job is named, but vLLM's server divides no deadlines of jobs; leave slo.job out, and "
            "state slo.e2e_ms",
            param="slo.job",
        )
