"""Measures vLLM's steps from inside its scheduler, while nobody is served.

It is a client within the scheduler: waves of made-up requests, which are planned, run and ended like any
others. A real request ends the wave under way at once, which is sent anew when nobody is left. So a real
request waits for one step at most.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from math import inf
from statistics import median
from typing import Any, NamedTuple

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.objectives import as_extra_args
from onbeat.vllm.steps import EngineSteps, TakenStep
from onbeat.vllm.surface import EngineRequest

logger = logging.getLogger("onbeat.vllm")

ROUNDS = 3
"""Each wave is sent so often, and of steps that are alike the median counts: a compilation comes once."""
MOST_SECONDS = 30.0
"""After so long no wave is sent a second time."""
LONGEST_STEP = 1.0
"""Seconds. Once two steps in a row take longer, none with as many tokens is measured: requests may wait."""
LARGEST_BATCH = 8192
"""Most tokens of a measured step: longer ones cost in proportion."""
MOST_DECODES = 512
_MOST_PLANS = 20_000
"""Plans after which it is given up: something does not go on."""
_SMALLEST_CHUNK = 16
_SHORT = 16
"""Tokens of the prompts whose decodes read next to nothing."""
_LONGEST = 32_768
"""Tokens of the longest prompt."""
_MOST_GRAPHS = 12
"""Sizes of CUDA graphs that are measured, on both of their sides."""
_PREFIX = "onbeat-calibration-"
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

    def make(self, name: str, num_prompt: int, num_output: int, **extra_args: str) -> EngineRequest:
        """Return a request that ends for no other reason than its length."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        made: EngineRequest = Request(
            request_id=name,
            prompt_token_ids=self._random.choices(self._ids, k=num_prompt),
            sampling_params=SamplingParams(
                max_tokens=num_output, ignore_eos=True, temperature=0.0, extra_args=extra_args
            ),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        return made


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


class MadeUp(NamedTuple):
    """A request of a wave."""

    num_prompt: int
    num_output: int = 1
    after: int = 0
    """Steps of the wave that are planned before it comes."""


Wave = list[MadeUp]


