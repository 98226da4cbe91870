"""What the owner of a vLLM server sets for onbeat: the mapping `onbeat` of its `--additional-config`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
        file = ClassesFile()
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
