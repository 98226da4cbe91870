"""What a simulation runs: replicas or pools of them, a router and the clients in front of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal, NamedTuple, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import DRAIN_SECONDS
from onbeat.core.slo import ShedMode
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.routers import require_router
from onbeat.scheduler.cluster.scaling import DOWN_SECONDS, ScaleBounds, parse_policy
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import make_policy
from onbeat.simulator.acceptance import Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """A link of which every transfer gets the whole bandwidth.

    Transfers are short next to the time between two of them (under 0.1 % of a request's time in DistServe,
    OSDI 2024, section 6.3), so they are not made to share it.

    Raises
    ------
    ConfigError : a size or bandwidth that is not above 0, or a negative latency.
    """

    bytes_per_token: float
    """KV of one token, over all layers and devices."""
    bandwidth: float
    """Bytes per second."""
    latency: float = 0.0
    """Seconds before the first byte arrives."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "bandwidth"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ConfigError(f"{name} of the KV transfer is {value:g}; it must be above 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"latency of the KV transfer is {self.latency:g} s; it must be 0 or more")

    def seconds(self, num_tokens: int) -> float:
        """Return the time of the KV of so many tokens."""
        return self.latency + num_tokens * self.bytes_per_token / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Equal replicas for one of the two phases.

    Raises
    ------
    ConfigError : no replica.
    """

    num_replicas: int
    scheduler: SchedulerConfig
    """Limits of one replica; its `num_micro_batches` is the number of pipeline stages."""
    step_time: StepTimeModel
    """Through all stages of one replica."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"a pool has {self.num_replicas} replicas; it needs at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """Two pools and what lies between. New requests go to the prefill replica with the fewest requests.

    Raises
    ------
    ConfigError : a policy that cannot hand requests over or plans with deadlines, or a cap below the longest
        request.
    """

    prefill: PoolConfig
    decode: PoolConfig
    transfer: KVTransfer
    decode_kv_cap_tokens: int | None = None
    """Most tokens whose KV a decode replica holds, where that is less than its memory takes."""

    def __post_init__(self) -> None:
        if self.prefill.scheduler.policy == "static":
            raise ConfigError(
                "a prefill replica cannot run policy static: it would hold whole batches; use orca"
            )
        for pool in (self.prefill, self.decode):
            if make_policy(pool.scheduler).needs_step_time:
                raise ConfigError(
                    f"policy {pool.scheduler.policy!r} plans a request from its arrival to its last token, "
                    "of which a pool sees a part only: use sarathi for prompts and for generation"
                )
        cap, longest = self.decode_kv_cap_tokens, self.decode.scheduler.max_model_len
        if (
            cap is not None
            and cap // self.decode.scheduler.block_size * self.decode.scheduler.block_size < longest
        ):
            raise ConfigError(
                f"decode_kv_cap_tokens is {cap}, but one request may have {longest} tokens (max_model_len); "
                "raise the cap or lower max_model_len"
            )

    @property
    def max_model_len(self) -> int:
        """The longest request that both pools take."""
        return min(self.prefill.scheduler.max_model_len, self.decode.scheduler.max_model_len)

    @property
    def decode_scheduler(self) -> SchedulerConfig:
        """Limits of a decode replica, the cap included.

        Its queue has none: who comes here was taken at its arrival, and has its first token.
        """
        scheduler = replace(
            self.decode.scheduler,
            max_num_queued_reqs=None,
            max_num_queued_tokens=None,
            max_queue_seconds=None,
        )
        if self.decode_kv_cap_tokens is None:
            return scheduler
        num_blocks = min(scheduler.num_blocks, self.decode_kv_cap_tokens // scheduler.block_size)
        return replace(scheduler, num_blocks=num_blocks)


class MemberChange(NamedTuple):
    """A replica that joins those that get requests, or leaves them and ends what it has."""

    when: float
    """Virtual seconds."""
    replica: int
    joins: bool


ChangeKind = Literal["kill", "drain", "restart", "scale"]
CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)


