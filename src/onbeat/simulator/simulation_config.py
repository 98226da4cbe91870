"""What a simulation runs: replicas or pools of them, a router and the clients in front of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.migration import check_move_rule
from onbeat.scheduler.cluster.scaling import make_policy
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.draft_acceptance import Acceptance
from onbeat.simulator.fleet_terms import FleetTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLink:
    """What lies between any two replicas: each has one link to all others; see `Links`.

    Raises
    ------
    ConfigError : a size or bandwidth that is not above 0, or a negative latency.
    """

    bytes_per_token: float
    """KV of one token, over all layers and devices."""
    bandwidth: float
    """Bytes per second that one replica's link takes, in either direction."""
    latency: float = 0.0
    """Seconds that a byte is under way."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "bandwidth"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ConfigError(f"{name} of the KV link is {value:g}; it must be above 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"latency of the KV link is {self.latency:g} s; it must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind:
    """What one replica of a mixed fleet is."""

    scheduler: SchedulerConfig
    """Limits; its `num_micro_batches`, if more than one, is the number of pipeline stages."""
    step_time: StepTimeModel
    """Through all stages."""
    device: str = ""
    memory_bandwidth: float = inf
    """Bytes per second that the memory of its devices moves, which copies of KV take from its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig(FleetTerms):
    """Replicas behind a router, of which the first may compute prompts for the others.

    Raises
    ------
    ConfigError : an unknown router, or parts of a fleet that do not go together; see `FleetTerms`.
    """

    scheduler: SchedulerConfig
    """Limits of one replica."""
    request_overhead: float = 0.0
    """Seconds from a request's arrival until its replica's scheduler hears of it: what its server does first,
    for any number of requests at once."""
    steps_ahead: int = 0
    """1: a step is planned when the one before it starts, so that a request joins a step later than it could
    if planning took no time; 0: when the one before it ends."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts, where the scheduler plans any."""
    kv_link: KVLink | None = None
    """Over which requests go on elsewhere with their KV; None: they end where they began."""
    kinds: tuple[ReplicaKind, ...] = ()
    """What the replicas are where they differ, the first first; further ones, as replicas are added, are like
    the last. Empty: all are as `scheduler` says."""

    def __post_init__(self) -> None:
        FleetTerms.__post_init__(self)
        check_move_rule(self.fleet.move_rule, moves=self.kv_link is not None, cure="give a kv_link")
        if not (isfinite(self.request_overhead) and self.request_overhead >= 0):
            raise ConfigError(
                f"request_overhead is {self.request_overhead:g} s; it must be a finite time, 0 or more"
            )
        if self.steps_ahead not in ((0, 1) if self.pipeline == 1 else (0,)):
            raise ConfigError(
                f"steps_ahead is {self.steps_ahead}; it must be 0 or 1, and 0 with pipeline stages"
            )
        self._check_fleet()

    @property
    def pipeline(self) -> int:
        """Pipeline stages of a replica, each with an equal share of a step: the scheduler's micro-batches."""
        return self.scheduler.num_micro_batches

    @property
    def router(self) -> str:
        """Name of what decides where requests go."""
        return self.fleet.router_for(self.scheduler.policy)

    @property
    def num_replicas(self) -> int:
        """Replicas that are asked for; a fleet that changes its own size begins with `first_replicas`."""
        return self.fleet.num_replicas

    @property
    def is_of_one(self) -> bool:
        """Whether there is never more than one replica, so that nobody chooses."""
        sizes = [change.number for change in self.fleet_changes if change.kind == "scale"]
        return self.fleet.autoscale is None and max(self.num_replicas, *sizes, 1) == 1

    @property
    def is_alone(self) -> bool:
        """Whether there is one replica from beginning to end: nobody decides anything then."""
        return self.is_of_one and not self.fleet_changes and self.kv_link is None

    @property
    def reads_predictions(self) -> bool:
        """Whether the router goes by what replicas predict."""
        return not self.is_of_one and self.router == "slo"

    def _check_fleet(self) -> None:
        if self.fleet.num_prefill:
            self._check_pools()
        comes_and_goes = bool(self.fleet_changes) or self.fleet.autoscale is not None
        if comes_and_goes and any(each.speculation is not None for each in self._schedulers):
            raise ConfigError(
                "replicas that come and go are not simulated with drafts; leave out the drafts, or fleet "
                "changes and autoscaling"
            )
        sizes = {each.block_size for each in self._schedulers}
        if self.kv_link is not None and len(sizes) > 1:
            raise ConfigError(
                f"replicas have blocks of {' and '.join(map(str, sorted(sizes)))} tokens, but KV goes to "
                "another block by block; give all the same block_size"
            )
        if self.fleet.autoscale is not None:
            self._check_autoscale()

    def _check_pools(self) -> None:
        if self.kv_link is None:
            raise ConfigError("replicas that compute prompts hand KV to others; give kv_link")
        for scheduler in self._schedulers:
            if composition(scheduler.policy).holds_finished:
                raise ConfigError(
                    f"policy {scheduler.policy!r} runs whole batches with memory for each from its start, so "
                    "nobody can leave or join one; use another where prompts and generation are apart"
                )

    def _check_autoscale(self) -> None:
        if len(self.kinds) > 1:
            raise ConfigError(
                "replicas of several kinds are not scaled: which kind comes next is not decided"
            )
        needs_costs = make_policy(self.fleet.autoscale_policy).needs_costs
        predicts = self.reads_predictions or composition(self.scheduler.policy).needs_step_time
        if needs_costs and not predicts:
            raise ConfigError(
                f"--autoscale needs predicted step times, which policy {self.scheduler.policy!r} does "
                "not have in a simulation: give --policy slo or --router slo"
            )

    @property
    def _schedulers(self) -> list[SchedulerConfig]:
        return [kind.scheduler for kind in self.kinds] or [self.scheduler]

    @property
    def max_model_len(self) -> int:
        """The longest request that some replica takes, tokens."""
        return max(each.max_model_len for each in self._schedulers)
