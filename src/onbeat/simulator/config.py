"""What a simulation runs: replicas, a router and the clients in front of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING

from onbeat.core.errors import ConfigError
from onbeat.core.slo import ShedMode
from onbeat.scheduler.cluster.routers import require_router
from onbeat.scheduler.config import SchedulerConfig
from onbeat.simulator.acceptance import Acceptance

if TYPE_CHECKING:
    from onbeat.simulator.disaggregation import DisaggregationConfig


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
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts, where the scheduler plans any."""
    disaggregation: DisaggregationConfig | None = None
    """Pools for prompts and decodes, which then say how many replicas there are; None mixes both."""

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
        if self.scheduler.num_micro_batches not in (1, self.pipeline):
            raise ConfigError(
                f"the scheduler has num_micro_batches {self.scheduler.num_micro_batches}, but there are "
                f"{self.pipeline} pipeline stages; each stage runs one micro-batch, so give the same number"
            )

    @property
    def replica_scheduler(self) -> SchedulerConfig:
        """Limits of one replica, with a micro-batch for each stage."""
        return replace(self.scheduler, num_micro_batches=self.pipeline)
