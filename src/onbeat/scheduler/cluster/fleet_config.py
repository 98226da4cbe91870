"""What a fleet can be told, live or simulated, and what of it decides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import DRAIN_SECONDS, POOLS_FORM, POOLS_HELP, PoolSizes, parse_pools
from onbeat.core.kinds import KIND_FORM, KIND_HELP, ReplicaGroup, check_kinds, parse_kind
from onbeat.core.options import check, option
from onbeat.scheduler.cluster import scaling
from onbeat.scheduler.cluster.membership import DOWN_SECONDS, FleetRules
from onbeat.scheduler.cluster.migration import MOVE_RULES, POOL_POLICIES
from onbeat.scheduler.cluster.routers import ROUTERS

_option = partial(option, group="fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """How many replicas share the requests, and who decides where these go.

    Raises
    ------
    ConfigError : options that do not go together.
    """

    replicas: int = _option(
        1,
        aliases=("--data-parallel-size", "-dp"),
        at_least=1,
        metavar="N",
        help="replicas that share the requests, each with a copy of the model and a share of the cores",
    )
    router: str | None = _option(
        None,
        choices=ROUTERS.keys,
        help="rule that chooses a replica for a request (default: slo under policy slo, else "
        "least-outstanding)",
    )
    disaggregate: PoolSizes | None = _option(None, parse=parse_pools, metavar=POOLS_FORM, help=POOLS_HELP)
    pool_rule: str = _option(
        "adaptive",
        choices=POOL_POLICIES.keys,
        help="with --disaggregate, which replica computes a prompt and which generates",
    )
    move_rule: str = _option(
        "mend",
        choices=MOVE_RULES.keys,
        help="which streams move to other replicas, beside those of drains",
    )
    kinds: tuple[ReplicaGroup, ...] = _option(
        (),
        parse=parse_kind,
        metavar=KIND_FORM,
        help=KIND_HELP + "; in serve, only stand-ins differ in device and tp",
    )
    autoscale: scaling.ScaleBounds | None = _option(
        None,
        parse=scaling.parse_bounds,
        metavar="MIN..MAX",
        help="let the fleet decide on the number of replicas; it begins with --replicas",
    )
    autoscale_policy: str = _option(
        "objective",
        choices=scaling.SCALING_POLICIES.keys,
        help="what decides on the number of replicas",
    )
    scale_down_seconds: float = _option(DOWN_SECONDS, metavar="SECONDS", at_least=1, help=scaling.DOWN_HELP)

    def __post_init__(self) -> None:
        check_kinds(self.kinds, self.num_replicas)
        check(self, FleetConfig)
        scaling.check_scaling(self.autoscale, self.autoscale_policy, self.scale_down_seconds)
        if self.autoscale is not None:
            self._check_autoscale(self.autoscale)
        if self.disaggregate is not None and self.replicas not in (1, self.num_replicas):
            raise ConfigError(
                f"--disaggregate {self.disaggregate} is {self.num_replicas} replicas, but --replicas is "
                f"{self.replicas}; leave --replicas out"
            )

    def _check_autoscale(self, bounds: scaling.ScaleBounds) -> None:
        if self.disaggregate is not None:
            raise ConfigError(
                f"--autoscale {bounds} does not go with --disaggregate {self.disaggregate}: nothing "
                "decides which of the two pools is short; leave one of them out"
            )
        if self.kinds:
            raise ConfigError(
                f"--autoscale {bounds} does not go with --kinds: nothing decides which kind comes "
                "next; leave one of them out"
            )
        if self.replicas > bounds.most or 1 < self.replicas < bounds.least:
            raise ConfigError(
                f"--replicas {self.replicas} is outside of --autoscale {bounds}; leave --replicas out, or "
                "begin with a number between"
            )

    @property
    def num_replicas(self) -> int:
        """All replicas that are asked for, whatever they do."""
        pools = self.disaggregate
        return self.replicas if pools is None else pools.num_replicas

    @property
    def num_prefill(self) -> int:
        """Those that compute prompts for the others."""
        return 0 if self.disaggregate is None else self.disaggregate.prefill

    @property
    def first_replicas(self) -> int:
        """Replicas at the start."""
        return self.num_replicas if self.autoscale is None else max(self.replicas, self.autoscale.least)

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be at once."""
        return self.num_replicas if self.autoscale is None else self.autoscale.most

    def router_for(self, policy: str) -> str:
        """Return the router in front of replicas of a policy: what was asked for, or the policy's own."""
        return self.router or ("slo" if policy == "slo" else "least-outstanding")

    def rules(self, *, drain_seconds: float = DRAIN_SECONDS, max_wait_seconds: float | None) -> FleetRules:
        """Return how such a fleet treats its replicas.

        Parameters
        ----------
        drain_seconds : see `FleetRules`.
        max_wait_seconds : likewise.
        """
        return FleetRules(
            drain_seconds=drain_seconds,
            max_wait_seconds=max_wait_seconds,
            num_prefill=self.num_prefill,
            pool_rule=self.pool_rule,
            move_rule=self.move_rule,
            autoscale="" if self.autoscale is None else self.autoscale_policy,
            scale_down_seconds=self.scale_down_seconds,
        )
