"""The one module that knows vLLM's internals: what they are called, since when, and what is refused.

Nothing here imports vLLM: a `Surface` is given a scheduler object, so that a stand-in can take its place.

`VLLMKVView` is its KV blocks, as our plans see them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

from onbeat.core.errors import ConfigError
from onbeat.scheduler.replica.request_state import RequestState


class VLLMKVView:
    """The KV of a `Table`, and its own pool, over vLLM's `KVCacheManager`.

    A model with several groups of layers has as many block tables for each request, whose blocks come from
    one pool. A block here is one of each. Layers with a sliding window give blocks back, so that there is
    more room then than is counted: what would never fit is counted as vLLM does, window by window.

    vLLM gives a prompt its blocks chunk by chunk. Here an admitted prompt has them all: what it will take
    still (`promised`) is not free.

    Parameters
    ----------
    requests : id -> vLLM's requests that onbeat knows.

    Attributes
    ----------
    num_tables : see `KVCacheManager`; all groups of a block count as one.
    promised : blocks that running prompts have yet to be given.

    Raises
    ------
    ConfigError : groups with different block sizes, or drafts that do not fit into a block.
    """

    num_tables = 1

    def __init__(self, surface: Surface, requests: dict[str, EngineRequest]) -> None:
        self._manager = manager = surface.scheduler.kv_cache_manager
        self._blocks = manager.block_pool
        self._requests = requests
        groups = list(manager.coordinator.single_type_managers)
        sizes = {int(group.block_size) for group in groups}
        if len(sizes) != 1:
            found = ", ".join(str(size) for size in sorted(sizes)) or "none"
            raise ConfigError(
                f"the model's layers have KV blocks of different sizes ({found} tokens), which onbeat cannot "
                "count yet (Mamba beside attention, say); start vLLM without --scheduler-cls"
            )
        (self.block_size,) = sizes
        self._num_groups = len(groups)
        full = [group for group in groups if type(group).__name__ == "FullAttentionManager"]
        self._main = (full or groups)[0]
        self._place = groups.index(self._main)
        self.num_blocks = (int(self._blocks.num_gpu_blocks) - 1) // self._num_groups
        watermark = int(getattr(manager, "watermark_blocks", 0)) // self._num_groups
        self._watermark = max(0, watermark - self.num_blocks // 100)
        """What vLLM keeps free beyond the watermark that plans keep."""
        self._most = self.num_blocks - self.num_blocks // 100 - self._watermark
        """Of one request, beside others."""
        self._caps = [_cap(group) for group in groups]
        self._num_beyond = surface.num_drafts + surface.num_lookahead
        if self._num_beyond > self.block_size:
            raise ConfigError(
                f"{self._num_beyond} draft tokens do not fit into a KV block of {self.block_size}; use fewer "
                "(num_speculative_tokens) or a larger --block-size"
            )
        self.promised = 0

    @property
    def pool(self) -> VLLMKVView:
        return self

    @property
    def num_free_blocks(self) -> int:
        free = int(self._blocks.get_num_free_blocks()) // self._num_groups
        return max(0, free - self.promised - self._watermark)

    def num_blocks_for(self, num_tokens: int) -> int:
        num = -(-num_tokens // self.block_size)
        return num if num <= self._most else self._within_windows(num)

    def _within_windows(self, num_blocks: int) -> int:
        """Return what a request with so many blocks of full attention holds of all groups."""
        return math.ceil(sum([min(num_blocks, cap) for cap in self._caps]) / self._num_groups)

    def match(self, state: RequestState) -> list[int]:
        request = self._requests[state.request_id]
        if getattr(request, "kv_cache_report_mode", None) == "full" and self._manager.enable_kv_cache_events:
            return []  # to look would publish the blocks a second time
        found, num_tokens, *_ = self._manager.get_computed_blocks(request)
        blocks = found.blocks[self._place][: num_tokens // self.block_size]
        return [block.block_id for block in blocks]

    @contextmanager
    def holding(self, requests: Iterable[EngineRequest]) -> Iterator[None]:
        """Keep what the cache has of these requests from being evicted for others."""
        held: list[Any] = []
        for request in requests:
            found, num_tokens, *_ = self._manager.get_computed_blocks(request)
            if num_tokens:
                held += [block for group in found.blocks for block in group if not block.is_null]
        self._blocks.touch(held)
        try:
            yield
        finally:
            self._blocks.free_blocks(reversed(held))

    def num_idle(self, block_ids: Iterable[int]) -> int:
        blocks = self._blocks.blocks
        return sum([blocks[block_id].ref_cnt == 0 for block_id in block_ids])

    def exclusive_ids(self, block_ids: Iterable[Any]) -> list[int]:
        return [block.block_id for block in block_ids if block.ref_cnt == 1 and not block.is_null]

    def follow(self, state: RequestState, num_uncertain: int = 0) -> None:
        """Let a running request hold what vLLM has given it, and be promised what its prompt lacks.

        Parameters
        ----------
        num_uncertain : tokens in flight that may be rejected, for which it has slots.
        """
        state.block_ids = blocks = self._main.req_to_blocks.get(state.request_id) or []
        num_blocks = len(blocks)
        if state.num_tokens + state.num_in_flight_tokens - state.num_computed_tokens > 1:
            num_in_all = max(-(-state.num_tokens // self.block_size), num_blocks)
            missing = num_in_all - num_blocks
            if num_in_all > self._most:
                missing = self._within_windows(num_in_all) - self._within_windows(num_blocks)
            self.promised += missing
            num_blocks = num_in_all
        state.num_allocated_tokens = num_blocks * self.block_size - self._num_beyond - num_uncertain


def _cap(group: Any) -> float:
    """Return the blocks that one request holds at most in a group of layers; the first name is of 0.31 on."""
    names = ("max_admission_blocks_per_request", "_max_admission_blocks_per_request")
    return next((cap for name in names if (cap := getattr(group, name, None)) is not None), math.inf)


HINT = "or start vLLM without --scheduler-cls"
OLDEST, NEWEST = (0, 26), (0, 33)
"""First and last minor version of vLLM whose scheduler was read and tried."""


def minor_version(version: str) -> tuple[int, int]:
    """Return the minor version of vLLM.

    Raises
    ------
    ConfigError : one that is too old, or none.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    found = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
    if found < OLDEST:
        raise ConfigError(
            f"onbeat's scheduler works inside vLLM {OLDEST[0]}.{OLDEST[1]} and later; this is vLLM "
            f"{version}. Install a later one, {HINT}"
        )
    return found


