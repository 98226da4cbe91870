"""What computes an engine's steps, as its start sees it. A new kind is one file, and one entry in a table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from onbeat.core.errors import ConfigError
from onbeat.core.request import Pooling, Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import DeviceConfig, device_name, missed_gpu, thread_advice
from onbeat.engine.engine_config import DEFAULT_GPU_UTILIZATION, EngineConfig
from onbeat.engine.executor import StepRunner
from onbeat.engine.forward import Computes, ForwardPass
from onbeat.engine.guided_draw import Guides
from onbeat.engine.memory import USUAL_TOKENS, Footprint, free_for, modest_kv_bytes
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.pooling import OWN_POOLINGS
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.sampled import TokenSampler
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.proposer import Proposer
from onbeat.engine.step_time_spec import model_spec_of, precision_of
from onbeat.engine.weights.checkpoint import Checkpoint, loading_remarks
from onbeat.perfmodel.device_spec import find_device, known_device
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.models import StepTimeDescription, by_data_sheet
from onbeat.perfmodel.precision import Precision
from onbeat.scheduler import scheduler_config
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.replica.token_budget import LARGEST_BUDGET

Propose = Callable[[ForwardPass, scheduler_config.SchedulerConfig], Proposer]
SettleLimits = Callable[..., scheduler_config.SchedulerConfig]
"""From a number of KV blocks to limits that go with it."""


_MOST_DRAFTS = 32
"""Of a model that keeps states, as many as the native engine takes at once."""


class Runner(StepRunner, Protocol):
    """What an engine runs its steps on."""

    limits: scheduler_config.SchedulerConfig
    """What a scheduler may plan; KV blocks have the ids 0 to `limits.num_blocks` - 1."""
    guides: Guides | None
    """Where guides of grammars come from; set by whoever builds the engine. None: none is enforced."""

    @property
    def overlaps(self) -> bool:
        """Whether it takes steps while one runs, so that to plan ahead keeps the device busy."""

    @property
    def forward(self) -> Computes:
        """What its steps are computed on."""

    def touch_ahead(self) -> bool:
        """Take a little of the memory that later steps will need; return whether there was any to take."""

    def close(self) -> None:
        """Let go of what steps ran on; none may run any more."""


class Room(NamedTuple):
    """What the start of an engine leaves to the backend that serves."""

    settle: SettleLimits
    """For a backend that finds out itself how many blocks there can be."""
    draft: CheckpointBackend | None
    """Of the model that makes drafts, which will be built with the same limits."""


class Backend(Protocol):
    """How one model becomes a forward pass on one device.

    One that is made has refused all that can be refused, and has loaded nothing large.
    """

    name: str
    """The model's."""
    model: ModelConfig
    device: DeviceConfig
    description: str
    """What runs, and why it and not another, for people."""
    weights_format: str | None = None
    """Number format of most weights; None where they are of the device's type."""
    embedding_format: str | None = None
    """Of the LM head, likewise."""
    kv_format: str | None = None
    """Of keys and values, likewise."""
    block_size: int = scheduler_config.DEFAULT_BLOCK_SIZE
    """Tokens of a KV block where the user gives no number."""
    drafts_ahead: bool = False
    """Whether its steps make the drafts of the next ones themselves, where drafts are asked for."""
    embeds: bool = True
    """Whether it makes embeddings."""
    poolings: Sequence[Pooling] = OWN_POOLINGS
    """How it can make them."""
    has_workers: bool = False
    """Whether other processes compute, which the kernel ends with the thread that started them."""
    why_whole: str | None = None
    """Why it cannot compute a prompt in chunks; None where it can."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Fields of `SamplingParams` that it cannot heed, and why."""
    stands_in_for: StepTimeDescription | None = None
    """What takes its time elsewhere; None where the model runs here."""

    def start(
        self, limits: scheduler_config.SchedulerConfig, say: OnProgress, room: Room, propose: Propose | None
    ) -> tuple[Runner, scheduler_config.SchedulerConfig]:
        """Load the weights and make the KV cache; return what steps run on, and limits that go with it.

        Parameters
        ----------
        limits : of what steps may be planned, and of the KV cache.
        say : told what was decided on the way.
        propose : makes what proposes drafts; None where nothing does.

        Raises
        ------
        ConfigError : a weight cannot be read, or memory is short.
        """

    def headline(self) -> str:
        """Say what is about to be loaded."""
        device = self.device
        return (
            f"loading {self.name} ({self.model.architecture}) in {device.dtype.name} on {device.device} with "
            f"{device.num_threads} threads, {self.description}"
        )

    def precision(self) -> Precision | None:
        """Return the number formats of its steps; None where no step-time model knows them."""
        return precision_of(self.device.dtype, self.weights_format, self.embedding_format, self.kv_format)

    def ahead(self) -> StepTimeModel | None:
        """Return step times that are known before anything is loaded: they bound the largest step."""
        device, precision = self.device, self.precision()
        known = None if device.device.type == "cpu" else known_device(device_name(device))
        if known is None or precision is None:
            return None
        model, sheet = model_spec_of(self.model, self.name), find_device(known)
        return by_data_sheet(FitTarget(model=model, device=sheet, precision=precision))

    def fit(
        self, config: EngineConfig, settle: SettleLimits, draft: CheckpointBackend | None = None
    ) -> scheduler_config.SchedulerConfig:
        """Return limits that go with the memory there is.

        Raises
        ------
        ConfigError : what the user gave cannot be kept.
        """

    def remarks(self, config: EngineConfig) -> Iterator[str]:  # noqa: ARG002
        """Yield lines on what is rounded or left out, and on options that change nothing here."""
        return iter(())

    def tell_excess(self, say: OnProgress) -> None:  # noqa: ARG002
        """Say by how much more memory was taken than may be, once all is there, a draft model included."""
        return


