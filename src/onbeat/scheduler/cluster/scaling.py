"""A fleet that changes its own size: when that is looked at, within which bounds, and what holds it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import MOST_REPLICAS, ScalingView
from onbeat.scheduler.cluster.events import Rescale
from onbeat.scheduler.cluster.membership import DOWN_SECONDS, Membership, ReplicaState
from onbeat.scheduler.cluster.scaling_policy import FleetLoad, ObjectiveScaling, ScalingPolicy

DOWN_HELP = "time of low load after which a replica goes"
"""Of the flag --scale-down-seconds."""
SCALING_POLICIES: dict[str, Callable[[float], ScalingPolicy]] = {"objective": ObjectiveScaling}
"""Name -> makes the policy from --scale-down-seconds."""
_LOOK_SECONDS = 1.0
_COOL_DOWN = 0.1
"""Of the seconds for which the load has to be low: so long a replica stays after anything has changed."""


@dataclass(frozen=True, slots=True)
class ScaleBounds:
    """How many replicas a fleet may have.

    Raises
    ------
    ConfigError : there is no number between them, or only 0.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= MOST_REPLICAS or not self.most:
            raise ConfigError(
                f"a fleet cannot scale between {self.least} and {self.most} replicas; give the fewest "
                f"and the most, such as 0..4; {MOST_REPLICAS} is the limit"
            )

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"


def parse_bounds(text: str) -> ScaleBounds:
    """Return the bounds that a text such as `1..4` names.

    Raises
    ------
    ConfigError : it names none.
    """
    least, dots, most = text.replace(" ", "").partition("..")
    if not (dots and least.isdecimal() and most.isdecimal()):
        raise ConfigError(f"autoscale is {text!r}; give the fewest and the most replicas, such as 1..4")
    return ScaleBounds(int(least), int(most))


class Scaling:
    """Says when a fleet should have more or fewer replicas.

    It begins with its bounds. Replicas that stay down take a place each, so that what dies of its
    configuration is not replaced for ever.

    Parameters
    ----------
    policy : one of `SCALING_POLICIES`.
    down_seconds : for which the load has to be low before a replica goes.
    """

    def __init__(self, policy: str, down_seconds: float, members: Membership) -> None:
        self.policy = make_policy(policy, down_seconds)
        self._name = policy
        self._cool_down = _COOL_DOWN * down_seconds if self.policy.cools_down else 0.0
        self._members = members
        self._bounds: tuple[int, int] | None = None
        self._ready: list[int] = []
        self._changed = -inf
        """When the replicas that serve have changed, as far as it was looked at, or others were asked for."""
        self._last: Rescale | None = None
        self.next_time = inf
        """When it wants to look, seconds; infinite while it has no bounds."""

    def set_bounds(self, least: int, most: int, now: float) -> None:
        """Scale between these from now on, both included."""
        self._bounds, self.next_time = (least, most), now

    def look(self, num_open: int, now: float) -> Rescale | None:
        """Return how many replicas there should be, where that is another number than there are.

        Parameters
        ----------
        num_open : requests that have not ended.
        """
        if now < self.next_time:
            return None
        self.next_time = now + _LOOK_SECONDS
        least, most = self._limits()
        num = len(self._members.expected())
        ready = self._members.having(ReplicaState.READY)
        numbers = [each.number for each in ready]
        if numbers != self._ready:
            self._ready, self._changed = numbers, now
        wanted, why = self.policy.look(
            FleetLoad(
                num_ready=len(ready),
                num_expected=num,
                num_open=num_open,
                settled=now - self._changed,
                most=most,
                loads=[(each.load, each.limits) for each in ready if each.load and each.limits],
            ),
            now,
        )
        if not least <= num <= most:
            return self._decide(min(max(num, least), most), "bounds", num, now)
        wanted = min(max(wanted, least), most)
        is_held = wanted < num and now - self._changed < self._cool_down
        return None if wanted == num or is_held else self._decide(wanted, why, num, now)

    def wake(self, now: float) -> Rescale | None:
        """Return that a replica should start, where a request has come and there is none."""
        if self._bounds is None or self._limits()[1] == 0 or self._members.expected():
            return None
        return self._decide(1, "arrival", 0, now)

    def view(self) -> ScalingView | None:
        """Return how it stands; None before it has begun."""
        if self._bounds is None:
            return None
        return ScalingView(
            policy=self._name,
            least=self._bounds[0],
            most=self._bounds[1],
            num_wanted=len(self._members.expected()) if self._last is None else self._last.num_replicas,
            why="" if self._last is None else self._last.why,
            share=self.policy.share,
            planned_share=self.policy.planned_share,
        )

    def _limits(self) -> tuple[int, int]:
        """Return the bounds, less the places of replicas that stay down."""
        assert self._bounds is not None
        least, most = self._bounds
        most = max(0, most - len(self._members.having(ReplicaState.DOWN)))
        return min(least, most), most

    def _decide(self, num_replicas: int, why: str, num_before: int, now: float) -> Rescale:
        self._changed = now
        policy = self.policy
        self._last = Rescale(
            num_replicas, num_before, why, policy.share, policy.planned_share, policy.late_share
        )
        return self._last


def make_policy(name: str, down_seconds: float = DOWN_SECONDS) -> ScalingPolicy:
    """Return the policy of a name.

    Raises
    ------
    ConfigError : there is none of this name.
    """
    if name not in SCALING_POLICIES:
        raise ConfigError(f"autoscale-policy is {name!r}; it must be one of {', '.join(SCALING_POLICIES)}")
    return SCALING_POLICIES[name](down_seconds)


def check_scaling(bounds: ScaleBounds | None, policy: str, down_seconds: float) -> None:
    """Check the three settings together.

    Raises
    ------
    ConfigError : there is a policy, or a time, for a fleet that does not scale itself.
    """
    if bounds is not None:
        return
    for flag, value, default in (
        ("--autoscale-policy", policy, "objective"),
        ("--scale-down-seconds", down_seconds, DOWN_SECONDS),
    ):
        if value != default:
            raise ConfigError(
                f"{flag} {value} is for a fleet with --autoscale MIN..MAX; give both, or neither"
            )
