"""One life of a replica: a process from its start to its end, and what it says meanwhile."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from onbeat.cluster.launcher import ReplicaPlace
from onbeat.cluster.processor_time import ProcessorWaits
from onbeat.core.fleet import ReplicaId, ReplicaLimits, ReplicaLoad, replica_number
from onbeat.core.hang import HangLimits
from onbeat.core.protocols import EngineInfo, EnginePulse
from onbeat.engine.kv_access import KVLayout

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