def check_settings(scheduler: Any) -> None:
    """Raise ConfigError for a setting under which vLLM would not carry out a plan."""
    config = scheduler.vllm_config
    scheduling, parallel = config.scheduler_config, config.parallel_config
    refusals = (
        (
            scheduling.policy != "fcfs",
            f"--scheduling-policy is {scheduling.policy}, but objectives are the order; leave it out "
            "(the weight of a request says what it is worth)",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size is {parallel.pipeline_parallel_size}; onbeat plans no pipelines "
            "inside vLLM yet: use tensor parallelism",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism spreads a request's KV over devices, which onbeat does not count; leave it "
            "out",
        ),
        (
            not scheduling.enable_chunked_prefill,
            "chunked prefill is off, but a step's time is kept by cutting prompts; leave out "
            "--no-enable-chunked-prefill",
        ),
        (
            scheduling.long_prefill_token_threshold > 0,
            f"--long-prefill-token-threshold is {scheduling.long_prefill_token_threshold}, which cuts "
            "prompts a second time; leave it out, objectives bound a step's prompts",
        ),
        (
            getattr(scheduling, "prefill_schedule_interval", 1) > 1
            and getattr(parallel, "data_parallel_size", 1) == 1,
            "--prefill-schedule-interval holds prompts back; leave it out, objectives say when they run",
        ),
        (
            bool(getattr(config.model_config, "is_encoder_decoder", False)),
            "the model has an encoder beside its decoder, whose blocks onbeat does not count",
        ),
        (
            bool(getattr(config.model_config, "is_diffusion", False)),
            "the model writes by diffusion, so that it has no time between tokens",
        ),
        (
            getattr(scheduler, "num_spec_tokens", 0) > 0
            and bool(scheduling.async_scheduling)
            and not getattr(scheduler, "use_v2_model_runner", False),
            "speculative decoding beside asynchronous scheduling finds its drafts by the step before, so "
            "that no stream can be skipped; add --no-async-scheduling",
        ),
    )
    for is_so, why in refusals:
        if is_so:
            raise ConfigError(f"onbeat's scheduler cannot run so: {why}, {HINT}")


