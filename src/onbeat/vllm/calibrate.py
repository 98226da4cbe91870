"""Where step times inside vLLM come from: a profile, a measurement at the start, or a guess.

What measures is a client within vLLM's scheduler, while nobody is served: waves of made-up requests, which
are planned, run and ended like any others. A real request ends the wave under way at once, which is sent
anew when nobody is left. So a real request waits for one step at most.
"""

from __future__ import annotations

import logging
import os
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel import profile as profiles
from onbeat.perfmodel.device_spec import Parallelism, known_device
from onbeat.perfmodel.fitted import MIN_DISTINCT_SHAPES, FittedModel, fit
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import MeasuredDescription
from onbeat.perfmodel.precision import precision_by_weights
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.perfmodel.shapes import MeasuredStep, shape_matrix
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.objectives import PluginConfig, as_extra_args
from onbeat.vllm.steps import EngineSteps, TakenStep
from onbeat.vllm.surface import EngineRequest

_GUESSED_SPREAD = 0.1
"""Standard deviation of the log of measured / predicted, before anything was measured."""
_GUESSED = (
    "step times: guessed, and corrected by the first steps that run (%s). Objectives may be missed until "
    "then; `onbeat profile --from` makes a profile, which --profile names"
)
_FORMATS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "fp8": "fp8"}
"""Of weights; of others the user says what they are."""


def profile_key(vllm_config: Any) -> profiles.ProfileKey:
    """Return whose steps they are, as vLLM says of itself."""
    import vllm
    from vllm.platforms import current_platform

    model, name = vllm_config.model_config, str(current_platform.get_device_name())
    device = known_device(name) or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if current_platform.is_cpu():
        device = "cpu"
    try:
        model_name = find_model_spec(str(model.model)).name
    except ConfigError:
        model_name = str(model.model)  # simulations do not know it
    return profiles.ProfileKey(
        model=model_name,
        device=device,
        device_name=name,
        precision=precision_by_weights(_FORMATS.get(str(model.quantization or model.dtype), "bf16")),
        parallelism=Parallelism(tensor=int(vllm_config.parallel_config.tensor_parallel_size)),
        threads=len(os.sched_getaffinity(0)) if device == "cpu" else 1,
        backend="vllm",
        engine_version=str(vllm.__version__),
    )


def settings(scheduler: Any) -> dict[str, profiles.EngineValue]:
    """Return what vLLM is set to and step times hang on, beside what the key says."""
    config = scheduler.vllm_config
    compilation = getattr(config, "compilation_config", None)
    drafts = getattr(config, "speculative_config", None)
    speculation: dict[str, profiles.EngineValue] = {}
    if drafts is not None:
        names = (drafts.method, drafts.num_speculative_tokens, getattr(drafts, "model", None))
        speculation["drafts"] = " ".join(str(each) for each in names)
    return speculation | {
        "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "steps_ahead": int(bool(config.scheduler_config.async_scheduling)),
        "cuda_graphs": str(getattr(compilation, "cudagraph_mode", None)),
        "capture_sizes": ",".join(str(size) for size in capture_sizes(scheduler)),
        "kv_dtype": str(getattr(getattr(config, "cache_config", None), "cache_dtype", "auto")),
        "is_eager": bool(getattr(config.model_config, "enforce_eager", False)),
    }


def capture_sizes(scheduler: Any) -> list[int]:
    """Return the batch sizes for which vLLM has CUDA graphs: others are padded to the next."""
    compilation = getattr(scheduler.vllm_config, "compilation_config", None)
    return sorted(int(size) for size in getattr(compilation, "cudagraph_capture_sizes", None) or ())


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """The steps that an earlier start of the same engine has measured.

    Attributes
    ----------
    settings : of vLLM; what was measured with others is no use.
    """

    key: profiles.ProfileKey
    settings: Mapping[str, profiles.EngineValue]

    @property
    def path(self) -> Path:
        """Where they are kept: one file for each model and machine."""
        return profiles.profile_path(profiles.profiles_dir() / "vllm", self.key)

    def read(self) -> profiles.Profile | None:
        """Return them; None where there are none, or none of use."""
        if not self.path.is_file():
            return None
        try:
            profile = profiles.read_profile(self.path, self.key)
        except ConfigError as error:
            logger.warning("step times: measured again, because the kept ones cannot be used: %s", error)
            return None
        return profile if profile.engine == self.settings else None

    def keep(self, steps: Sequence[MeasuredStep], seconds: float) -> FittedModel:
        """Fit measured steps, keep them for later starts and return what was fitted.

        Parameters
        ----------
        seconds : that measuring has taken.

        Raises
        ------
        ConfigError : too few steps that differ.
        """
        fitted = _fit(steps, "what was measured at the start")
        profile = profiles.Profile(
            key=self.key,
            steps=steps,
            fitted=fitted,
            server=profiles.ServerTerms(steps_ahead=int(self.settings["steps_ahead"] or 0)),
            engine=self.settings,
        )
        where = f"kept as {self.path}"
        try:
            profiles.write_profile(self.path, profile)
        except OSError as error:
            where = f"not kept, since {self.path} cannot be written ({error.strerror})"
        logger.info(
            "step times: measured in %.0f s by %d steps, median error %.1f %%; %s",
            *(seconds, len(steps), 100 * fitted.errors.p50, where),
        )
        return fitted


