"""Measures vLLM's steps from inside its scheduler, while nobody is served.

The steps are those of made-up requests, which vLLM plans, runs and ends like any others: plans of our own
(`compose`) say what each step holds. A real request ends the stage under way at once, and it is begun anew
when nobody is left. So a real request waits for one step at most.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Any

from onbeat.perfmodel.profile import EngineValue
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.scheduler.replica.parts import QueueOrder
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.filler import RESERVATION
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.impose import Imposed, impose
from onbeat.vllm.steps import EngineSteps, NotedStep
from onbeat.vllm.surface import EngineRequest

_BY_TEXT = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods of speculative decoding that find drafts in what was said; the others make as many for any text."""
_ORDINARY = (1000, 20_000)
"""Tokens that stand for text in any large vocabulary: special ones are at its ends."""


def hindrance(scheduler: Any) -> str | None:
    """Return why made-up requests must not run in a server; None where they may."""
    config = scheduler.vllm_config
    if any(getattr(scheduler, name, None) is not None for name in ("connector", "ec_connector")):
        return "a connector would hand made-up prompts to others"
    if int(getattr(config.parallel_config, "data_parallel_size", 1) or 1) > 1:
        return "data-parallel ranks run their steps together"
    method = getattr(getattr(config, "speculative_config", None), "method", None)
    if method in _BY_TEXT:
        return f"how many drafts {method} finds hangs on the text, and made-up text has next to none"
    return None


def settings(scheduler: Any) -> dict[str, EngineValue]:
    """Return what vLLM is set to and step times hang on, beside model, device and version."""
    config = scheduler.vllm_config
    compilation = getattr(config, "compilation_config", None)
    drafts = getattr(config, "speculative_config", None)
    speculation: dict[str, EngineValue] = {}
    if drafts is not None:
        names = (drafts.method, drafts.num_speculative_tokens, getattr(drafts, "model", None))
        speculation["drafts"] = " ".join(str(each) for each in names)
    return speculation | {
        "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "cuda_graphs": str(getattr(compilation, "cudagraph_mode", None)),
        "capture_sizes": ",".join(str(size) for size in capture_sizes(scheduler)),
        "kv_dtype": str(getattr(getattr(config, "cache_config", None), "cache_dtype", "auto")),
        "is_eager": bool(getattr(config.model_config, "enforce_eager", False)),
    }


def capture_sizes(scheduler: Any) -> list[int]:
    """Return the batch sizes for which vLLM has CUDA graphs: others are padded to the next."""
    compilation = getattr(scheduler.vllm_config, "compilation_config", None)
    return sorted(int(size) for size in getattr(compilation, "cudagraph_capture_sizes", None) or ())


