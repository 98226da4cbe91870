"""What a fleet can be told on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import POOLS_FORM, POOLS_HELP, PoolSizes, parse_pools
from onbeat.core.kinds import KIND_FORM, KIND_HELP, ReplicaGroup, check_kinds, parse_kind
from onbeat.core.options import check, option
from onbeat.scheduler.cluster.migration import MOVE_HELP, MOVE_RULES, check_move_rule
from onbeat.scheduler.cluster.pools import RULE_HELP, PoolRule, check_pools
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.cluster.scaling import (
    DOWN_HELP,
    DOWN_SECONDS,
    POLICY_HELP,
    ScaleBounds,
    check_scaling,
    parse_bounds,
)

LAUNCHERS = ("local", "ray")
TRANSPORTS = {"auto": ("cma", "tcp"), "cma": ("cma",), "tcp": ("tcp",), "nixl": ("nixl",), "none": ()}
"""What `--kv-transport` may be -> the ways to copy KV, the best first."""

_option = partial(option, group="fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """How many replicas there are, where they run, and who shares requests out among them."""

    replicas: int = _option(
        1,
        aliases=("--data-parallel-size", "-dp"),
        at_least=1,
        metavar="N",
        help="engine processes that share the requests, each with a copy of the model and its share of the "
        "cores",
    )
    router: str | None = _option(
        None,
        choices=tuple(ROUTERS),
        help="what chooses a replica for a request (default: slo under policy slo, else least-outstanding)",
    )
    disaggregate: PoolSizes | None = _option(
        None,
        parse=parse_pools,
        metavar=POOLS_FORM,
        help=POOLS_HELP,
    )
    pool_rule: PoolRule = _option("adaptive", help=RULE_HELP)
    move_rule: str = _option("mend", choices=tuple(MOVE_RULES), help=MOVE_HELP)
    kv_transport: str = _option(
        "auto",
        choices=tuple(TRANSPORTS),
        help="how KV goes from replica to replica, so that streams can move; cma: straight from memory to "
        "memory, on one machine; tcp; nixl: by NVIDIA's NIXL (extra nixl); auto: cma where it works, else "
        "tcp; none: streams do not move",
    )
    launcher: str = _option(
        "local",
        choices=LAUNCHERS,
        help="what starts the replicas; local: as processes of this machine; ray: on a Ray cluster's nodes",
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
        help="with --launcher ray, where replicas on other nodes reach this server (default: any free port)",
    )
    start_timeout: int = _option(
        600,
        at_least=1,
        metavar="SECONDS",
        help="a replica that gets no place, or says nothing, for so long while it starts is given up",
    )
    kinds: tuple[ReplicaGroup, ...] = _option(
        (), parse=parse_kind, metavar=KIND_FORM, help=KIND_HELP + "; device and tp of stand-ins only"
    )

    autoscale: ScaleBounds | None = _option(
        None,
        parse=parse_bounds,
        metavar="MIN..MAX",
        help="let the fleet decide on the number of replicas; it begins with --replicas of them, at least "
        "MIN and one",
    )
    autoscale_policy: str = _option("objective", metavar="NAME", help=POLICY_HELP)
    scale_down_seconds: float = _option(DOWN_SECONDS, metavar="SECONDS", help=DOWN_HELP)

    def __post_init__(self) -> None:
        check(self, FleetOptions)
        check_scaling(self.autoscale, self.autoscale_policy, self.scale_down_seconds)
        if self.autoscale is not None:
            self._check_autoscale(self.autoscale)
        check_pools(self.disaggregate, self.pool_rule, replicas=self.replicas)
        check_move_rule(
            self.move_rule, moves=self.kv_transport != "none", cure="give another --kv-transport than none"
        )
        if self.disaggregate is not None and self.kv_transport == "none":
            raise ConfigError(
                "--disaggregate hands KV from replica to replica; leave out --kv-transport none"
            )
        check_kinds(self.kinds, self.num_replicas)
        if self.launcher != "ray":
            for name, value in (("ray-address", self.ray_address), ("fleet-port", self.fleet_port)):
                if value is not None:
                    raise ConfigError(f"--{name} {value} is for --launcher ray; give both, or neither")

    def _check_autoscale(self, bounds: ScaleBounds) -> None:
        if self.disaggregate is not None:
            raise ConfigError(
                f"--autoscale {bounds} does not go with --disaggregate {self.disaggregate}: which of the two "
                "pools is short is not decided; leave one of them out"
            )
        if self.kinds:
            raise ConfigError(
                f"--autoscale {bounds} does not go with --kinds: which kind comes next is not decided; leave "
                "one of them out"
            )
        if self.replicas > bounds.most or 1 < self.replicas < bounds.least:
            raise ConfigError(
                f"--replicas {self.replicas} is outside of --autoscale {bounds}; leave --replicas out, or "
                "begin with a number between"
            )

    @property
    def first_replicas(self) -> int:
        """Replicas that are there when the server is ready."""
        return self.num_replicas if self.autoscale is None else max(self.replicas, self.autoscale.least)

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be at once."""
        return self.num_replicas if self.autoscale is None else self.autoscale.most

    @property
    def num_replicas(self) -> int:
        """All replicas that are asked for, whatever they do."""
        pools = self.disaggregate
        return self.replicas if pools is None else pools.num_replicas

    @property
    def num_prefill(self) -> int:
        """Those that compute prompts for the others."""
        return 0 if self.disaggregate is None else self.disaggregate.prefill