_NEEDED = (
    *("running", "waiting", "requests", "current_step", "max_num_scheduled_tokens", "kv_cache_manager"),
    *("_pause_state", "_preempt_request", "finish_requests"),
    *("need_mamba_block_aligned_split", "_mamba_block_aligned_split"),
)
"""Attributes of vLLM's scheduler without which no plan can be imposed."""
_QUEUES = ("waiting", "skipped_waiting")
"""Queues from which vLLM admits what holds no KV; the second has gone with 0.31."""
_PROMOTE = ("_handle_blocked_waiting_request", "_try_promote_blocked_waiting_request")
"""Lets a request whose grammar is compiled wait for its turn; the second until 0.30."""
_RUNNING, _PREEMPTED, _GRAMMAR = "RUNNING", "PREEMPTED", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
_LOADS = "WAITING_FOR_REMOTE_KVS"


class EngineRequest(Protocol):
    """What is read of vLLM's `Request`, and the one field that is written."""

    request_id: str
    client_index: int
    arrival_time: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_preemptions: int
    max_tokens: int
    sampling_params: Any
    pooling_params: Any
    resumable: bool
    status: Any
    next_decode_eligible_step: int

    @property
    def num_tokens(self) -> int: ...

    def is_finished(self) -> bool: ...


class Surface:
    """One vLLM scheduler, by its internals.

    Parameters
    ----------
    scheduler : vLLM's, already constructed.
    version : vLLM's.

    Raises
    ------
    ConfigError : a version that is too old, a setting with which no plan can be imposed, or a lever that is
        missing.

    Attributes
    ----------
    is_untried : whether the version is newer than those that were tried.
    num_drafts : most drafts that a decode verifies.
    num_lookahead : KV slots beyond its tokens that a row needs.
    """

    def __init__(self, scheduler: Any, version: str) -> None:
        self.version = minor_version(version)
        self.is_untried = self.version > NEWEST
        self.scheduler = scheduler
        if missing := [name for name in _NEEDED if not hasattr(scheduler, name)]:
            raise ConfigError(
                f"vLLM {version}'s scheduler has no {missing[0]}, which onbeat needs to impose its plan; use "
                f"a scheduler class that is derived from vLLM's own, {HINT}"
            )
        self._queues = [name for name in _QUEUES if hasattr(scheduler, name)]
        self.num_drafts = getattr(scheduler, "num_spec_tokens", 0)
        self.num_lookahead = getattr(scheduler, "num_lookahead_tokens", 0)
        check_settings(scheduler)

    # --- what vLLM is set to --------------------------------------------------------------------------

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at once."""
        scheduler = self.scheduler
        return int(
            getattr(scheduler, "max_num_active_reqs", scheduler.vllm_config.scheduler_config.max_num_seqs)
        )

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return int(self.scheduler.vllm_config.model_config.max_model_len)

    @property
    def options(self) -> Mapping[str, Any] | None:
        """What `--additional-config` says."""
        additional = self.scheduler.vllm_config.additional_config
        return additional if isinstance(additional, Mapping) else None

    @property
    def rank(self) -> int:
        """Which of the data-parallel ranks this is."""
        return int(getattr(self.scheduler.vllm_config.parallel_config, "data_parallel_index", 0))

    @property
    def is_pooling(self) -> bool:
        """Whether the model pools, and generates nothing."""
        return bool(self.scheduler.vllm_config.model_config.runner_type == "pooling")

    # --- requests -------------------------------------------------------------------------------------

    def is_paused(self) -> bool:
        """Whether vLLM was told to schedule nothing, or nothing new."""
        scheduler = self.scheduler
        return bool(scheduler._pause_state.name != "UNPAUSED")

    @staticmethod
    def is_planned(request: EngineRequest) -> bool:
        """Whether onbeat plans a request: streaming sessions and pooling stay vLLM's."""
        return request.pooling_params is None and not request.resumable

    @staticmethod
    def is_running(request: EngineRequest) -> bool:
        return bool(request.status.name == _RUNNING)

    def may_wait(self, request: EngineRequest) -> bool:
        """Whether a request waits for a plan, and for nothing else.

        A grammar that is compiled by now is noted. What holds KV from a connector stays vLLM's until it runs,
        as does what waits among those that do.
        """
        if request.status.name == _GRAMMAR:
            promote = next(name for name in _PROMOTE if hasattr(self.scheduler, name))
            getattr(self.scheduler, promote)(request)
        if request.status.name not in ("WAITING", _PREEMPTED) or request.num_computed_tokens:
            return False
        return request not in getattr(self.scheduler, "kv_holding_waiting", ())

    @staticmethod
    def num_stale(request: EngineRequest) -> int:
        """Return the tokens of steps in flight that were planned before a request was preempted."""
        return int(getattr(request, "num_stale_output_tokens", 0))

    @staticmethod
    def extra_args(request: EngineRequest) -> Mapping[str, Any]:
        """Return what a request's `vllm_xargs` say."""
        return getattr(request.sampling_params, "extra_args", None) or {}

    @staticmethod
    def num_prompt_logprobs(request: EngineRequest) -> int | None:
        return getattr(request.sampling_params, "prompt_logprobs", None)

    @property
    def num_idle_sessions(self) -> int:
        """Places in the batch of streaming sessions that wait for their callers."""
        return int(getattr(self.scheduler, "num_waiting_for_streaming_input", 0))

    # --- levers ---------------------------------------------------------------------------------------

    def skip(self, request: EngineRequest) -> None:
        """Leave a running request out of the next step, and of no other."""
        request.next_decode_eligible_step = self.scheduler.current_step + 2

    def preempt(self, request: EngineRequest) -> None:
        """Take a running request out of the batch; its tokens are computed again later."""
        scheduler = self.scheduler
        # Schedulers that deliver no KV may not know the word: that of 0.26 does not.
        drop = {"drop_stale_output": True} if getattr(scheduler, "requires_kv_delivery", False) else {}
        scheduler._preempt_request(request, time.monotonic(), **drop)
        scheduler.running.remove(request)  # last: whatever fails, it is in one of the queues

    @contextmanager
    def only_waiting(self, planned: list[EngineRequest], known: Container[str]) -> Iterator[None]:
        """Let vLLM find, for one call of `schedule`, only these in its queue, and those that are its own.

        Requests that are not to be admitted are out of the queue meanwhile: vLLM would look at each of them.

        Parameters
        ----------
        known : ids of requests that plans admit, unless KV is loaded for them.
        """
        scheduler = self.scheduler
        chosen = {id(request) for request in planned}
        aside: dict[str, Any] = {}
        for name in self._queues:
            aside[name] = queue = getattr(scheduler, name)
            setattr(scheduler, name, type(queue)())
        for request in planned:
            scheduler.waiting.add_request(request)
        for name in self._queues:
            for request in aside[name]:
                # Those have KV from a connector, or will have.
                holds_kv = request.num_computed_tokens > 0 or request.status.name == _LOADS
                if (holds_kv or request.request_id not in known) and id(request) not in chosen:
                    getattr(scheduler, name).add_request(request)
                    chosen.add(id(request))
        try:
            yield
        finally:
            left = {name: list(getattr(scheduler, name)) for name in self._queues}
            for name in self._queues:
                queue = aside[name]
                if chosen:
                    queue.remove_requests([each for each in queue if id(each) in chosen])
                queue.prepend_requests(left[name][::-1])
                setattr(scheduler, name, queue)
            if hasattr(scheduler, "prefill_capacity_bound"):
                held = getattr(scheduler, "deferred_waiting", ())
                scheduler.prefill_capacity_bound = sum(len(aside[name]) for name in self._queues) > len(held)

    @contextmanager
    def limiting(self, limit: Callable[[str, int, int], int]) -> Iterator[None]:
        """Have each row of one call of `schedule` limited, where vLLM aligns the chunks of Mamba layers.

        Told to, it asks so for any model, and since 0.28 before it looks for pictures.

        Parameters
        ----------
        limit : from a request's id, its computed tokens and those that vLLM would give it, to what it gets.
        """
        scheduler = self.scheduler
        is_aligned, own = scheduler.need_mamba_block_aligned_split, scheduler._mamba_block_aligned_split

        def limited(request: EngineRequest, num_new_tokens: int, *found: int) -> int:
            most = num = own(request, num_new_tokens, *found) if is_aligned else num_new_tokens
            num_computed = request.num_computed_tokens + sum(found)
            if num <= request.num_tokens - num_computed:  # else it has drafts, or room for them
                num = limit(request.request_id, num_computed, num)
                num = self._whole_items(request, num_computed, num, most)
            return num

        scheduler.need_mamba_block_aligned_split, scheduler._mamba_block_aligned_split = True, limited
        try:
            yield
        finally:
            scheduler.need_mamba_block_aligned_split = is_aligned
            del scheduler._mamba_block_aligned_split

    def _whole_items(self, request: EngineRequest, num_computed: int, num: int, most: int) -> int:
        """Return the tokens of a row that cuts no picture in two, where its parts have to see each other.

        Parameters
        ----------
        num, most : tokens that it is to get, and that vLLM would give it.
        """
        if num < most and getattr(
            self.scheduler.vllm_config.scheduler_config, "disable_chunked_mm_input", False
        ):
            for item in getattr(request, "mm_features", None) or ():
                begin = item.mm_position.offset - num_computed
                end = begin + item.mm_position.length
                if 0 <= begin < num < end:
                    return int(begin or min(end, most))
        return num

    @contextmanager
    def keeping_loras(self) -> Iterator[None]:
        """Keep the places of adapters of running requests that are skipped; vLLM does so since 0.33."""
        scheduler = self.scheduler
        own = getattr(scheduler, "lora_config", None)
        if own is None or self.version > (0, 32):
            yield
            return
        shown, hidden = set[int](), set[int]()
        for request in scheduler.running:
            is_skipped = request.next_decode_eligible_step > scheduler.current_step + 1
            lora = request.lora_request
            (hidden if is_skipped else shown).add(lora.lora_int_id if lora else 0)
        scheduler.lora_config = SimpleNamespace(max_loras=own.max_loras - len(hidden - shown - {0}))
        try:
            yield
        finally:
            scheduler.lora_config = own

    @staticmethod
    def rows(output: Any) -> Iterable[tuple[str, int]]:
        """Return the rows of a step: request id, tokens."""
        rows: Mapping[str, int] = output.num_scheduled_tokens
        return rows.items()

    # --- refusals -------------------------------------------------------------------------------------

    def end(self, request_id: str) -> None:
        """End a request that is not to be served; `refusal` is what its caller hears."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @staticmethod
    def refusal(request: EngineRequest, text: str) -> Any:
        """Return the last output of a request that is not served.

        Since 0.33 an output can carry an error. Before, the text is what stopped the request; it has one
        end-of-sequence token, since the API drops the last chunk of a stream that has none.
        """
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        if "error" in EngineCoreOutput.__struct_fields__:
            from vllm.outputs import RequestError

            error = RequestError(code="onbeat_refused", message=text, retryable=True)
            return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error)
        eos = getattr(request.sampling_params, "_eos_token_id", None)
        return EngineCoreOutput(
            request.request_id, [eos or 0], finish_reason=FinishReason.ABORT, stop_reason=text
        )

    @staticmethod
    def add_outputs(outputs: dict[int, Any], refused: list[tuple[int, Any]]) -> None:
        """Put last outputs among those that go to the API servers.

        Parameters
        ----------
        refused : index of the API server, output.
        """
        from vllm.v1.engine import EngineCoreOutputs

        for client_index, output in refused:
            found = outputs.get(client_index)
            if found is None:
                outputs[client_index] = found = EngineCoreOutputs(outputs=[])
            found.outputs.append(output)
