"""The file of a plan: what `onbeat serve --config` runs, and the promise that a load test holds it to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct, field

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.slo import SLO_CLASSES, SLOMode
from onbeat.files import read, read_bytes, write
from onbeat.typed import NotNegative, Share, convert
from onbeat.workload.slo_classes import read_slo_config

SECTION = "plan"
"""Key of what is not for the server."""
PATHS = ("trace", "dataset-path", "slo-config")
"""Flags of the load that name files, told from the folder of the plan."""
HEAD = """\
# Made by `onbeat plan`. Serve it:   onbeat serve --config {name}
# Hold it to its promise:           onbeat bench serve --check-plan {name}
# `plan` holds the promise and where it comes from: leave it as it is. Flags of the server go above it.
# `3 \u00d7 (2 L4)` means three replicas of two L4 each. `watts` is what all GPUs draw at most. `attainment`
# is the share of the requests in time, and `capacity` the most requests/s; each is followed by its 95 %
# interval.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a fleet is to keep."""

    path: Path
    share: float
    """Of the requests with objectives that must be good, in (0, 1]."""
    mode: SLOMode
    fleet: str
    """What it was made for."""
    load: Mapping[str, Any]
    """Flags of the load, as `onbeat bench serve` takes them."""
    mean_tpot: float | None
    """Of the simulated requests, seconds; None where the plan does not say."""


def write_plan(path: Path, serve: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Write a plan.

    Parameters
    ----------
    serve : flags of the server.
    plan : the promise, and where it comes from.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    sealed = {**plan, "seal": _seal(plan, serve.get("fleet"))}
    text = HEAD.format(name=path.name) + yaml.safe_dump(
        {**serve, SECTION: sealed}, sort_keys=False, width=110, allow_unicode=True
    )
    write(path, text)


def read_promise(path: Path) -> Promise:
    """Read the promise of a plan.

    Raises
    ------
    ConfigError : the file cannot be read, is no plan, or was changed by hand where it says what was promised.
    """
    remedy = "make a plan with onbeat plan --output FILE.yaml"
    content = read(dict[str, Any], path, "the plan", hint=f"; {remedy}")
    plan = content.get(SECTION)
    if not isinstance(plan, dict) or not plan.get("promise"):
        raise ConfigError(f"{path} is no plan, as it has no promise; {remedy}")
    bare = {key: value for key, value in plan.items() if key != "seal"}
    if plan.get("seal") != _seal(bare, content.get("fleet")):
        raise ConfigError(
            f"{path} was changed under 'plan' or 'fleet' since onbeat plan wrote it, so nobody has simulated "
            "what it says now; plan again, or take the change back"
        )
    made = convert(_Plan, plan, f"{path} is no plan that onbeat plan wrote", hint="; plan again")
    load = dict(made.load)
    for name in PATHS:
        if name in load and load[name] not in SLO_CLASSES:
            load[name] = str(path.parent / load[name])
    trace, classes = load.get("trace") or load.get("dataset-path"), load.get("slo-config")
    if trace is not None and digest_of(Path(trace)) != made.trace_sha256:
        raise ConfigError(f"{trace} is not the trace that {path} was made for; plan again for the new one")
    if classes is not None and digest_of_classes(classes) != made.classes_sha256:
        raise ConfigError(
            f"{classes}, or a trace that it names, is not what {path} was made for; plan again for the new "
            "classes"
        )
    tpot_ms = made.verified.mean_tpot_ms
    return Promise(
        path=path,
        share=made.promise.attainment,
        mode=made.promise.slo_mode,
        fleet=made.fleet,
        load=load,
        mean_tpot=None if tpot_ms is None else tpot_ms / 1e3,
    )


class _Promised(Struct, rename="kebab"):
    attainment: Share
    slo_mode: SLOMode


class _Verified(Struct, rename="kebab"):
    mean_tpot_ms: NotNegative | None = None


class _Plan(Struct, rename="kebab"):
    """As far as a promise is read from it."""

    promise: _Promised
    load: dict[str, Any]
    fleet: str
    verified: _Verified = field(default_factory=_Verified)
    trace_sha256: str | None = field(name="trace-sha256", default=None)
    classes_sha256: str | None = field(name="classes-sha256", default=None)

    def __post_init__(self) -> None:
        if wrong := [name for name in PATHS if not isinstance(self.load.get(name, ""), str)]:
            raise ConfigError(f"load.{wrong[0]} is {quoted(self.load[wrong[0]])}; it must be a text")


def digest_of(path: Path) -> str:
    """Return what tells a file from others.

    Raises
    ------
    ConfigError : it cannot be read.
    """
    return hashlib.sha256(read_bytes(path)).hexdigest()


def digest_of_classes(file: str) -> str | None:
    """Return what tells a file of classes, with their traces, from others; None of a built-in class.

    Raises
    ------
    ConfigError : one of them cannot be read.
    """
    if file in SLO_CLASSES:
        return None
    traces = [each.trace for each in read_slo_config(Path(file)) if each.trace is not None]
    return hashlib.sha256("".join(map(digest_of, [Path(file), *traces])).encode()).hexdigest()


def _seal(plan: Mapping[str, Any], fleet: Any) -> str:
    text = json.dumps([plan, fleet], sort_keys=True, default=str)
    seal = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"x{seal}" if seal.replace("e", "", 1).isdecimal() else seal  # 12e34 would be read as a number
