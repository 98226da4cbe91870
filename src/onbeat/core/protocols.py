"""The seams: what stands between packages that must not import each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from onbeat.core.errors import InvalidRequest
from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.core.request import Pooling, Request, RequestOutput, SamplingParams
from onbeat.core.step_stats import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the server must know of the engine behind it."""

    model_name: str
    architecture: str
    vocab_size: int
    limits: ReplicaLimits
    policy: str
    max_num_batched_tokens: int
    dtype: str
    priority_scheduling: bool
    """Whether `Request.priority` has an effect."""
    speculation: str | None = None
    """What proposes draft tokens, by its name in the configuration; None where nothing is speculated."""
    pooling: Pooling = "last"
    """How embeddings are pooled."""
    embedding_size: int = 0
    """Numbers of an embedding."""
    max_loras: int = 0
    """LoRA adapters that it can have loaded at a time."""
    embeds: bool = True
    """Whether the engine makes embeddings."""
    generates: bool = True
    """Whether the model has an output head, so that it can generate tokens."""
    sampling_defaults: Mapping[str, int | float] = field(default_factory=dict)
    """Fields of `SamplingParams` that requests get which state nothing, and their values."""
    file_digests: Mapping[str, str] = field(default_factory=dict)
    """Name of each of the model's files -> digest of what it held when it was loaded."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Fields of `SamplingParams` that the engine cannot heed, and why."""

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Check that the engine can sample so.

        Raises
        ------
        InvalidRequest : it cannot; or as `SamplingParams.check_vocabulary`.
        """
        sampling.check_vocabulary(self.vocab_size)
        for name, why in self.left_out.items():
            if getattr(sampling, name):
                message = f"{name} is not available: {why}; leave it out"
                raise InvalidRequest(message, param=name, code="unsupported_parameter")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request's share of a step, with the time at which the step ended."""

    time: float
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class EnginePulse:
    """A sign of life of an engine, by the monotonic clock, in seconds."""

    time: float
    """When the engine gave it."""
    step_start: float | None = None
    """When the step began that was under way then; None where none was."""
    step_predicted: float | None = None
    """Seconds that the step was expected to take; None where nothing predicts."""
    waited: float = 0.0
    """Seconds of late in which it wanted to run and others had the processors, as its host sees it."""


@dataclass(slots=True)
class StepOutputs:
    """Everything that one step sends back to the clients, in one message."""

    now: float
    outputs: Sequence[RequestOutput]
    stats: StepStats | None = None
    load: ReplicaLoad | None = None
    """How the engine stands then; None where nobody asked for it."""


class StepObserver(Protocol):
    """Sees every message of the engine before the request streams do (metrics, timeline)."""

    def on_step(self, message: StepOutputs, replica: int = 0) -> None:
        """Hear what a step delivered, and the number of its replica."""


class EngineClient(Protocol):
    """What the server sees of one replica or many: requests in, deliveries out."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_alive(self) -> bool:
        """False while no engine process lives."""

    @property
    def pulse(self) -> EnginePulse:
        """The last sign of life; an engine gives one a second at least, also while a step runs."""

    def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """Stream a request's deliveries; the last one carries a finish reason.

        Closing the generator early (`aclose`, or cancelling the task that reads it) aborts the request and
        frees its blocks at the next step.

        Raises
        ------
        RequestRejected : the engine cannot take this request.
        EngineDead : the engine process ended.
        EngineError : this request failed inside the engine.
        """
