"""Replicas that differ: on which device each runs, and over how many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId, replica_number
from onbeat.engine.config import EngineConfig

_EXAMPLE = "device=l4,tp=2,replicas=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """Equal replicas of a fleet: what they stand in for, and how many they are."""

    device: str
    tensor_parallel_size: int
    replicas: int

    def __str__(self) -> str:
        return f"device={self.device},tp={self.tensor_parallel_size},replicas={self.replicas}"


def parse_kind(text: str) -> ReplicaGroup:
    """Return the kind that a text such as `device=l4,tp=2,replicas=3` names.

    Raises
    ------
    ConfigError : it names none.
    """
    pairs = [pair.partition("=") for pair in text.replace(" ", "").split(",")]
    values = {name: value for name, _, value in pairs}
    numbers = [values.get("tp", "1"), values.get("replicas", "1")]
    is_known = values.keys() <= {"device", "tp", "replicas"} and len(values) == len(pairs)
    if not (is_known and values.get("device") and all(n.isdecimal() and int(n) > 0 for n in numbers)):
        raise ConfigError(f"{text!r} is no kind of replica; write it as {_EXAMPLE}")
    tensor_parallel_size, replicas = map(int, numbers)
    return ReplicaGroup(device=values["device"], tensor_parallel_size=tensor_parallel_size, replicas=replicas)


def check_kinds(kinds: Sequence[ReplicaGroup], num_replicas: int) -> None:
    """Refuse kinds that do not make up the fleet.

    Raises
    ------
    ConfigError : their replicas are not as many as there are.
    """
    total = sum(kind.replicas for kind in kinds)
    if kinds and total != num_replicas:
        raise ConfigError(f"--kinds make up {total} replicas, but --replicas is {num_replicas}; give {total}")


def engine_of(replica: ReplicaId, engine: EngineConfig, kinds: Sequence[ReplicaGroup]) -> EngineConfig:
    """Return the configuration of one replica: `r0` is of the first kind; added ones are like the last.

    Raises
    ------
    ConfigError : kinds are given, but the engines do not stand in for devices.
    """
    if not kinds:
        return engine
    if engine.load_format != "stand-in":
        raise ConfigError(
            "--kinds name what a replica stands in for, with --load-format stand-in; engines that compute "
            "run where they are started: serve each kind by itself, with --replicas, --tensor-parallel-size"
        )
    of_replicas = [kind for kind in kinds for _ in range(kind.replicas)]
    kind = of_replicas[min(replica_number(replica), len(of_replicas) - 1)]
    return replace(engine, device=kind.device, tensor_parallel_size=kind.tensor_parallel_size)
