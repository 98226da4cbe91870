"""What a person says of simulated replicas and their clients, and what is simulated as it was said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Literal, NamedTuple, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import DRAIN_SECONDS
from onbeat.core.options import check, option, part
from onbeat.core.slo import ShedMode, shed_option
from onbeat.scheduler.cluster.fleet_config import FleetConfig

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