class ForwardBackend(Backend, Protocol):
    """One that makes a forward pass; requests and sampling are the model runner's."""

    @abstractmethod
    def build(
        self, limits: scheduler_config.SchedulerConfig, say: OnProgress, room: Room | None = None
    ) -> tuple[ForwardPass, scheduler_config.SchedulerConfig]:
        """Load the weights and make the KV cache; see `start`.

        Parameters
        ----------
        room : None for a model that makes drafts: its limits stay as they are.
        """

    def sampler(self) -> TokenSampler:
        """Return what chooses tokens on the host."""
        return Sampler(self.model.vocab_size)

    def start(
        self, limits: scheduler_config.SchedulerConfig, say: OnProgress, room: Room, propose: Propose | None
    ) -> tuple[Runner, scheduler_config.SchedulerConfig]:
        """Build it, and run a first step; see `Backend.start`."""
        forward, limits = self.build(limits, say, room)
        proposer = None if propose is None else propose(forward, limits)
        runner = ModelRunner(limits, forward, self.sampler(), proposer)
        say(Detail("warming up"))
        warm_up(runner)
        return runner, limits


class CheckpointBackend(ForwardBackend):
    """One that reads the weights of a checkpoint."""

    checkpoint: Checkpoint
    has_graphs: bool = False
    frees_windows: bool = True  # whether layers with a window can have block tables of their own

    @abstractmethod
    def needs(self, block_size: int) -> Footprint:
        """Return the memory that the model takes, as calculated."""

    def fit(
        self, config: EngineConfig, settle: SettleLimits, draft: CheckpointBackend | None = None
    ) -> scheduler_config.SchedulerConfig:
        """Calculate them from `needs`; see `Backend.fit`."""
        footprint, windows = self._sized(config, draft)
        free = free_for(config.memory_share, self.device.device)
        kv_cache_bytes = config.kv_cache_memory_bytes or 0
        footprint.check_weights(free, kv_cache_bytes=kv_cache_bytes, savings=self.savings())
        state_bytes = config.limits.max_num_seqs * footprint.state_bytes
        budget = self._kv_bytes(config, footprint, free, windows)
        num_snapshots = None
        if footprint.state_bytes:
            num_snapshots = scheduler_config.with_states(config.limits, footprint.most_states(budget))[1]
        state_bytes += (num_snapshots or 0) * footprint.state_bytes
        num_blocks = footprint.num_blocks_in(budget - state_bytes)
        limits = replace(settle(num_blocks, **windows), num_snapshots=num_snapshots)
        free = free._replace(num_bytes=free.num_bytes - state_bytes)
        footprint.check_fits(
            free,
            num_blocks=limits.num_blocks,
            num_tokens=limits.max_num_batched_tokens,
            num_rows=limits.max_num_seqs,
        )
        return limits

    def savings(self) -> Iterator[tuple[str, int]]:
        """Yield flags with which the weights would take less memory, and by how much: the least first."""
        return iter(())

    def _sized(
        self, config: EngineConfig, draft: CheckpointBackend | None
    ) -> tuple[Footprint, dict[str, int]]:
        """Return what models take whose blocks are those of all tables, and `KVGroups.windows`."""
        limits = config.limits
        block_size = limits.block_size or self.block_size
        footprint = self.needs(block_size).with_drafts(config.most_drafts)
        if draft is not None:
            return footprint.beside(draft.needs(block_size).with_drafts(config.most_drafts)), {}
        longest = limits.max_model_len or self.model.max_position_embeddings
        windows = self.model.kv_groups.windows(self.model.sliding_window, longest)
        if not windows or not self.frees_windows:
            return footprint, {}
        num_tables, heads = windows["num_tables"], footprint.kv_cache.heads
        heads = tuple(heads[number] for number in self.model.layers_of_block(num_tables)) * num_tables
        return replace(footprint, kv_cache=replace(footprint.kv_cache, heads=heads)), windows

    def _kv_bytes(
        self, config: EngineConfig, footprint: Footprint, free: FreeMemory, windows: Mapping[str, int]
    ) -> int:
        """Return what KV blocks and states take together."""
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        limits, spare_bytes = config.limits, free.num_bytes - footprint.weight_bytes
        default = self.default_kv_bytes(spare_bytes, footprint.step_bytes(limits))
        needed = footprint.kv_bytes_of(self._wanted_len(limits), limits, windows)
        if needed > (most := footprint.most_kv_bytes(spare_bytes, limits)):
            # What was asked for is served as far as there is room, what is usual only where there is.
            needed = most if limits.max_model_len else 0
        return max(default, needed)

    def _wanted_len(self, limits: scheduler_config.SchedulerLimits) -> int:
        return limits.max_model_len or min(USUAL_TOKENS, self.model.max_position_embeddings)

    def bounded(
        self, config: EngineConfig, draft: CheckpointBackend | None = None
    ) -> scheduler_config.SchedulerLimits:
        """Return the limits of a configuration, within what memory and a model that keeps states allow.

        Raises
        ------
        ConfigError : more drafts than it goes with, or not even one state fits.
        """
        footprint, windows = self._sized(config, draft)
        free = free_for(config.memory_share, self.device.device)
        spare_bytes = free.num_bytes - footprint.weight_bytes
        limits = self._with_steps_that_fit(config, footprint, spare_bytes, windows)
        if not footprint.state_bytes:
            return limits
        if (most_drafts := config.most_drafts) > _MOST_DRAFTS:
            raise ConfigError(
                f"{self.name} keeps a state of each request, beside which there is room for {_MOST_DRAFTS} "
                f"drafts, but num_speculative_tokens is {most_drafts}; lower it"
            )
        footprint.check_weights(free, savings=self.savings())  # or nothing would be left for states
        budget = self._kv_bytes(replace(config, limits=limits), footprint, free, windows)
        most = footprint.most_states(budget)
        return scheduler_config.with_states(limits, most)[0]

    def _with_steps_that_fit(
        self, config: EngineConfig, footprint: Footprint, spare_bytes: int, windows: Mapping[str, int]
    ) -> scheduler_config.SchedulerLimits:
        """Return limits whose largest steps, where the user leaves these open, leave room for a request."""
        limits, policy = config.limits, composition(config.limits.policy or scheduler_config.DEFAULT_POLICY)
        is_open = limits.max_num_batched_tokens is None and config.kv_cache_memory_bytes is None
        if is_open and policy.is_bound_by_time and self.ahead() is None:
            for halvings in range(5):
                num_tokens = max(LARGEST_BUDGET >> halvings, limits.max_num_seqs)
                tried = replace(limits, max_num_batched_tokens=num_tokens)
                needed = footprint.kv_bytes_of(self._wanted_len(limits), tried, windows)
                if needed <= footprint.most_kv_bytes(spare_bytes, tried):
                    return tried if halvings else limits
        return limits

    def default_kv_bytes(self, spare_bytes: int, step_bytes: int) -> int:  # noqa: ARG002
        """Return what the KV cache takes where the user gives no size.

        Parameters
        ----------
        spare_bytes : that the weights leave.
        step_bytes : of those, what the largest steps take, about.
        """
        return modest_kv_bytes(spare_bytes)

    def plain_names(self) -> Iterable[str]:
        """Return the parameters of matrices that it keeps as plain numbers."""
        return self.checkpoint.names()

    def remarks(self, config: EngineConfig) -> Iterator[str]:
        """Yield them; see `Backend.remarks`."""
        if (advice := thread_advice(self.device)) is not None:
            yield advice
        if (rope := self.model.rope).is_long:
            original = rope.original_max_position_embeddings
            yield (
                "LongRoPE turns all requests by its angles for long contexts; answers within "
                f"{original} tokens differ from those of transformers, which goes by each request: "
                f"--max-model-len {original} gives these"
            )
        yield from loading_remarks(self.checkpoint, self.plain_names(), self.device.dtype)
        if config.device == "auto" and (lacks := missed_gpu()) is not None:
            yield lacks
        if self.has_graphs:
            return
        if config.gpu_memory_utilization != DEFAULT_GPU_UTILIZATION:
            yield "ignored: --gpu-memory-utilization (this engine's KV cache has --kv-cache-memory-bytes)"
        for name in ("enforce_eager", "cuda_graph_pieces"):
            if getattr(config, name):
                yield f"ignored: --{name.replace('_', '-')} (this engine has no CUDA graphs)"