class RequestMaker:
    """Makes requests of random tokens, which no prefix cache has.

    Parameters
    ----------
    seed : of the tokens.
    """

    def __init__(self, scheduler: Any, seed: int) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        config = scheduler.vllm_config
        manager = scheduler.kv_cache_manager
        self._random = random.Random(seed)
        num_ids = int(config.model_config.get_vocab_size())
        low, high = _ORDINARY
        self._ids = range(low, min(high, num_ids)) if num_ids > 2 * low else range(num_ids // 2, num_ids)
        self._hasher = None
        if manager.enable_caching:
            hash_blocks = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            size = int(getattr(scheduler, "hash_block_size", config.cache_config.block_size))
            self._hasher = get_request_block_hasher(size, hash_blocks)

    def make(self, name: str, num_prompt: int, num_output: int) -> EngineRequest:
        """Return a request that ends for no other reason than its length."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        made: EngineRequest = Request(
            request_id=name,
            prompt_token_ids=self._random.choices(self._ids, k=num_prompt),
            sampling_params=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        return made


LARGEST_BATCH = 8192
"""Most tokens of a measured step: longer ones cost in proportion."""
MOST_DECODES = 512
_SMALLEST_CHUNK = 16
_SHORT = 16
"""Tokens of the prompts whose decodes read next to nothing."""
_LONGEST = 32_768
"""Tokens of the longest prompt."""
_MOST_GRAPHS = 12
"""Sizes of CUDA graphs that are measured, on both of their sides."""
_SPARE = 32
"""Tokens that each request may generate beyond what is planned: steps overlap."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a step and the KV cache hold.

    Attributes
    ----------
    num_tokens : of a step.
    num_seqs : requests of a step.
    max_model_len : tokens of a request.
    num_kv_tokens : that the cache holds.
    graph_sizes : batch sizes of CUDA graphs, ascending.
    num_drafts : that each decode verifies.
    """

    num_tokens: int
    num_seqs: int
    max_model_len: int
    num_kv_tokens: int
    graph_sizes: Sequence[int] = ()
    num_drafts: int = 0

    @property
    def num_of_decode(self) -> int:
        """Tokens that a decode takes."""
        return 1 + self.num_drafts


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests, and the steps in which they are run before they end.

    Attributes
    ----------
    prompts : tokens of each request's prompt.
    steps : of each step, the requests by their place in `prompts` and the tokens that they get; one whose
        prompt is through gets one, whatever is said, and its drafts.
    num_output : tokens that each request may generate.
    """

    prompts: list[int]
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    num_output: int = 0

    @property
    def largest(self) -> int:
        """Tokens of its largest step, without drafts."""
        return max(sum(num for _, num in step) for step in self.steps)


def stages(limits: BatchLimits) -> list[Stage]:
    """Return some 60 steps, small ones first."""
    length = (limits.max_model_len - 2 * _SPARE * limits.num_of_decode) // 2
    most = max(min(limits.num_tokens, LARGEST_BATCH, length, limits.num_kv_tokens // 4), 1)
    made = [*_prompts(most), _decodes(limits, most), *_mixes(limits, most), _deep(limits, most)]
    made = [replace(each, num_output=(len(each.steps) + _SPARE) * limits.num_of_decode) for each in made]
    return sorted((stage for stage in made if stage.steps), key=lambda stage: stage.largest)


def _prompts(most: int) -> Iterator[Stage]:
    """Yield a chunk of each size, and one of the same size behind it."""
    size = _SMALLEST_CHUNK
    while size < most:
        yield Stage([2 * size], [[(0, size)], [(0, size)]])
        size *= 2
    yield Stage([2 * most], [[(0, most)], [(0, most)]])


def _deep(limits: BatchLimits, most: int) -> Stage:
    """Return the chunks of a long prompt, and decodes that read it."""
    chunk = min(most, 2048)
    room = min(
        limits.max_model_len - 2 * _SPARE * limits.num_of_decode,
        limits.num_kv_tokens // 2,
        _LONGEST,
        8 * chunk,
    )
    num_chunks = max(room // chunk, 1)
    return Stage([num_chunks * chunk], [[(0, chunk)]] * num_chunks + [[(0, 1)]] * 3)


def _decodes(limits: BatchLimits, most: int) -> Stage:
    """Return decodes of many sizes, those of CUDA graphs and just above them among them."""
    each = limits.num_of_decode
    num = min(limits.num_seqs, MOST_DECODES, most // each, limits.num_kv_tokens // (4 * _SHORT * each))
    sizes = {1 << power for power in range(num.bit_length())} | {num}
    graphs = [size for size in limits.graph_sizes if size < num]
    for size in graphs[:: max(1, -(-len(graphs) // _MOST_GRAPHS))]:
        sizes |= {size, size + 1}
    steps = _fill([_SHORT] * num, min(most, MOST_DECODES))
    steps += [[(place, 1) for place in range(size)] for size in sorted(sizes) if size <= num]
    return Stage([_SHORT] * num, steps)


def _mixes(limits: BatchLimits, most: int) -> Iterator[Stage]:
    """Yield decodes that read much, alone and beside chunks of several sizes."""
    context = min(1024, most, limits.max_model_len // 2)
    room = min(limits.num_kv_tokens // 4, _LONGEST)
    for num in (4, 16, 64):
        chunks = [size for size in (64, 256, 1024) if size + num * limits.num_of_decode <= most]
        if num + len(chunks) > limits.num_seqs or num * context + sum(chunks) > room:
            return
        prompts = [context] * num + chunks
        steps = _fill([context] * num, most)
        decodes = [(place, 1) for place in range(num)]
        steps += [decodes, decodes[: num // 2]]
        steps += [[*decodes, (num + place, size)] for place, size in enumerate(chunks)]
        yield Stage(prompts, steps)


def _fill(prompts: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Return the steps in which prompts are computed, as many as fit into each."""
    steps: list[list[tuple[int, int]]] = [[]]
    left = most
    for place, num in enumerate(prompts):
        if num > left:
            steps.append([])
            left = most
        steps[-1].append((place, num))
        left -= num
    return steps


logger = logging.getLogger("onbeat.vllm")

ROUNDS = 3
"""Each step is run so often, and the run of median length counts: a stall or a compilation comes once."""
MOST_SECONDS = 30.0
"""After so long no further round is begun."""
LONGEST_STEP = 1.0
"""Seconds. Once two steps in a row take longer, none with as many tokens is measured: requests may wait."""
_MOST_PLANS = 20_000
"""Plans after which it is given up: something does not go on."""

_PREFIX = "onbeat-calibration-"

_Key = tuple[int, int]
"""A stage by its place, and a step of it."""


class SelfCalibration:
    """Runs stages of steps, and keeps what they took. It is the composer of its own plans.

    Parameters
    ----------
    engine : plans for it; its requests are none of those that are served.
    limits : what steps may hold.
    maker : of requests.

    Attributes
    ----------
    is_done, was_given_up : whether all is measured, or it was given up.
    seconds : that it has taken.
    """

    def __init__(self, engine: EngineSteps, limits: BatchLimits, maker: RequestMaker) -> None:
        planner = engine.planner
        planner.policy = dataclasses.replace(planner.policy, composer=self)
        self._engine, self._surface, self._maker = engine, engine.surface, maker
        self._stages = list(enumerate(stages(limits)))
        self._left = deque(self._stages)
        """Stages of the round under way that have yet to be run, the one under way first."""
        self._round = 1
        self._names: list[str] = []
        """Of the requests of the stage under way; empty where none is."""
        self._next_step = 0
        self._planned: _Key | None = None
        """What the plan under way is for."""
        self._keys: dict[int, tuple[NotedStep, _Key]] = {}
        """Steps in flight."""
        self._times: dict[_Key, list[MeasuredStep]] = {}
        self._most_tokens = inf
        self._was_long = False
        self._num_made = self._num_plans = 0
        self.is_done = self.was_given_up = False
        self.seconds = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether made-up requests run, or a step of them does."""
        return bool(self._names or self._keys)

    @property
    def steps(self) -> list[MeasuredStep]:
        """What was measured: of each step, the run of median length."""
        found = []
        for runs in self._times.values():
            middle = median([run.seconds for run in runs])
            found.append(min(runs, key=lambda run: abs(run.seconds - middle)))
        return found

    @property
    def what_was_left_out(self) -> str:
        """Which steps were not measured since they take too long; empty where there were none."""
        if self._most_tokens == inf:
            return ""
        return f"steps of {self._most_tokens:g} tokens take more than {LONGEST_STEP:g} s here"

    # --- a step ---------------------------------------------------------------------------------------

    def plan(self, now: float) -> Imposed | None:
        """Return the plan of the next step to measure; None where it is not its turn, or all is done."""
        self._num_plans += 1
        if self._num_plans > _MOST_PLANS:
            self.stop()
            logger.warning("step times: measuring them has stopped, and is given up")
        if self.is_done or not (self._names or self._begin_stage()):
            return None
        engine = self._engine
        plan = engine.plan(now)
        engine.commit(plan)
        if plan.is_empty and not engine.in_flight:
            self._end_stage()  # which cannot go on
            return None
        return impose(plan, engine.table, self._surface, lambda state: state.sort_key[1:])

    def note_step(self, output: object, now: float) -> None:
        """Remember a step that vLLM has planned."""
        noted = self._engine.note_step(output, now)
        if noted is not None and self._planned is not None:
            self._keys[id(noted)] = noted, self._planned

    def take(self, output: object, now: float) -> bool:
        """Measure a step whose results vLLM has taken; return whether it was one of its own."""
        taken = self._engine.take(output, now)
        if taken is None:
            return False
        seconds = taken.seconds
        self.seconds += seconds
        _, key = self._keys.pop(id(taken.noted), (None, None))
        if key is not None and seconds > 0:
            self._times.setdefault(key, []).append(MeasuredStep(taken.noted.shape, seconds))
            is_long = seconds > LONGEST_STEP
            if is_long and self._was_long:
                self._most_tokens = min(self._most_tokens, taken.noted.shape.num_new_tokens)
            self._was_long = is_long
        return True

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 -- a composer's
        """Fill a plan with the next step of the stage; where that is not to be had, with a later one."""
        stage = self._left[0][1]
        self._planned = None
        while self._next_step < len(stage.steps) and plan.is_empty:
            self._planned = self._left[0][0], self._next_step
            for place, num in stage.steps[self._next_step]:
                state = self._engine.table.states.get(self._names[place])
                if state is not None:
                    _give(plan, state, num)
            self._next_step += 1

    def commit(self, plan: StepPlan) -> None:
        """Do nothing: a plan of it changes nothing else."""

    # --- stages ---------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Let a real request have the machine; the stage is begun anew later."""
        self._end_requests()

    def stop(self) -> None:
        """Give it up for good."""
        self.is_done = self.was_given_up = True
        self._end_requests()

    def take_in(self, request: EngineRequest, now: float) -> bool:
        """Follow a request of its own that vLLM has taken, and say so; any other has the machine."""
        if request.request_id not in self._names:
            self.suspend()
            return False
        self._engine.add(request, self._engine.table.asked(request, RequestObjectives(), now), now)
        return True

    def _begin_stage(self) -> bool:
        """Send the requests of the next stage; return whether there are any."""
        if self._keys or self._surface.scheduler.requests:
            return False  # steps in flight, or somebody is served
        while self._left and self._left[0][1].largest >= self._most_tokens:
            self._left.popleft()
        if not self._left and not self._begin_round():
            self.is_done = True
            return False
        stage: Stage = self._left[0][1]
        self._next_step = 0
        for num_prompt in stage.prompts:
            self._num_made += 1
            self._names.append(f"{_PREFIX}{self._num_made}")
            request = self._maker.make(self._names[-1], num_prompt, stage.num_output)
            self._surface.scheduler.add_request(request)
        return True

    def _begin_round(self) -> bool:
        if self._round == ROUNDS or self.seconds > MOST_SECONDS:
            return False
        self._round += 1
        self._left.extend(stage for stage in self._stages if stage[1].largest < self._most_tokens)
        return bool(self._left)

    def _end_stage(self) -> None:
        self._end_requests()
        self._left.popleft()

    def _end_requests(self) -> None:
        names, self._names = self._names, []
        for name in names:
            if name in self._surface.scheduler.requests:
                self._surface.end(name)
            self._engine.forget(name)


def is_made_up(request_id: str) -> bool:
    """Whether a request is one that nobody has sent."""
    return request_id.startswith(_PREFIX)


def _give(plan: StepPlan, state: RequestState, num: int) -> None:
    """Give a request its tokens of a step, as far as there is room."""
    if state.num_in_flight_tokens and state.will_be_full:
        return
    if state.status is not RequestStatus.RUNNING:
        plan.admit(state, [], min(num, state.num_tokens), RESERVATION)
        return
    wanted = state.num_wanted_tokens
    if wanted > 1:
        plan.chunks.append((state, min(num, wanted)))
        plan.num_tokens_left -= min(num, wanted)
    elif wanted == 1 and (not plan.num_growing([state]) or plan.take_block()):
        plan.decodes.append(state)
        plan.num_tokens_left -= 1
