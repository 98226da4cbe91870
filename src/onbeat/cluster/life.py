"""One life of a replica: a process from its start to its end, and what it says meanwhile.

What keeps a process that has started from serving with the others, or from moving streams with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from onbeat.cluster.launcher import ReplicaPlace
from onbeat.cluster.processor_time import ProcessorWaits
from onbeat.core.errors import ConfigError, KVUnavailable
from onbeat.core.fleet import ReplicaId, ReplicaLimits, ReplicaLoad, replica_number
from onbeat.core.hang import HangLimits
from onbeat.core.protocols import EngineInfo, EnginePulse
from onbeat.engine.kv_access import KVLayout
from onbeat.version import __version__


def check_node(host: str, version: str) -> None:
    """Raise ConfigError where a node has another onbeat than this process."""
    if version != __version__:
        raise ConfigError(
            f"the node {host} has onbeat {version}, and this server has {__version__}; install the same on "
            "all nodes"
        )


def other_version(life: Life) -> str | None:
    """Return why a process cannot join that runs another onbeat than this one; None where it is the same."""
    if life.version == __version__:
        return None
    other = f"onbeat {life.version[:40]}" if life.version else "an onbeat that does not say its version"
    return (
        f"{life.replica} runs {other}, and this server {__version__}: the package was changed while the "
        "server ran. Restart the server, or install that version again"
    )


def other_files(replica: ReplicaId, loaded: Mapping[str, str], first: Mapping[str, str]) -> str | None:
    """Return why a process cannot join that has loaded other files than the first one; None if the same.

    Parameters
    ----------
    loaded, first : `EngineInfo.file_digests` of both.
    """
    if loaded == first:
        return None
    changed = sorted({name for name, _ in loaded.items() ^ first.items()})
    return (
        f"{replica} has loaded another {', '.join(changed[:3])} than the server began with: the model's "
        "files were changed while it ran. Restart the server to serve them, or put the old ones back"
    )


def other_blocks(life: Life, lives: Iterable[Life]) -> str | None:
    """Return how the KV blocks of a replica differ from those of the first; None where they do not."""
    others = [each for each in lives if each is not life and each.kv_layout is not None]
    if life.kv_layout is None or not others:
        return None
    first = min(others, key=lambda each: each.replica_number)
    assert first.kv_layout is not None
    try:
        life.kv_layout.check_same(first.kv_layout)
    except KVUnavailable as error:
        return f"compared with {first.replica}, its {error}"
    return None


SUSPENDED_SECONDS = 2.0
"""Silence after which a process that the system has stopped is given up."""
LIMITS = HangLimits(silence_seconds=15.0)
"""Silence and steps after which any is: it says twice a second that it lives, whatever its steps take."""


@dataclass(slots=True)
class Life:
    """What is known of a process that holds a replica."""

    replica: ReplicaId
    number: int
    """How many lives the replica had before."""
    heard: float
    """When it last said anything, or was started; by the clock of this process."""
    started: float = 0.0
    name: bytes = b""
    """By which it connects. It cannot be guessed, and no other life has it."""
    public_key: bytes = b""
    """Of its connection, where that is encrypted."""
    place: ReplicaPlace | None = None
    is_greeted: bool = False
    """Whether it has been told to begin again, since it ran before this process."""
    version: str = ""
    """Of its onbeat, once it has said so."""
    info: EngineInfo | None = None
    """None until it is ready."""
    kv_layout: KVLayout | None = None
    """None where others cannot copy its KV."""
    pulse: EnginePulse = field(default_factory=lambda: EnginePulse(0.0))
    num_taken: int = 0
    """Requests that it has read, as it said last."""
    load: ReplicaLoad | None = None
    last_words: str = ""
    shares_kv: bool = False
    """Whether others have been let copy its KV."""
    adapters: dict[int, str | None] = field(default_factory=dict)
    """Number of each LoRA adapter that it was to load and answered of -> why it could not; None: it has."""
    waits: ProcessorWaits = field(default_factory=ProcessorWaits)
    """For processors, while it may hang."""

    def __post_init__(self) -> None:
        self.started = self.heard
        self.name = f"{self.replica}.{self.number}.{secrets.token_hex(16)}".encode()

    @property
    def replica_number(self) -> int:
        """That of the replica, as timelines name it."""
        return replica_number(self.replica)

    @property
    def present_pulse(self) -> EnginePulse:
        """What it said of its step, when it said anything last, and what it has waited for processors."""
        return replace(self.pulse, time=self.heard, waited=self.waits.seconds)

    @property
    def limits(self) -> ReplicaLimits:
        """What the ready replica can take."""
        assert self.info is not None, "it is ready"
        return self.info.limits
