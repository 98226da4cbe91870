"""What the owner of a vLLM server sets for onbeat: the mapping `onbeat` of its `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO_MODES, ShedMode, SLOMode
from onbeat.server.slo_defaults import NO_LIMITS, ClassesFile, SLODefaults, read_classes_file
from onbeat.typed import Size, Text, convert
from onbeat.workload.slo_config import Objectives

Calibrate = Literal["auto", "always", "off"]

MAX_BODY_BYTES = 2**26
"""Largest body by default: pictures come within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """What is configured, for the scheduler's process and for the API server alike.

    Raises
    ------
    ConfigError : a value is out of range.
    """

    slo: SLODefaults = field(default_factory=SLODefaults)
    telemetry: str | None = None
    """ZeroMQ address on which the scheduler tells what it does; None: it tells nobody."""
    calibrate: Calibrate = "auto"
    """Whether steps are measured at the start: `auto` where no earlier start with the same model, machine and
    settings has, `always` each time, `off` never."""
    profile: Path | None = None
    """File of measured step times."""
    max_body_bytes: int = MAX_BODY_BYTES
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


def read_config(additional: Mapping[str, Any] | None, environment: Mapping[str, str]) -> PluginConfig:
    """Return what vLLM's `additional_config` says under `onbeat`; all of it may be left out.

    Keys: `ttft_ms`, `tbt_ms`, `e2e_ms`, `class`, `shed`, `mode`, `classes` (path of a file as of
    `--slo-classes`), `telemetry`, `calibrate`, `profile`, `max_body_bytes`.

    Parameters
    ----------
    environment : where the classes file's `key_env` finds keys.

    Raises
    ------
    ConfigError : an unknown key, or a wrong value; names it.
    """
    where = "additional_config, onbeat"
    stated = convert(_Stated, (additional or {}).get("onbeat", {}), where)
    try:
        return _config(stated, environment)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


class _Stated(Objectives, kw_only=True):
    slo_class: Text | None = msgspec.field(name="class", default=None)
    shed: ShedMode = ShedMode.RELEGATE
    mode: SLOMode = SLO_MODES[0]
    classes: Text | None = None
    telemetry: Text | None = None
    calibrate: Calibrate = "auto"
    profile: Text | None = None
    max_body_bytes: Size = MAX_BODY_BYTES


def _config(stated: _Stated, environment: Mapping[str, str]) -> PluginConfig:
    file = ClassesFile()
    if stated.classes is not None:
        file = read_classes_file(Path(stated.classes), environment)
        if any(its.limits != NO_LIMITS for its in file.keys.values()):
            raise ConfigError(
                f"{stated.classes} limits what an API key may take, which only onbeat serve does; "
                "leave that out"
            )
    return PluginConfig(
        slo=SLODefaults(
            classes=file.classes,
            keys=file.keys,
            slo=stated.slo(),
            slo_class=stated.slo_class,
            shed=stated.shed,
            mode=stated.mode,
        ),
        telemetry=stated.telemetry,
        calibrate=stated.calibrate,
        profile=None if stated.profile is None else Path(stated.profile),
        max_body_bytes=stated.max_body_bytes,
    )
