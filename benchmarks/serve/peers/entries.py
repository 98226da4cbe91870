"""Which servers take part and how each is started: entries of `servers.yaml`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.servers import free_port
from onbeat.bench.record import DEFAULT_PATHS, Api

VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")
"""As in a shell: ${NAME}, or ${NAME:-DEFAULT}."""


class EntryError(ValueError):
    """An entry or what it refers to is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A flag of a peer whose best value is looked for."""

    flag: str
    values: tuple[str, ...]
    default: str
    """What the server takes without the flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A server as the file describes it: variables and placeholders are not filled in."""

    name: str
    about: str
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    """What requests call the model; None asks the server."""
    api: Api = "completions"
    ignore_eos: bool = True
    """Whether requests ask to go on after the end-of-sequence token."""
    keeps_alive: bool = True
    """Whether a connection may be used for another request: false for a server that drops it unannounced."""
    tune: Tuning | None = None

    def with_flag(self, flag: str, value: str) -> Entry:
        """Return the same server with one more flag, under a name that tells it."""
        return replace(self, name=f"{self.name} {value}", command=f"{self.command} {flag} {value}", tune=None)

    def as_json(self) -> dict[str, Any]:
        """Return what a result says of it: nothing of this machine's paths."""
        return {"about": self.about, "command": self.command, "environment": dict(self.environment)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An entry made out for this machine."""

    name: str
    command: str
    environment: Mapping[str, str]
    url: str
    model: str | None


def read_entries(path: Path, names: Sequence[str]) -> list[Entry]:
    """Return the named entries of a file, in the order of the names.

    Raises
    ------
    EntryError : there is no such entry, or it has an unknown key.
    """
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name in names:
        if name not in found:
            raise EntryError(f"{path.name} has no server {name!r}; it has {', '.join(found)}")
    return [parse_entry(name, found[name]) for name in names]


def parse_entry(name: str, values: Mapping[str, Any]) -> Entry:
    """Return one entry.

    Raises
    ------
    EntryError : a key is missing or unknown.
    """
    known = {"about", "command", "environment", "model", "api", "ignore_eos", "keeps_alive", "tune"}
    if unknown := set(values) - known:
        raise EntryError(
            f"server {name!r} has the unknown key {sorted(unknown)[0]!r}; known: {sorted(known)}"
        )
    if missing := {"about", "command"} - set(values):
        raise EntryError(f"server {name!r} lacks the key {sorted(missing)[0]!r}")
    if (api := values.get("api", "completions")) not in DEFAULT_PATHS:
        raise EntryError(f"server {name!r} has the unknown api {api!r}; known: {', '.join(DEFAULT_PATHS)}")
    own = dict(values)
    own["environment"] = {key: str(value) for key, value in own.get("environment", {}).items()}
    if tune := own.get("tune"):
        own["tune"] = Tuning(
            flag=tune["flag"], values=tuple(map(str, tune["values"])), default=str(tune["default"])
        )
    return Entry(name=name, **own)


def make_launch(entry: Entry, *, port: int, num_cores: int, variables: Mapping[str, str]) -> Launch:
    """Fill in an entry's placeholders and variables.

    Raises
    ------
    EntryError : a variable is not set.
    """
    places = {"port": port, "threads": num_cores, "last_core": num_cores - 1}

    def fill(text: str) -> str:
        for place, value in places.items():
            text = text.replace("{" + place + "}", str(value))
        return VARIABLE.sub(lambda match: _value(match, entry.name, variables), text)

    return Launch(
        name=entry.name,
        command=fill(entry.command),
        environment={key: fill(value) for key, value in entry.environment.items()},
        url=f"http://127.0.0.1:{port}",
        model=None if entry.model is None else fill(entry.model),
    )


def launch_here(entry: Entry) -> Launch:
    """Fill in an entry for this machine, with a free port and the variables of this process."""
    num_cores = len(os.sched_getaffinity(0))
    return make_launch(entry, port=free_port(), num_cores=num_cores, variables=os.environ)


def _value(match: re.Match[str], entry_name: str, variables: Mapping[str, str]) -> str:
    name, default = match["name"], match["default"]
    if name in variables:
        return variables[name]
    if default is None:
        raise EntryError(f"server {entry_name!r} needs the variable {name}: set it before the script")
    return default
