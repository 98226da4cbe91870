"""What a fleet can be told on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option, part
from onbeat.scheduler.cluster.fleet_config import FleetConfig

LAUNCHERS = ("local", "ray")
TRANSPORTS = ("tcp", "none")
"""What `--kv-transport` may be."""

_option = partial(option, group="fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """How many replicas there are, where they run, and who shares requests out among them."""

    fleet: FleetConfig = part(FleetConfig)
    kv_transport: str = _option(
        "tcp",
        choices=TRANSPORTS,
        help="how KV is copied between replicas when streams move; tcp: over connections of their own; none: "
        "streams do not move",
    )
    launcher: str = _option(
        "local",
        choices=LAUNCHERS,
        help="what starts the replicas; local: processes on this machine; ray: on the nodes of a Ray cluster",
    )
    ray_address: str | None = _option(
        None,
        metavar="ADDRESS",
        help="the Ray cluster: HOST:PORT of its head, or auto for the one of this node (default: auto)",
    )
    fleet_port: int | None = _option(
        None,
        at_least=0,
        metavar="PORT",
        help="with --launcher ray, the port on which replicas of other nodes reach this server (default: any "
        "free one)",
    )
    keeper_lease: str | None = _option(
        None,
        metavar="KIND:NAME",
        help="lease by which several machines choose the one that decides for the front ends of all, such as "
        "kubernetes:NAMESPACE/NAME or ray:NAME; all need the same --fleet-key",
    )
    keeper_address: str | None = _option(
        None,
        metavar="HOST[:PORT]",
        help="with --keeper-lease, where others reach this machine (default: its host name, any free port)",
    )
    start_timeout: int = _option(
        600, at_least=1, metavar="SECONDS", help="longest time of a replica's start; then it is given up"
    )

    def __post_init__(self) -> None:
        check(self, FleetOptions)
        if self.fleet.disaggregate is not None and self.kv_transport == "none":
            raise ConfigError("--disaggregate copies KV between replicas; leave out --kv-transport none")
        if self.keeper_address is not None and self.keeper_lease is None:
            raise ConfigError(
                f"--keeper-address {self.keeper_address} is for --keeper-lease; give both, or neither"
            )
        if self.launcher != "ray":
            for name, value in (("ray-address", self.ray_address), ("fleet-port", self.fleet_port)):
                if value is not None:
                    raise ConfigError(f"--{name} {value} is for --launcher ray; give both, or neither")
