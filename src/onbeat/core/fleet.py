"""What replicas and whoever shares requests out between them tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from onbeat.core.errors import ConfigError
from onbeat.core.kv_windows import KVWindows
from onbeat.core.request import Adapter

DRAIN_SECONDS = 30.0
"""What runs on a replica that is to end may take so long, unless somebody says otherwise."""

MOST_REPLICAS = 1024
"""Of any fleet, wherever its replicas run."""

ReplicaId = str
"""Name of a replica, for as long as the fleet lives: `r0`, `r1`. What restarts keeps its name."""


def replica_id(number: int) -> ReplicaId:
    """Return the name of a replica, counted from 0."""
    return f"r{number}"


def replica_number(replica: ReplicaId) -> int:
    """Return the number in the name of a replica."""
    return int(replica.removeprefix("r"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Replicas that compute prompts, and replicas that generate."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"prefill={self.prefill},decode={self.decode}"

    @property
    def num_replicas(self) -> int:
        """Both together."""
        return self.prefill + self.decode


POOLS_FORM = "prefill=N,decode=M"
POOLS_HELP = "use N replicas that compute prompts and M that generate, in place of --replicas"


def parse_pools(text: str) -> PoolSizes:
    """Return the pools that a text such as `prefill=1,decode=2` names.

    Raises
    ------
    ConfigError : it names no such pools.
    """
    pairs = [pair.partition("=") for pair in text.replace(" ", "").split(",")]
    sizes = {name: int(number) for name, _, number in pairs if number.isdecimal()}
    if sizes.keys() != {"prefill", "decode"} or len(pairs) != 2 or 0 in sizes.values():
        raise ConfigError(
            f"disaggregate is {text!r}; give the replicas of both pools, one at least of each, such as "
            "prefill=1,decode=2"
        )
    return PoolSizes(**sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """What a replica can take, and what it is."""

    device: str = ""
    max_model_len: int
    """Most tokens (prompt and output) of one request."""
    max_num_seqs: int
    num_blocks: int
    """Of all block tables."""
    block_size: int
    """Tokens of a KV block."""
    windows: KVWindows = KVWindows()
    moves_streams: bool = False
    """Whether streams that run there can go elsewhere with their KV, and others' come."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the KV blocks that hold so many tokens of a request."""
        return self.windows.num_blocks(-(-num_tokens // self.block_size))

    def num_streams(self, num_tokens: float) -> float:
        """Return how many streams of so many tokens the KV cache holds, the last one in part."""
        num_windowed = min(num_tokens, self.windows.most_blocks * self.block_size) * self.windows.num_groups
        return self.num_blocks * self.block_size / (num_tokens + num_windowed)


USUAL_CONTEXT = 2048
"""Tokens of the context by which a usual decode, and the attention of a chunk, is priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCosts:
    """What a replica expects prompts and steps to cost, seconds: the coefficients of its step-time model."""

    token: float
    pair: float
    step: float
    """Of a step, what does not grow with its tokens."""
    decode: float
    """What one more decode of a usual context adds to a step."""
    context: float = 0.0
    """Of that, what each token of its context adds; 0 where it is not known."""
    decode_base: float = 0.0
    """Of a step of decodes alone, what does not grow with them: it reads all weights. 0 where not known."""

    def seconds(self, num_tokens: int, num_cached_tokens: int) -> float:
        """Return the work of `num_tokens` prompt tokens behind cached ones."""
        return num_tokens * (self.token + self.pair * (num_cached_tokens + 0.5 * num_tokens))

    def decode_seconds(self, num_context_tokens: float) -> float:
        """Return what one more decode of such a context adds to a step."""
        return max(0.0, self.decode + self.context * (num_context_tokens - USUAL_CONTEXT))


@dataclass(slots=True, kw_only=True)
class ReplicaLoad:
    """How a replica stands at the end of a step, or as a long one begins.

    Times are seconds from `time`, so that nobody's clock has to be another's.
    """

    time: float
    """When it was taken, by the replica's clock."""
    num_taken: int
    """Requests that it was sent and has queued, refused or ended by then: others are not counted here."""
    busy: float = 0.0
    """Until the step under way is expected to end."""
    num_running: int = 0
    num_waiting: int = 0
    num_kept_slots: int = 0
    """Slots of the batch that are kept for requests on their way here or from here."""
    num_free_blocks: int = 0
    """KV blocks that nobody uses, those of the prefix cache included."""
    num_wanted_blocks: int = 0
    """Blocks that the first waiting request lacks."""
    blocked: str = ""
    """That request, by its name there, where it lacks any: it holds none, and can as well begin elsewhere."""
    num_queued_blocks: int = 0
    """Blocks that all waiting requests want, what is cached for them left out."""
    num_decodes: int = 0
    """Streams that decode."""
    num_context_tokens: int = 0
    """Tokens of their contexts together."""
    tightest_tbt: float = inf
    """Least TBT objective of the streams."""
    decode_seconds: float = 0.0
    """Of a step of those streams alone, or of one where there are none: no step is shorter."""
    full_seconds: float = 0.0
    """Of a step with as much prefill beside them as it gains by."""
    prefill_share: float = 1.0
    """Of such a step, what its prefill takes, above 0."""
    gives_up: bool = False
    """Whether a prompt that cannot be in time is served behind all others."""
    backlog: tuple[tuple[float, float, int], ...] = ()
    """(until its deadline, prefill work, how many of them wait for a slot) of prompts with deadlines, waiting
    and running, by deadline; neighbours are added up so that there are at most `MOST_BACKLOG_ENTRIES`. Under
    a policy that goes by arrival all prompts are in one entry, due at 0: they come before whoever arrives."""
    best_effort_work: float = 0.0
    """Prefill work of prompts without deadlines that can be met."""
    costs: PrefillCosts | None = None
    """None where the replica predicts nothing."""

    def decode_step(self, num_more: int = 0) -> float | None:
        """Return the time of a step of its decodes and so many more of a usual context; None if not known."""
        if self.costs is None:
            return None
        num_unknown = self.num_decodes + num_more - max(self.num_decodes, 1)
        return self.decode_seconds + self.costs.decode * max(0, num_unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """How a replica stands, for people and for metrics."""

    replica: ReplicaId
    state: str
    """`starting`, `ready`, `draining`, `down` or `stopped`."""
    why: str = ""
    """Of the state, where there is more to say."""
    role: str = ""
    """`prefill` or `decode`, where prompts and tokens are on replicas of their own."""
    num_lives: int = 0
    """Times that it got ready."""
    num_outstanding: int = 0
    """Requests that it has been sent and has not ended."""
    num_streaming: int = 0
    """Of these, those that have had tokens from it."""
    process_id: int | None = None
    host: str = ""
    silence: float | None = None
    """Seconds since it said anything; None where it has no process."""
    limits: ReplicaLimits | None = None
    load: ReplicaLoad | None = None
    """As it reported last; None where it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingView:
    """How a fleet that changes its own size stands, for people and for metrics."""

    policy: str
    least: int
    most: int
    """Replicas that it may have at least, and at most."""
    num_wanted: int
    """As decided last."""
    why: str = ""
    """Of the last decision, one word; nothing where there was none."""
    share: float | None = None
    """Of the time of the replicas, what the load of late would take; None where nothing is known."""
    planned_share: float | None = None
    """Up to which a replica is loaded; None where the policy knows no such share."""


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
        InvalidRequest : there is no such replica, or no other one, and nothing that starts one.
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


MOST_BACKLOG_ENTRIES = 16
