"""What a simulation runs: replicas or pools of them, a router and the clients in front of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from math import exp, inf, isfinite
from statistics import NormalDist
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import DRAIN_SECONDS
from onbeat.core.options import check, option, part
from onbeat.core.slo import ShedMode
from onbeat.core.slo_options import shed_option
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.cluster.membership import FleetRules
from onbeat.scheduler.cluster.scaling import make_policy
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.speculation import Acceptance

_fleet = partial(option, group="fleet")
_step = partial(option, group="step time")

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

    def __str__(self) -> str:
        return f"{self.when:g} {self.kind} {self.number}"


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
class FleetTimes:
    """How long what a simulated fleet does takes, seconds."""

    start_seconds: float = _fleet(
        10.0,
        flag="--replica-start-seconds",
        metavar="SECONDS",
        at_least=0,
        below=inf,
        help="time until a replica that starts during the run is ready",
    )
    """From the decision to start it; replicas at time 0 are there at once."""
    drain_seconds: float = _fleet(
        DRAIN_SECONDS,
        metavar="SECONDS",
        at_least=0,
        below=inf,
        help="time that requests have on a replica that drains",
    )
    report_seconds: float = 0.002
    """Until what a replica reports is heard of."""

    def __post_init__(self) -> None:
        check(self, FleetTimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTerms:
    """What a person says of simulated replicas and their clients, and what is simulated as it was said.

    Raises
    ------
    ConfigError : a count below 1, a negative overhead or noise, or a change that cannot be.
    """

    fleet: FleetConfig = part(FleetConfig)
    """How many replicas there are, and who decides where requests go; its kinds are named in `kinds`."""
    fleet_changes: tuple[FleetChange, ...] = _fleet(
        (),
        parse=parse_change,
        metavar="CHANGE",
        help="what happens to replicas; 30 kill 0: replica 0 dies in second 30; restart and drain likewise; "
        "90 scale 4: from second 90 on, 4 replicas are wanted",
    )
    fleet_times: FleetTimes = part(FleetTimes)
    declared_max_tokens: int | None = option(
        None,
        group="scheduler",
        metavar="TOKENS",
        at_least=1,
        help="output limit of every request, for policies that reserve memory for it (default: its output)",
    )
    """A longer output is its own limit."""
    shed: ShedMode = shed_option()
    host_overhead: float = _step(
        0.0,
        flag="--host-overhead-ms",
        unit="ms",
        metavar="MS",
        at_least=0,
        below=inf,
        help="host time added to every step: planning, sampling, messages",
    )
    """The device waits for it."""
    step_noise: float = _step(
        0.0,
        metavar="SIGMA",
        at_least=0,
        at_most=10,
        help="multiply each step's time by a log-normal factor of mean 1; 0.05: by about 5%",
    )
    """Standard deviation of the logarithm."""
    guided_share: float = _step(
        0.0,
        metavar="SHARE",
        at_least=0,
        at_most=1,
        help="share of requests whose answers must match a grammar",
    )
    """Each of their rows takes a step a little longer."""
    seed: int = 0
    """Of the `random` router, the noise, and the acceptance of drafts."""
    max_concurrency: int | None = None
    """Most requests that the clients have under way; the next is sent when one ends. None sets no limit."""

    def __post_init__(self) -> None:
        check(self, type(self))
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {self.max_concurrency}; it must be at least 1")
        for change in self.fleet_changes:
            if not (isfinite(change.when) and change.when >= 0 and change.number >= 0):
                raise ConfigError(f"{change} is impossible: numbers and times are 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLink:
    """What lies between any two replicas: each has one link to all others; see `Links`.

    Raises
    ------
    ConfigError : a size or bandwidth that is not above 0, or a negative latency.
    """

    bytes_per_token: float
    """Of one token in blocks of all tables, on all devices."""
    bandwidth: float
    """Bytes per second that one replica's link takes, in either direction."""
    latency: float = 0.0
    """Seconds that a byte is under way."""
    state_bytes: int = 0
    """Of a request's state, which goes with the last of its KV."""

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
    """Seconds that a server takes with a request, of any number at once, before its scheduler has it."""
    steps_ahead: int = 0
    """1: a step is planned as the one before it starts, so requests join a step later; 0: as that ends."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts, where the scheduler plans any."""
    kv_link: KVLink | None = None
    """Over which requests go on elsewhere with their KV; None: they end where they began."""
    kinds: tuple[ReplicaKind, ...] = ()
    """What the replicas are where they differ; further ones are like the last. Empty: as `scheduler`."""

    def __post_init__(self) -> None:
        FleetTerms.__post_init__(self)
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
    def fleet_rules(self) -> FleetRules:
        """How the fleet treats its replicas."""
        return self.fleet.rules(
            drain_seconds=self.fleet_times.drain_seconds, max_wait_seconds=self.scheduler.max_queue_seconds
        )

    @property
    def num_replicas(self) -> int:
        """Replicas that are asked for; a fleet that changes its own size begins with `first_replicas`."""
        return self.fleet.num_replicas

    @property
    def is_of_one(self) -> bool:
        """Whether there is never more than one replica, so that nobody chooses."""
        return self.fleet.autoscale is None and self._most_replicas == 1

    @property
    def _most_replicas(self) -> int:
        sizes = [change.number for change in self.fleet_changes if change.kind == "scale"]
        return max(self.fleet.most_replicas, *sizes, 1)

    @property
    def is_alone(self) -> bool:
        """Whether there is one replica from beginning to end: nobody decides anything then."""
        return self.is_of_one and not self.fleet_changes and self.kv_link is None

    @property
    def reads_predictions(self) -> bool:
        """Whether the router goes by what replicas predict."""
        return not self.is_of_one and self.router == "slo"

    def _check_fleet(self) -> None:
        if self.fleet.disaggregate is not None:
            self._check_pools()
        for each in self.fleet_changes:
            if each.kind != "scale" and each.number >= self._most_replicas:
                raise ConfigError(
                    f"fleet change {each}: there is no such replica; this fleet has at most "
                    f"{self._most_replicas}, and the first is 0"
                )
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


