"""The seams: what stands between packages that must not import each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from onbeat.core.errors import InvalidRequest
from onbeat.core.fleet import ReplicaId, ReplicaLimits, ReplicaView, ScalingView
from onbeat.core.request import Adapter, Pooling, Request, RequestOutput, SamplingParams
from onbeat.core.step import StepOutputs


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


class FleetView(Protocol):
    """What the server shows of a fleet, and what it may ask of one."""

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has: they wait for one to get ready."""

    @property
    def is_ready(self) -> bool:
        """Whether a replica takes requests."""

    @property
    def seconds_to_ready(self) -> float | None:
        """Seconds until a replica is expected to be ready; None where none is coming."""

    @property
    def scaling(self) -> ScalingView | None:
        """How a fleet that changes its own size stands; None of any other."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that requests may ask for, by their names."""

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load a LoRA adapter on every replica.

        Parameters
        ----------
        in_place : whether it may take the place of another of its name, which running requests keep.

        Raises
        ------
        InvalidRequest : it cannot be loaded, there is no room for it, or its name is in use.
        """

    async def unload_adapter(self, name: str) -> None:
        """Let no further request ask for a LoRA adapter that is loaded; those that have it go on."""

    def replicas(self) -> Sequence[ReplicaView]:
        """Return how each replica stands, those that have been stopped left out."""

    async def drain(self, replica: ReplicaId, *, seconds: float, restarts: bool) -> None:
        """Let a replica end without loss.

        Parameters
        ----------
        seconds : what runs there may take so long; what is left then goes on elsewhere.
        restarts : whether it is started again afterwards.

        Raises
        ------
        InvalidRequest : there is no such replica, or it neither serves nor starts.
        """

    async def scale(self, num_replicas: int) -> None:
        """Start replicas, or let some end without loss, until there are so many.

        A fleet that changes its own size keeps to that number from then on.

        Raises
        ------
        InvalidRequest : there cannot be as many.
        """

    async def autoscale(self, least: int, most: int) -> None:
        """Let the fleet decide on the number of replicas, between two.

        Raises
        ------
        InvalidRequest : it was not started with a policy for that, or no number is between them.
        """

    async def restart(self, *, keeper: bool = False) -> None:
        """Start all replicas again, one after another, without loss; each waits for the one before.

        Parameters
        ----------
        keeper : whether it is who decides about them that is started again, in their place.

        Raises
        ------
        InvalidRequest : the round before is under way, or nobody starts the keeper again.
        """

    def expect_end(self) -> None:
        """Hear that the server ends soon: replicas that are told to end as well stay until then."""


class Tokenizer(Protocol):
    """Text to token ids and back.

    Decoding joins `token_bytes` and reads them as UTF-8, so it can go on token by token.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens after which the model has said all it wants to say."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that decoding leaves out with `skip_special_tokens`."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the very start of a decoded text is not part of it."""

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for (special tokens: their name in UTF-8)."""

    def token_entry(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, such as `Ġis`; empty where it has no such token."""

    def token_text(self, token_id: int) -> str:
        """Return a token as shown in logprobs: its bytes as UTF-8, undecodable bytes replaced."""
