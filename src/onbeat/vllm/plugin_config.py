"""What the owner of a vLLM server sets for onbeat: the mapping `onbeat` of its `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.hints import likely_meant
from onbeat.core.slo import SLO, SLO_MODES, ShedMode
from onbeat.server.slo_defaults import NO_LIMITS, ClassesFile, SLODefaults, read_classes_file

Word = TypeVar("Word", bound=str)
Calibrate = Literal["auto", "always", "off"]

MAX_BODY_BYTES = 2**26
"""Largest body by default: pictures come within it."""
_OBJECTIVES = {"ttft_ms": "ttft", "tbt_ms": "tbt", "e2e_ms": "e2e"}
_KEYS = (
    *_OBJECTIVES,
    *("class", "shed", "mode", "classes", "telemetry", "calibrate", "profile", "max_body_bytes"),
)


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
        if self.calibrate not in get_args(Calibrate):
            raise ConfigError(f"calibrate is {self.calibrate!r}; it must be auto, always or off")
        if self.calibrate == "always" and self.profile is not None:
            raise ConfigError(
                f"calibrate is 'always', but the profile {self.profile} is named too; leave one of them out"
            )
        if self.telemetry is not None and not self.telemetry.startswith(("tcp://", "ipc://", "inproc://")):
            raise ConfigError(
                f"telemetry is {self.telemetry!r}; it must be a ZeroMQ address such as tcp://127.0.0.1:5557"
            )
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes is {self.max_body_bytes}; it must be at least 1")


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
    stated = (additional or {}).get("onbeat", {})
    if not isinstance(stated, Mapping):
        raise ConfigError(f"additional_config has onbeat = {quoted(stated)}; it must be a JSON object")
    for key in stated:
        if key not in _KEYS:
            near = likely_meant(str(key), _KEYS)
            cure = f"did you mean {near}?" if near else f"known are {', '.join(_KEYS)}"
            raise ConfigError(f"additional_config, onbeat: unknown key {key!r}; {cure}")
    try:
        return _read(stated, environment)
    except ConfigError as error:
        raise ConfigError(f"additional_config, onbeat: {error}") from error


def _read(stated: Mapping[str, Any], environment: Mapping[str, str]) -> PluginConfig:
    file = ClassesFile()
    if stated.get("classes") is not None:
        file = read_classes_file(Path(_text(stated, "classes")), environment)
        if any(its.limits != NO_LIMITS for its in file.keys.values()):
            raise ConfigError(
                f"{stated['classes']} limits what an API key may take, which only onbeat serve does; "
                "leave that out"
            )
    others: dict[str, Any] = {}
    if stated.get("profile") is not None:
        others["profile"] = Path(_text(stated, "profile"))
    for key in ("telemetry", "calibrate"):
        if stated.get(key) is not None:
            others[key] = _text(stated, key)
    if stated.get("max_body_bytes") is not None:
        others["max_body_bytes"] = int(_number(stated, "max_body_bytes"))
    return PluginConfig(
        slo=SLODefaults(
            classes=file.classes,
            keys=file.keys,
            slo=SLO(
                **{
                    name: _number(stated, key) / 1e3
                    for key, name in _OBJECTIVES.items()
                    if stated.get(key) is not None
                }
            ),
            slo_class=None if stated.get("class") is None else _text(stated, "class"),
            shed=_one_of(stated, "shed", (ShedMode.RELEGATE, ShedMode.REJECT, ShedMode.OFF)),
            mode=_one_of(stated, "mode", SLO_MODES),
        ),
        **others,
    )


def _one_of(stated: Mapping[str, Any], key: str, known: Sequence[Word]) -> Word:
    """Return a word, the first of the known ones if none is stated."""
    value = stated.get(key)
    for each in known:
        if value == each:
            return each
    if value is None:
        return known[0]
    raise ConfigError(f"{key} is {quoted(value)}; it must be one of {', '.join(known)}")


def _text(stated: Mapping[str, Any], key: str) -> str:
    value = stated[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} is {quoted(value)}; it must be a text")
    return value


def _number(stated: Mapping[str, Any], key: str) -> float:
    value = stated[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} is {quoted(value)}; it must be a number")
    return float(value)