def waves(limits: BatchLimits) -> list[Wave]:
    """Return waves of requests that make some 60 steps, those of small steps first."""
    longest = max(min(limits.max_model_len * 3 // 4, limits.num_kv_tokens // 2, _LONGEST), 2)
    most = min(limits.num_tokens, LARGEST_BATCH, longest)
    made: list[Wave] = [[MadeUp(most)], _decodes(limits, most), *_mixes(limits, most)]
    size = _SMALLEST_CHUNK
    while size < most:
        made.append([MadeUp(size)])
        size *= 2
    made.append([MadeUp(min(8 * limits.num_tokens, longest), 4)])
    # More than a step holds: the rest is a chunk behind what the step before has computed.
    for num in (limits.num_tokens + most // 8, limits.num_tokens + most // 2):
        parts = -(-num // longest)
        if parts <= limits.num_seqs and 2 * num <= limits.num_kv_tokens:
            made.append([MadeUp(num // parts)] * parts)
    return sorted(made, key=lambda wave: largest(wave, limits))


def largest(wave: Wave, limits: BatchLimits) -> int:
    """Return the tokens of the largest step of a wave, at most."""
    return min(sum(each.num_prompt for each in wave), limits.num_tokens)


def _decodes(limits: BatchLimits, most: int) -> Wave:
    """Return decodes that end one after another: two steps of many sizes, those of CUDA graphs and above."""
    each = limits.num_of_decode
    num = max(min(limits.num_seqs, MOST_DECODES, most // each, limits.num_kv_tokens // (16 * _SHORT)), 1)
    sizes = {1 << power for power in range(num.bit_length())} | {num}
    graphs = [size for size in limits.graph_sizes if size < num]
    for size in graphs[:: max(1, -(-len(graphs) // _MOST_GRAPHS))]:
        sizes |= {size, size + 1}
    return [MadeUp(_SHORT, 1 + 2 * sum(size > place for size in sizes)) for place in range(num)]


def _mixes(limits: BatchLimits, most: int) -> Iterator[Wave]:
    """Yield decodes that read much, alone and beside prompts of several sizes."""
    context = min(1024, most, limits.max_model_len // 4)
    room = min(limits.num_kv_tokens // 4, _LONGEST)
    for num in (4, 16, 64):
        chunks = [size for size in (64, 256, 1024) if size + num * limits.num_of_decode <= most]
        if num + len(chunks) > limits.num_seqs or num * context + sum(chunks) > room:
            return
        begin = 3 - -num * context // most  # their prompts are through
        num_output = (begin + 3 * len(chunks)) * limits.num_of_decode
        late = [MadeUp(size, 1, begin + 3 * place) for place, size in enumerate(chunks)]
        yield [MadeUp(context, num_output)] * num + late


class SelfCalibration:
    """Sends waves of requests, and keeps what their steps took.

    Parameters
    ----------
    steps : plans and follows them, as those of any requests.
    limits : what steps may hold.
    maker : of requests.

    Attributes
    ----------
    is_done : whether all is measured.
    seconds : that it has taken.
    """

    def __init__(self, steps: EngineSteps, limits: BatchLimits, maker: RequestMaker) -> None:
        self._steps, self._scheduler, self._maker = steps, steps.surface.scheduler, maker
        self._limits = limits
        self._waves = waves(limits)
        self._left = deque(self._waves * ROUNDS)
        """Waves that have yet to be run, the one under way first."""
        self._to_come: list[MadeUp] = []
        """Of the wave under way, the requests that have not been sent."""
        self._names: list[str] = []
        """Of those that were; empty where no wave is under way."""
        self._num_planned = 0
        """Steps of it."""
        self._times: dict[tuple[int, ...], list[float]] = {}
        """By the sums of the step's shape."""
        self._most_tokens = inf
        self._was_long = False
        self._num_made = self._num_plans = 0
        self.is_done = False
        self.seconds = 0.0

    @property
    def measured(self) -> list[MeasuredStep]:
        """What was measured: the median of steps that are alike."""
        return [MeasuredStep(BatchShape(*sums), median(times)) for sums, times in self._times.items()]

    def send(self) -> None:
        """Send what is to come before the next step; a new wave once nobody is served, if there is one.

        Raises
        ------
        ConfigError : it does not come to an end.
        """
        self._num_plans += 1
        if self._num_plans > _MOST_PLANS:
            raise ConfigError("measuring has stopped, and is given up")
        if not (self._names or self._scheduler.requests or self._steps.in_flight):
            self._begin_wave()
        elif self._names and not (self._to_come or self._scheduler.requests):
            self._names = []
            self._left.popleft()
        due = [each for each in self._to_come if each.after <= self._num_planned]
        self._to_come = [each for each in self._to_come if each.after > self._num_planned]
        self._num_planned += 1
        for each in due:
            self._num_made += 1
            self._names.append(f"{_PREFIX}{self._num_made}")
            extra_args = as_extra_args(RequestObjectives(), "")
            self._scheduler.add_request(
                self._maker.make(self._names[-1], each.num_prompt, each.num_output, **extra_args)
            )

    def make_room(self, request: EngineRequest) -> None:
        """Let a request have the machine that is not of the wave under way."""
        if request.request_id not in self._names:
            self.suspend()

    def take(self, taken: TakenStep) -> None:
        """Measure a step whose results vLLM has taken."""
        seconds, shape = taken.seconds, taken.noted.shape
        if not self._names or seconds <= 0:
            return
        self.seconds += seconds
        self._times.setdefault(astuple(shape), []).append(seconds)
        is_long = seconds > LONGEST_STEP
        if is_long and self._was_long:
            self._most_tokens = min(self._most_tokens, shape.num_new_tokens)
            logger.warning(
                "step times: steps of %d tokens or more take too long to measure", shape.num_new_tokens
            )
            self.suspend()
        self._was_long = is_long

    def suspend(self) -> None:
        """End the wave under way, which is sent anew later: a real request is to have the machine."""
        names, self._names, self._to_come = self._names, [], []
        for name in names:
            if name in self._scheduler.requests:
                self._steps.surface.end(name)

    def _begin_wave(self) -> None:
        is_late = self.seconds > MOST_SECONDS and len(self._left) <= (ROUNDS - 1) * len(self._waves)
        while self._left and (is_late or largest(self._left[0], self._limits) >= self._most_tokens):
            self._left.popleft()
        self.is_done = not self._left
        if not self.is_done:
            self._to_come, self._num_planned = list(self._left[0]), 0


def is_made_up(request_id: str) -> bool:
    """Whether a request is one that nobody has sent."""
    return request_id.startswith(_PREFIX)
