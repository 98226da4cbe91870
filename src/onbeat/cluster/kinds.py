"""The engine of each replica, where replicas differ."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId, replica_number
from onbeat.core.kinds import ReplicaGroup, as_settings, kind_of
from onbeat.core.options import change
from onbeat.engine.config import EngineConfig


def engine_of(replica: ReplicaId, engine: EngineConfig, kinds: Sequence[ReplicaGroup]) -> EngineConfig:
    """Return the configuration of one replica: `r0` is of the first kind; added ones are like the last.

    Raises
    ------
    ConfigError : kinds name devices or degrees, but the engines do not stand in for devices; or an unknown
        policy.
    """
    if not kinds:
        return engine
    is_elsewhere = any(kind.device or kind.tensor_parallel_size for kind in kinds)
    if is_elsewhere and engine.load_format != "stand-in":
        raise ConfigError(
            "--kinds name what a replica stands in for, with --load-format stand-in; engines that compute "
            "run where they are started, and may differ in their policies alone: serve each kind by itself, "
            "with --replicas, --tensor-parallel-size"
        )
    kind = kind_of(replica_number(replica), kinds)
    return change(engine, **as_settings(kind, "device", "tensor_parallel_size", "policy"))