def warm_up(runner: ModelRunner) -> None:
    """Run a chunk and a decode, so that the first request finds kernels and memory prepared.

    With a proposer, the decode has a draft. Call before the first step: it writes to the first KV blocks.
    """
    block_size, max_model_len = runner.batch.block_size, runner.limits.max_model_len
    num_tokens = max(min(64, max_model_len - 1, runner.limits.num_blocks * block_size - 1), 1)
    num_blocks = num_tokens // block_size + 1
    num_slots = min(num_blocks * block_size, max_model_len)
    num_drafts = int(runner.proposer is not None and num_tokens + 2 <= num_slots)
    request = Request(
        request_id="warm-up",
        prompt_token_ids=(0,) * num_tokens,
        sampling=SamplingParams(temperature=0.0),
    )
    name, admitted = request.request_id, AdmittedRequest(request, (), tuple(range(num_blocks)))
    chunk = ScheduledRequest(name, 0, num_tokens, (), samples=True)
    decode = ScheduledRequest(name, num_tokens, 1 + num_drafts, (), samples=True, num_draft_tokens=num_drafts)
    runner.execute(SchedulerOutput(-3, (chunk,), (admitted,), (), BatchShape()))
    if num_tokens < max_model_len:
        runner.execute(SchedulerOutput(-2, (decode,), (), (), BatchShape()))
    runner.execute(SchedulerOutput(-1, (), (), (name,), BatchShape()))
