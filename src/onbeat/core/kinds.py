"""Replicas that differ, as they are told of: on which device each runs, over how many, under which policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onbeat.core.errors import ConfigError

KIND_FORM = "device=ID,tp=N,policy=NAME,replicas=N"
KIND_HELP = (
    "kinds of replicas that differ, each with its number, those for prompts first; each has the common "
    "settings unless it says otherwise"
)
"""Of the flag --kinds."""
_EXAMPLE = "device=l4,tp=2,policy=slo,replicas=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """Equal replicas of a fleet; what is None is as it is told of all replicas."""

    device: str | None = None
    tensor_parallel_size: int | None = None
    policy: str | None = None
    replicas: int = 1

    def __str__(self) -> str:
        said = {"device": self.device, "tp": self.tensor_parallel_size, "policy": self.policy}
        pairs = [f"{name}={value}" for name, value in said.items() if value is not None]
        return ",".join([*pairs, f"replicas={self.replicas}"])


def parse_kind(text: str) -> ReplicaGroup:
    """Return the kind that a text such as `device=l4,tp=2,policy=slo,replicas=3` names.

    Raises
    ------
    ConfigError : it names none.
    """
    pairs = [pair.partition("=") for pair in text.replace(" ", "").split(",")]
    values = {name: value for name, _, value in pairs}
    numbers = [values.get("tp", "1"), values.get("replicas", "1")]
    is_known = values.keys() <= {"device", "tp", "policy", "replicas"} and len(values) == len(pairs)
    if not (is_known and all(values.values()) and all(n.isdecimal() and int(n) > 0 for n in numbers)):
        raise ConfigError(f"{text!r} is no kind of replica; write it as {_EXAMPLE}")
    return ReplicaGroup(
        device=values.get("device"),
        tensor_parallel_size=int(values["tp"]) if "tp" in values else None,
        policy=values.get("policy"),
        replicas=int(numbers[1]),
    )


def check_kinds(kinds: Sequence[ReplicaGroup], num_replicas: int) -> None:
    """Refuse kinds that do not make up the fleet.

    Raises
    ------
    ConfigError : their replicas are not as many as there are.
    """
    total = sum(kind.replicas for kind in kinds)
    if kinds and total != num_replicas:
        raise ConfigError(f"--kinds make up {total} replicas, but --replicas is {num_replicas}; give {total}")


def kind_of(number: int, kinds: Sequence[ReplicaGroup]) -> ReplicaGroup:
    """Return the kind of a replica, counted from 0; added ones are of the last kind."""
    for kind in kinds:
        if number < kind.replicas:
            return kind
        number -= kind.replicas
    return kinds[-1]


def as_settings(kind: ReplicaGroup, device: str, tensor_parallel: str, policy: str) -> dict[str, Any]:
    """Return what a kind says, under the names that settings have for it."""
    said = {device: kind.device, tensor_parallel: kind.tensor_parallel_size, policy: kind.policy}
    return {name: value for name, value in said.items() if value is not None}