_NORMAL = NormalDist()


class StepNoise:
    """Log-normal factors with mean 1, each a function of (seed, replica, step) alone.

    They do not depend on the order in which they are asked for, so runs are equal whatever is looked at
    ahead, and two policies on one replica meet the same noise in their n-th step.

    Parameters
    ----------
    sigma : standard deviation of the factor's logarithm, above 0.
    seed, replica : whose noise it is.
    """

    def __init__(self, sigma: float, *, seed: int, replica: int) -> None:
        self._sigma = sigma
        self._key = f"{seed}:{replica}".encode()

    def factor(self, step: int) -> float:
        """Return what the time of a step is multiplied by.

        Parameters
        ----------
        step : its number on this replica, from 0.
        """
        digest = blake2b(step.to_bytes(8, "little"), digest_size=8, key=self._key).digest()
        # 53 bits, moved off 0 and 1, where the normal distribution has no value.
        uniform = ((int.from_bytes(digest, "little") >> 11) + 0.5) * 2.0**-53
        return exp(-self._sigma * self._sigma / 2 + self._sigma * _NORMAL.inv_cdf(uniform))


@runtime_checkable
class Learner(Protocol):
    """A step-time model that each replica can have for itself, to learn from its own steps."""

    def with_learning(self) -> StepTimeModel:
        """Return the same model as it was before any step."""


def make_scheduler(config: SchedulerConfig, step_time: StepTimeModel, *, predicts: bool = False) -> Scheduler:
    """Return the scheduler of one replica.

    A policy that plans by predicted times, or weighs drafts by them, gets a model of its own, which it
    corrects by the steps that it sees, as a live engine does; what the device does is not its to see.

    Parameters
    ----------
    step_time : what the device is simulated by.
    predicts : whether somebody reads predictions of its load, as of a live engine's under any policy; then
        it has a model wherever there is one that can be handed to it.

    Raises
    ------
    ConfigError : a policy that needs predictions, and a model that cannot be handed to it.
    """
    if config.window_tokens is not None:
        config = replace(config, window_tokens=None)  # virtual clients take all that comes
    speculation = config.speculation
    weighs_drafts = speculation is not None and speculation.draft_length == "adaptive"
    needs_model = composition(config.policy).needs_step_time or weighs_drafts
    if not (needs_model or (predicts and isinstance(step_time, Learner))):
        return Scheduler(config)
    if not isinstance(step_time, Learner):
        raise ConfigError(
            f"{'adaptive drafting' if weighs_drafts else f'policy {config.policy!r}'} predicts the times of "
            f"steps, but {type(step_time).__name__} "
            "cannot learn from them (it has no with_learning); use a perfmodel.Predictor"
        )
    return Scheduler(config, step_time.with_learning())