class FleetChange(NamedTuple):
    """Something that happens to a fleet, whose decisions about it are simulated, too."""

    when: float
    """Virtual seconds."""
    kind: ChangeKind
    """`kill`: a replica dies, with all that it has. `drain`: it ends what runs there, and stops. `restart`:
    it drains and starts again. `scale`: there are to be so many replicas."""
    number: int
    """Of the replica, or replicas."""


def parse_change(text: str) -> FleetChange:
    """Read a change of a fleet as `30 kill 0` or `90 scale 4`: when (seconds), what, and which or how many.

    Raises
    ------
    ConfigError : it is written otherwise.
    """
    parts = text.split()
    if len(parts) == 3 and parts[1] in CHANGE_KINDS:
        try:
            return FleetChange(float(parts[0]), parts[1], int(parts[2]))
        except ValueError:
            pass
    raise ConfigError(
        f"{text!r} is no change of a fleet: write seconds, one of {', '.join(CHANGE_KINDS)}, and the number "
        "of the replica (with scale, of all), as in '30 kill 0' or '90 scale 4'"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind:
    """What one replica of a mixed fleet is."""

    scheduler: SchedulerConfig
    step_time: StepTimeModel
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimes:
    """How long what a simulated fleet does takes, seconds."""

    start: float = 10.0
    """From the decision to start a replica until it takes requests; those at time 0 are there at once."""
    drain: float = DRAIN_SECONDS
    """What runs on a replica that drains may take so long."""
    report: float = 0.002
    """Until what a replica reports is heard of."""

    def __post_init__(self) -> None:
        for name in ("start", "drain", "report"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"fleet time {name} is {value:g} s; it must be a finite time, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """A fleet that changes its own size."""

    bounds: ScaleBounds
    policy: str = "objective"
    """See `parse_policy`."""
    down_seconds: float = DOWN_SECONDS
    """A replica goes once the load has been low for so long."""

    def __post_init__(self) -> None:
        parse_policy(self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Equal replicas behind a router, or a pool for prompts and one for decodes.

    Raises
    ------
    ConfigError : an unknown router, a count below 1, a negative overhead or noise, or a pipeline whose degree
        is not the scheduler's number of micro-batches.
    """

    scheduler: SchedulerConfig
    """Limits of one replica."""
    num_replicas: int = 1
    router: str = "round-robin"
    host_overhead: float = 0.0
    """Added to each step, seconds: what the host does between two steps while the device waits."""
    pipeline: int = 1
    """Pipeline stages of a replica, each with an equal share of a step."""
    seed: int = 0
    """Of the `random` router, the noise, and the acceptance of drafts."""
    max_concurrency: int | None = None
    """Most requests that the clients have under way; the next is sent when one ends. None sets no limit."""
    declared_max_tokens: int | None = None
    """Output limit that every request declares, and that a policy with reservations sets memory aside for,
    while its output ends at the load's own length; a longer output is its own limit. None: the limit is
    exactly the output length."""
    shed: ShedMode = ShedMode.RELEGATE
    """What every request asks for where its TTFT objective is predicted to be missed."""
    step_noise: float = 0.0
    """Standard deviation of the logarithm of what each step takes, over what is predicted (its mean is 1)."""
    steps_ahead: int = 0
    """1: a step is planned when the one before it starts, so that a request joins a step later than it could
    if planning took no time; 0: when the one before it ends."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts, where the scheduler plans any."""
    disaggregation: DisaggregationConfig | None = None
    """Pools for prompts and decodes, which then say how many replicas there are; None mixes both."""
    member_changes: tuple[MemberChange, ...] = ()
    """A replica whose first change is that it joins gets no requests before."""
    fleet_changes: tuple[FleetChange, ...] = ()
    fleet_times: FleetTimes = field(default_factory=FleetTimes)
    autoscale: AutoscaleConfig | None = None
    """None: there are `num_replicas`. Else the fleet begins with as many as it may have at least, but one."""
    kinds: tuple[ReplicaKind, ...] = ()
    """What the replicas are where they differ, the first first; further ones, as replicas are added, are like
    the last. Empty: all are as `scheduler` says."""

    def __post_init__(self) -> None:
        require_router(self.router)
        for name in ("num_replicas", "pipeline", "max_concurrency", "declared_max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not (isfinite(self.host_overhead) and self.host_overhead >= 0):
            raise ConfigError(
                f"host_overhead is {self.host_overhead:g} s; it must be a finite time, 0 or more"
            )
        if not (isfinite(self.step_noise) and self.step_noise >= 0):
            raise ConfigError(
                f"step_noise is {self.step_noise:g}; it must be a finite number, 0 or more, such as 0.05"
            )
        if self.steps_ahead not in ((0, 1) if self.pipeline == 1 else (0,)):
            raise ConfigError(
                f"steps_ahead is {self.steps_ahead}; it must be 0 or 1, and 0 with pipeline stages"
            )
        if self.scheduler.num_micro_batches not in (1, self.pipeline):
            raise ConfigError(
                f"the scheduler has num_micro_batches {self.scheduler.num_micro_batches}, but there are "
                f"{self.pipeline} pipeline stages; each stage runs one micro-batch, so give the same number"
            )
        self._check_fleet()
        for change in self.member_changes:
            if not (isfinite(change.when) and change.when >= 0 and 0 <= change.replica < self._num_members):
                raise ConfigError(
                    f"{change} is impossible: there are {self._num_members} replicas, counted from 0, and "
                    "the run starts at 0 s"
                )

    @property
    def has_fleet(self) -> bool:
        """Whether replicas are looked after as those of a live fleet are, or only chosen from."""
        if self.fleet_changes or self.kinds or self.autoscale is not None:
            return True
        is_fixed = self.disaggregation is None and not self.member_changes
        return is_fixed and self.num_replicas > 1 and self.router == "slo"

    def _check_fleet(self) -> None:
        for change in self.fleet_changes:
            if not (isfinite(change.when) and change.when >= 0 and change.number >= 0):
                raise ConfigError(f"{change} is impossible: numbers and times are 0 or more")
        if not self.has_fleet:
            return
        if self.disaggregation is not None:
            raise ConfigError(
                "fleet changes, autoscaling and kinds are simulated of one pool; leave the two pools out"
            )
        if self.member_changes:
            raise ConfigError("give either member_changes, or fleet_changes, autoscaling and kinds")
        if self.scheduler.speculation is not None and (self.fleet_changes or self.autoscale is not None):
            raise ConfigError(
                "replicas that come and go are not simulated with drafts; leave out the drafts, or fleet "
                "changes and autoscaling"
            )
        if self.autoscale is not None:
            self._check_autoscale(self.autoscale)

    def _check_autoscale(self, autoscale: AutoscaleConfig) -> None:
        if self.kinds:
            raise ConfigError(
                "replicas of several kinds are not scaled: which kind comes next is not decided"
            )
        needs_costs = parse_policy(autoscale.policy).needs_costs
        if needs_costs and not make_policy(self.scheduler).needs_step_time:
            raise ConfigError(
                f"autoscaling to the objective goes by predicted step times, which policy "
                f"{self.scheduler.policy!r} does not have in a simulation: give --policy slo, or "
                "--autoscale-policy freeness"
            )

    @property
    def _num_members(self) -> int:
        """Replicas, of both pools where there are two."""
        pools = self.disaggregation
        return self.num_replicas if pools is None else pools.prefill.num_replicas + pools.decode.num_replicas

    @property
    def replica_scheduler(self) -> SchedulerConfig:
        """Limits of one replica, with a micro-batch for each stage."""
        return replace(self.scheduler, num_micro_batches=self.pipeline)