def step_times(
    config: PluginConfig, kept: KeptSteps, hindrance: str | None
) -> tuple[FittedModel | None, bool]:
    """Return what predicts steps, None for a guess, and whether steps are to be measured now.

    Parameters
    ----------
    hindrance : why they cannot be measured here; None where they can.

    Raises
    ------
    ConfigError : the profile cannot be read or has too few steps, or steps cannot be measured as asked for.
    """
    if config.profile is not None:
        logger.info("step times: from the profile %s, corrected by the steps that run", config.profile)
        return _fit(profiles.read_profile(Path(config.profile)).steps, f"the profile {config.profile}"), False
    if config.calibrate == "always" and hindrance is not None:
        raise ConfigError(
            f"calibrate is 'always', but steps cannot be measured at this start: {hindrance}. Leave it out, "
            "and name a profile (`onbeat profile --from` makes one of a running server's steps)"
        )
    if config.calibrate == "off" or hindrance is not None:
        logger.warning(_GUESSED, hindrance or "calibrate is off")
        return None, False
    if config.calibrate == "auto" and (profile := kept.read()) is not None:
        logger.info("step times: as an earlier start measured them (%s), corrected since", kept.path)
        return _fit(profile.steps, f"the profile {kept.path}"), False
    logger.info(
        "step times: guessed at first, and measured by requests of our own while nobody is served, in "
        "about half a minute"
    )
    return None, True


def predictor(known: FittedModel | None) -> Predictor:
    """Return what predicts steps and learns from each one.

    Parameters
    ----------
    known : what it begins with; None for no machine in particular: it learns the pace of the real one.
    """
    if known is not None:
        return MeasuredDescription(fitted=known).predictor()
    return Predictor(_guessed_seconds, ResidualModel.log_normal(_GUESSED_SPREAD)).with_learning()


def _fit(steps: Sequence[MeasuredStep], what: str) -> FittedModel:
    """Return a model of measured steps that needs to know neither model nor device."""
    if not steps or len(np.unique(shape_matrix(step.shape for step in steps), axis=0)) < MIN_DISTINCT_SHAPES:
        raise ConfigError(
            f"{what} has fewer than {MIN_DISTINCT_SHAPES} steps that differ; measure more of them"
        )
    return fit(steps, None, "nnls")


def _guessed_seconds(shape: BatchShape) -> float:
    pairs = shape.query_key_pairs + shape.decode_context_tokens
    return 0.01 + 1e-4 * shape.num_new_tokens + 1e-8 * pairs


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
class StepLimits:
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


def waves(limits: StepLimits) -> list[Wave]:
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


def largest(wave: Wave, limits: StepLimits) -> int:
    """Return the tokens of the largest step of a wave, at most."""
    return min(sum(each.num_prompt for each in wave), limits.num_tokens)


def _decodes(limits: StepLimits, most: int) -> Wave:
    """Return decodes that end one after another: two steps of many sizes, those of CUDA graphs and above."""
    each = limits.num_of_decode
    num = max(min(limits.num_seqs, MOST_DECODES, most // each, limits.num_kv_tokens // (16 * _SHORT)), 1)
    sizes = {1 << power for power in range(num.bit_length())} | {num}
    graphs = [size for size in limits.graph_sizes if size < num]
    for size in graphs[:: max(1, -(-len(graphs) // _MOST_GRAPHS))]:
        sizes |= {size, size + 1}
    return [MadeUp(_SHORT, 1 + 2 * sum(size > place for size in sizes)) for place in range(num)]


def _mixes(limits: StepLimits, most: int) -> Iterator[Wave]:
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

    def __init__(self, steps: EngineSteps, limits: StepLimits, maker: RequestMaker) -> None:
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


logger = logging.getLogger("onbeat.vllm")
